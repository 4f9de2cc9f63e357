"""Reading a model from a folder in diffusers' format, with safetensors."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from course.flux2.configs import Config, read_config
from course.flux2.parameters import model_parameters, parameter_shapes
from course.flux2.qwen3 import LAYERS
from course.flux2.tokenizer import Tokenizer, read_tokenizer

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
        _refuse_more(folder / part, files, part, config)
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
        If there is no safetensors file, one is missing or damaged, or two have the same parameter.
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
                names = opened.keys()
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged: {error}. Download it again.") from None
        for name in names:
            if name in found:
                raise ValueError(f"{found[name]} and {file} both have {name}: remove one of them.")
            found[name] = file
    return found


def _refuse_more(folder: Path, files: dict[str, Path], part: str, config: Config) -> None:
    """Raise a ValueError if files have a parameter that belongs to a larger model.

    The last layers of the text encoder are not read, and neither are its norm and its head.
    """
    declared = model_parameters(config)[part]
    depths = {}  # of stacks of blocks, by what comes before a block's number
    for name, parameter in declared.items():
        if "*" in name:
            depths[name.partition("*")[0]] = parameter.shape[0]
    if part == "text_encoder":
        depths[f"{LAYERS}."] = config.text_encoder.num_hidden_layers
    for name in files:
        before = next((each for each in depths if name.startswith(each)), None)
        if before is None:
            continue
        number = int(name.removeprefix(before).partition(".")[0])
        if number >= depths[before]:
            raise ValueError(
                f"{folder} has {name}, and its configuration means {depths[before]} such blocks: "
                "download the whole folder again."
            )


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
    return _transpose_matrix(name, value)


def to_channels_first(name: str, value: np.ndarray) -> np.ndarray:
    """The reverse: a parameter with its axes in PyTorch's order."""
    if value.ndim == 4:
        return value.transpose(3, 2, 0, 1)
    return _transpose_matrix(name, value)


def _transpose_matrix(name: str, value: np.ndarray) -> np.ndarray:
    return value.T if value.ndim == 2 and "embed_tokens" not in name else value


def to_files(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """A part's parameters as files have them: each block by itself, and PyTorch's order of axes."""
    blocks = {}
    for name, value in params.items():
        value = np.asarray(value)
        if "*" in name:
            blocks |= {name.replace("*", str(number)): one for number, one in enumerate(value)}
        else:
            blocks[name] = value
    return {
        name: np.ascontiguousarray(to_channels_first(name, value)) for name, value in blocks.items()
    }
