"""LoRA: pairs of small matrices whose products are added to a model's weights (arXiv:2106.09685).

``python -m course.lora SOURCE FOLDER FILE=SCALE [FILE=SCALE …]`` adds LoRA files to the model in the folder SOURCE, and
writes one that has them built in, for diffusers on PyTorch as well. Files may be those of diffusers and PEFT, or of
kohya's scripts (``lora_unet_…``).
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

import stable_diffusion
from course.convert import name_unet, save
from stable_diffusion import Config
from stable_diffusion.weights import map_safetensors

KOHYA = {"unet": ("lora_unet",), "text_encoder": ("lora_te", "lora_te1"), "text_encoder_2": ("lora_te2",)}
ENDINGS = re.compile(r"(.+)\.(?:(lora_A|lora_down|lora\.down)|(lora_B|lora_up|lora\.up))\.weight")


class Pair(NamedTuple):
    """What is added to a weight is ``down @ up``: (inputs, rank) times (rank, outputs).

    For a convolution, ``down`` is (size, size, inputs, rank), and ``up`` is (1, 1, rank, outputs).
    """

    down: jax.Array
    up: jax.Array

    @property
    def product(self) -> jax.Array:
        """In the weight's shape, float32."""
        up = self.up.reshape(self.up.shape[-2:])
        return jnp.float32(self.down) @ jnp.float32(up)


def read_lora(file: str | Path, params: dict, config: Config) -> dict[str, dict[str, Pair]]:
    """Read a LoRA file for a model.

    Parameters
    ----------
    file : str or Path
        Safetensors of diffusers and PEFT (``unet.….lora_A.weight``) or of kohya (``lora_unet_….lora_down.weight``).
    params, config : dict, Config
        The model's, as ``stable_diffusion.load`` gives them. Shapes are enough, as of ``parameter_shapes``.

    Returns
    -------
    dict
        For each part, pairs by the name of the weight to which their product is added. Alpha is in them already.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged or a pickle, it has keys that fit nothing in the model, which are listed, or
        shapes of a different model.
    """
    file = Path(file)
    if file.suffix in (".pt", ".bin", ".ckpt"):
        raise ValueError(f"{file} is a pickle, which can run any program when it is read: get it as safetensors.")
    found, layers = map_safetensors(file), _layers(params, config)
    scales = _scales(file)
    downs, ups, alphas, strange = {}, {}, {}, []
    for key, value in found.items():
        match = ENDINGS.fullmatch(key)
        layer = match[1] if match else key.removesuffix(".alpha")
        if layer not in layers or not (match or (key.endswith(".alpha") and value.size == 1)):
            strange.append(key)
        elif match:
            (downs if match[2] else ups)[layer] = value
        else:
            alphas[layer] = float(value.item())
    strange += [f"{layer}, of which only one half is there" for layer in downs.keys() ^ ups.keys()]
    if strange or not downs:
        some = "; ".join(sorted(strange)[:5]) or "no keys of a LoRA"
        raise ValueError(f"{file} has {len(strange)} keys that fit nothing in this model: {some}. Get one made for it.")
    lora = {}
    for layer, down in downs.items():
        part, name = layers[layer]
        weight, up, rank = params[part][name], ups[layer], down.shape[-1]
        if len(weight.shape) == 4:
            down, up = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in (down, up))
        if (shape := (*down.shape[:-1], up.shape[-1])) != weight.shape:
            raise ValueError(f"{file} has {layer} for {shape}, and this model has {weight.shape}: get one made for it.")
        if up.shape[-2:-1] != (rank,):
            raise ValueError(f"{file} has halves of {layer}, {down.shape} and {up.shape}, of two ranks: get it again.")
        factor = alphas[layer] / rank if layer in alphas else scales(part, layer.removeprefix(f"{part}."), rank)
        lora.setdefault(part, {})[name] = Pair(jnp.float32(down), jnp.float32(np.float32(up) * factor))
    return lora


def _layers(params: dict, config: Config) -> dict[str, tuple[str, str]]:
    """By what a file may call a layer, the part and the name of its weight."""
    layers = {}
    for part, of in params.items():
        for name in of:
            if name.endswith(".weight"):
                names = [name] + ([name_unet(name, config)] if part == "unet" else [])
                layers[f"{part}.{name.removesuffix('.weight')}"] = part, name
                for prefix in KOHYA.get(part, ()):  # kohya writes XL's UNet in the original layout
                    for each in names:
                        layers[f"{prefix}_{each.removesuffix('.weight').replace('.', '_')}"] = part, name
    return layers


def _scales(file: Path):
    """A function that says what a file's metadata says of alpha: PEFT's options, or nothing, which means 1."""
    with safe_open(file, framework="numpy") as opened:
        said = (opened.metadata() or {}).get("lora_adapter_metadata", "{}")
    try:
        options = json.loads(said)
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} has options of PEFT that are damaged: {error}. Get it again.") from None

    def scale(part: str, layer: str, rank: int) -> float:
        patterns = options.get(f"{part}.alpha_pattern") or {}
        alpha = options.get(f"{part}.lora_alpha", rank)
        alpha = next((own for end, own in patterns.items() if re.fullmatch(rf"(.*\.)?({end})", layer)), alpha)
        return alpha / (rank**0.5 if options.get(f"{part}.use_rslora") else rank)

    return scale


def merge(params: dict, lora: dict, scale: float | jax.Array = 1.0) -> dict:
    """Add a LoRA to parameters, ``scale`` times. To take it out again, merge it with minus the scale.

    A new dictionary, whose other arrays are the old ones.
    """
    return _replace(params, lora, lambda weight, pair: _add(weight, pair, scale))


def _add(weight: jax.Array, pair: Pair, scale) -> jax.Array:
    return (weight.astype(jnp.float32) + scale * pair.product).astype(weight.dtype)


def _replace(params: dict, lora: dict, change) -> dict:
    new = {part: {name: change(params[part][name], pair) for name, pair in of.items()} for part, of in lora.items()}
    return params | {part: params[part] | of for part, of in new.items()}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight with a LoRA beside it, which stands in for the sum: an array can be multiplied by it."""

    weight: jax.Array  # or a weight with a LoRA
    pair: Pair
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    def __getitem__(self, place):  # of a convolution of one pixel
        return Adapted(self.weight[place], Pair(*(x[place] for x in self.pair)), self.scale)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        y = x @ self.pair.down.astype(x.dtype)  # (..., rank)
        return x @ self.weight + (y * self.scale).astype(x.dtype) @ self.pair.up.astype(x.dtype)


def attach(params: dict, lora: dict, scale: float | jax.Array) -> dict:
    """Parameters with a LoRA beside the weights, for a call in the program that uses them.

    Then the scale is an input like any other. Each layer multiplies by two small matrices more. Only convolutions of
    more than one pixel are added up, for the time of the call.
    """

    def change(weight, pair):
        small = len(weight.shape) == 2 or weight.shape[:2] == (1, 1)
        return Adapted(weight, pair, jnp.float32(scale)) if small else _add(weight, pair, scale)

    return _replace(params, lora, change)


def file_and_scale(argument: str) -> tuple[Path, float]:
    """What is meant by FILE=SCALE."""
    file, _, scale = argument.rpartition("=")
    return Path(file), float(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder in diffusers' format")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("loras", nargs="+", type=file_and_scale, metavar="FILE=SCALE")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    try:
        params, config, _ = stable_diffusion.load(arguments.source, arguments.dtype)
        for file, scale in arguments.loras:
            lora = read_lora(file, params, config)
            params = merge(params, lora, scale)
            counts = " and ".join(f"{len(of)} weights of {part}" for part, of in lora.items())
            print(f"Added {file}, {scale} times, to {counts}.")
        save(params, arguments.source, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"Wrote {arguments.folder}.")


if __name__ == "__main__":
    main()
