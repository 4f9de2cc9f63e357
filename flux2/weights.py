"""Reading a model from a folder in diffusers' format, with safetensors."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from flux2.configs import Config, read_config
from flux2.parameters import parameter_shapes
from flux2.tokenizer import Tokenizer, read_tokenizer

# Blocks that are equal but for their numbers. A file has each of them by its number, and the model
# has them as one array, with "*" in place of the number.
BLOCK = re.compile(r"((?:single_)?transformer_blocks|model\.layers)\.(\d+)\.")
USABLE = ("F64", "F32", "F16", "BF16")  # dtypes by the names that files have for them


def load(
    folder: str | Path,
    dtype: Any = jnp.bfloat16,
    sharding: jax.sharding.Sharding | dict | None = None,
) -> tuple[dict[str, dict[str, jax.Array]], Config, Tokenizer]:
    """Read a model from a folder in diffusers' format.

    The numbers go from the files to the devices one parameter at a time, so that the host never
    holds the whole model.

    Parameters
    ----------
    folder : str or Path
        With ``model_index.json`` and a folder for each part.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16. Norms and the sampler compute in
        float32 in any case.
    sharding : jax.sharding.Sharding or dict, optional
        Where parameters lie: a sharding for all, or one for each, as ``flux2.shardings`` gives
        them.

    Returns
    -------
    params : dict
        A dictionary of parameters for each part: transformer, text_encoder and vae.
    config : Config
    tokenize : Tokenizer
        A function from a list of prompts to token ids and their mask.

    Raises
    ------
    FileNotFoundError, ValueError
        If something is missing, damaged, or not what the configuration means.
    """
    folder = Path(folder)
    config = read_config(folder)
    tokenize = read_tokenizer(folder / "tokenizer")
    params = {}
    for part, shapes in parameter_shapes(config, dtype).items():
        files = find_parameters(folder / part)
        params[part] = {}
        for name, shape in shapes.items():
            value = _read(folder / part, files, name, shape)
            where = sharding[part][name] if isinstance(sharding, dict) else sharding
            # Waiting for it lets the host's copy go before the next one is read.
            params[part][name] = jax.device_put(value, where).block_until_ready()
    return params, config, tokenize


def find_parameters(folder: Path) -> dict[str, Path]:
    """In which file of a part each parameter is, by the names that files have.

    Raises
    ------
    FileNotFoundError, ValueError
        If there is no safetensors file, or one is missing or damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        files = [folder / name for name in sorted(set(named))]
    if not files:
        raise FileNotFoundError(f"{folder} has no safetensors: download the folder again.")
    found = {}
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: download it.")
        try:
            with safe_open(file, framework="numpy") as opened:
                found |= dict.fromkeys(opened.keys(), file)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}. Download it again.") from None
    return found


def _read(
    folder: Path, files: dict[str, Path], name: str, shape: jax.ShapeDtypeStruct
) -> np.ndarray:
    """One parameter of a model, from all blocks if it is stacked."""
    if "*" not in name:
        return _read_one(folder, files, name, shape.shape, shape.dtype)
    value = np.empty(shape.shape, shape.dtype)
    for number in range(len(value)):
        one = name.replace("*", str(number))
        value[number] = _read_one(folder, files, one, shape.shape[1:], shape.dtype)
    return value


def _read_one(
    folder: Path, files: dict[str, Path], name: str, shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    if name not in files:
        raise ValueError(f"{folder} has no {name}, which its configuration means.")
    with safe_open(files[name], framework="numpy") as opened:
        kind = opened.get_slice(name).get_dtype()
        if kind.startswith("F8"):
            raise ValueError(
                f"{files[name]} holds numbers of 8 bits ({kind}, called fp8): get the file in "
                "float16 or bfloat16."
            )
        if kind not in USABLE:
            raise ValueError(
                f"{files[name]} holds numbers as {kind}: get float32, float16 or bfloat16."
            )
        value = to_channels_last(name, opened.get_tensor(name))
    if value.shape != shape:
        raise ValueError(
            f"{folder} has {value.shape} for {name}, and its configuration means {shape}."
        )
    return value.astype(dtype)


def to_channels_last(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter of a file with its axes in our order in place of PyTorch's.

    A convolution is turned from (out, in, height, width) to (height, width, in, out), and a linear
    layer from (out, in) to (in, out). The table of embeddings stays as it is.
    """
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim == 2 and "embed_tokens" not in name:
        return value.T
    return value


def to_files(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The reverse for one part: each block by itself, with names and axes as files have them."""
    found = {}
    for name, value in params.items():
        value = np.asarray(value)
        names = [name.replace("*", str(k)) for k in range(len(value))] if "*" in name else [name]
        for one, each in zip(names, value if "*" in name else [value], strict=True):
            if each.ndim == 4:
                each = each.transpose(3, 2, 0, 1)
            elif each.ndim == 2 and "embed_tokens" not in one:
                each = each.T
            found[one] = np.ascontiguousarray(each)
    return found


def stack_blocks(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A part's parameters as the model has them, of those that files or PyTorch have.

    >>> blocks = {f"model.layers.{k}.norm.weight": np.zeros(2) for k in range(2)}
    >>> {name: value.shape for name, value in stack_blocks(blocks).items()}
    {'model.layers.*.norm.weight': (2, 2)}
    """
    blocks = {}
    for name, value in values.items():
        match = BLOCK.match(name)
        number = int(match.group(2)) if match else None
        model_name = BLOCK.sub(r"\1.*.", name)
        blocks.setdefault(model_name, {})[number] = to_channels_last(name, value)
    found = {}
    for name, by_number in blocks.items():
        if None in by_number:
            found[name] = by_number[None]
        else:
            found[name] = np.stack([by_number[k] for k in range(len(by_number))])
    return found
