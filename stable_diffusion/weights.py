"""Parameters: their names and shapes, and how they are read from a folder in diffusers' format.

For each part ("unet", "vae", "text_encoder", "text_encoder_2") they are a dictionary with the names in the part's file.
Axes are turned while they are read, as XLA would turn them at every step: PyTorch's (out, in, height, width) and
(out, in) become (height, width, in, out) and (in, out).
"""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore
from safetensors import SafetensorError, safe_open

from stable_diffusion.configs import Config, read_config
from stable_diffusion.layers import Shapes
from stable_diffusion.pipeline import generate
from stable_diffusion.tokenizer import read_tokenizer
from stable_diffusion.vae import encode


def parameter_shapes(config: Config, dtype=jnp.float32) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Names and shapes of all parameters, as the model's own functions ask for them; nothing is computed."""
    parts = ("unet", "vae", "text_encoder", "text_encoder_2")[: 2 + len(config.text)]
    noted = {part: Shapes() for part in parts}
    ids = jnp.zeros((1, len(config.text), config.text[0].max_position_embeddings), jnp.int32)
    jax.eval_shape(lambda: encode(noted["vae"], config.vae, generate(noted, config, ids, jax.random.key(0), ids)))
    return {part: {n: jax.ShapeDtypeStruct(shape, dtype) for n, shape in of.items()} for part, of in noted.items()}


def load(folder: str | Path, dtype=jnp.float32, sharding=None, variant: str | None = None) -> tuple:
    """Read a model from a folder in diffusers' format, with safetensors or with Flax' msgpack.

    Names and shapes are compared first. Then the numbers go from the files to the devices, one parameter at a time.
    ``FileNotFoundError`` and ``ValueError`` say what is missing, damaged, or not what the configuration means. It gives
    a dictionary of parameters for each part; the configuration, which is hashable; and a function from a list of
    prompts to token ids, int32, (prompts, text encoders, tokens).

    Parameters
    ----------
    folder : str or Path
        With ``model_index.json`` and a folder for each part.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16. Samplers and norms compute in float32 in any case.
    sharding : jax.sharding.Sharding or callable, optional
        Where parameters lie; or a function that says it of each, from its name and shape.
    variant : str, optional
        The word that the files have in their names, such as "fp16".
    """
    folder, dtype = Path(folder), jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"The dtype is {dtype}: choose float32, or bfloat16, in which no number here is too large.")
    try:
        config = read_config(folder)
        tokenizers = [read_tokenizer(folder / name) for name in ("tokenizer", "tokenizer_2")[: len(config.text)]]
        needed = parameter_shapes(config)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise FileNotFoundError(f"{folder} is not all of a folder in diffusers' format: {error}. Get it.") from None
    found = {name: read_part(folder / name, variant) for name in needed}
    for part, shapes in needed.items():
        for name in sorted(found[part].keys() | shapes.keys()):
            have, need = (tuple(of[name].shape) if name in of else "nothing" for of in (found[part], shapes))
            if have != need:
                raise ValueError(f"{folder / part} has {have} for {name}, and its configuration means {need}.")

    def place(name: str, value: np.ndarray) -> jax.Array:
        where = sharding(name, value.shape) if callable(sharding) else sharding
        return jax.device_put(np.array(value, dtype), where).block_until_ready()  # then the host's copy can go

    params = {part: {name: place(name, value) for name, value in values.items()} for part, values in found.items()}
    return params, config, lambda prompts: np.stack([tokenize(prompts) for tokenize in tokenizers], axis=1)


OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}  # the VAE's, and in Flax


def read_part(folder: Path, variant: str | None = None) -> dict[str, np.ndarray]:
    """The parameters of one part by name; those in safetensors stay on disk until they are looked at."""
    found = {}
    for file in find_files(folder, variant):
        found |= read_flax(file) if file.suffix == ".msgpack" else map_safetensors(file)
    found.pop("text_model.embeddings.position_ids", None)  # the numbers from 0 to 76, in files from before 2023
    old = re.compile(rf"(?<=attentions\.0\.)({'|'.join(OLD_NAMES)})(?=\.)")
    return {old.sub(lambda match: OLD_NAMES[match[0]], name): value for name, value in found.items()}


def find_files(folder: Path, variant: str | None) -> list[Path]:
    """The files of one part; a ``FileNotFoundError`` says what there is in place of them."""
    word = f".{variant}" if variant else ""
    for stem in ("diffusion_pytorch_model", "model"):
        if (file := folder / f"{stem}{word}.safetensors").exists():
            return [file]
        if (index := folder / f"{stem}.safetensors.index{word}.json").exists():  # half of one names too few files
            return [folder / name for name in sorted(set(re.findall(r'"([^"]+\.safetensors)"', index.read_text())))]
    if not variant and (files := [*folder.glob("*flax_model.msgpack")]):
        return files
    there = ", ".join(sorted(file.name for file in folder.glob("*model*"))) or "nothing"
    advice = f"give the variant in its files' names, which is {variant} now"
    if ".safetensors" not in there:
        advice = "get safetensors; a .bin or .ckpt is not read, as it is a pickle, which can run any program"
    raise FileNotFoundError(f"{folder} has no parameters that can be read, but {there}: {advice}.")


DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64}


def map_safetensors(file: Path) -> dict[str, np.ndarray]:
    """The parameters in a file, which are looked up on disk: only its header is read."""
    try:
        with safe_open(file, framework="numpy"), file.open("rb") as opened:  # which checks the file
            start = 8 + int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(start - 8))
    except (OSError, SafetensorError) as error:
        kind = FileNotFoundError if isinstance(error, FileNotFoundError) else ValueError
        raise kind(f"{file} is missing, damaged or no safetensors: {error}. Get it again.") from None
    header.pop("__metadata__", None)
    if strange := {entry["dtype"] for entry in header.values()} - DTYPES.keys():
        raise ValueError(f"{file} holds numbers as {', '.join(strange)}: get float32, float16 or bfloat16.")
    numbers = np.memmap(file, np.uint8, "r")[start:]
    views = {name: numbers[slice(*of["data_offsets"])].view(DTYPES[of["dtype"]]) for name, of in header.items()}
    return {name: turn(name, view.reshape(header[name]["shape"])) for name, view in views.items()}


def turn(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter with its axes in our order in place of PyTorch's."""
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    return value.T if value.ndim == 2 and not name.endswith("embedding.weight") else value


def read_flax(file: Path) -> dict[str, np.ndarray]:
    """Parameters that a Flax pipeline saved: with PyTorch's names, and axes that are in our order already."""
    found = {}

    def flatten(tree: dict, above: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                numbered = name if name.startswith("linear_") else re.sub(r"_(\d+)$", r".\1", name)
                flatten(value, f"{above}{numbered}.")  # down_blocks_0 becomes down_blocks.0
            else:
                found[above + {"bias": "bias"}.get(name, "weight")] = value  # from kernel, scale or embedding

    flatten(msgpack_restore(file.read_bytes()), "")
    return found
