"""Reading a model from a folder in diffusers' format.

For each part ("unet", "vae", "text_encoder", "text_encoder_2") parameters are a dictionary with the
names in the part's file, but that equal layers are stacked: ``jax.lax.scan`` runs them one after
another. The order of axes changes while they are read, or XLA would change it at every step:
PyTorch's (out, in, height, width) becomes (height, width, in, out), and (out, in) becomes (in,
out).
"""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore
from safetensors import SafetensorError, safe_open

from course.sd.configs import Config, read_config
from course.sd.parameters import parameter_shapes
from course.sd.tokenizer import Tokenizer, read_tokenizer

# How safetensors call dtypes. A file may have any of them: only what a model uses has to be floats
# of 16 bits or more.
DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
USABLE = ("float64", "float32", "float16", "bfloat16")

# What files of other kinds begin with, whatever they are called.
PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x04")
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")

# Names in the VAE's attention, as in Flax and in files from before 2023, and what they are now.
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


# Layers that are equal but for their numbers. A file has each of them by its number, and a model
# has them as one array, with "*" in place of the number and a first axis for the layers.
LAYER = re.compile(r"(.*\b(?:transformer_blocks|encoder\.layers)\.)(\d+)(\..+)")


def stacked_name(name: str) -> tuple[str, int | None]:
    """What a parameter of a file is called in a model, and which layer's it is.

    >>> stacked_name("mid_block.attentions.0.transformer_blocks.3.norm1.bias")
    ('mid_block.attentions.0.transformer_blocks.*.norm1.bias', 3)
    >>> stacked_name("conv_in.bias")
    ('conv_in.bias', None)
    """
    found = LAYER.fullmatch(name)
    if found is None:
        return name, None
    before, number, after = found.groups()
    return f"{before}*{after}", int(number)


def names_in_files(name: str, shape: tuple[int, ...]) -> list[str]:
    """What a file calls the layers of a model's parameter; for most, one name, which is the same.

    >>> names_in_files("text_model.encoder.layers.*.layer_norm1.bias", (2, 32))
    ['text_model.encoder.layers.0.layer_norm1.bias', 'text_model.encoder.layers.1.layer_norm1.bias']
    """
    if "*" not in name:
        return [name]
    return [name.replace("*", str(layer)) for layer in range(shape[0])]


def unstack_layers(values: dict[str, Any]) -> dict[str, Any]:
    """A part's parameters by the names that files have; of stacked ones, each layer by itself.

    They may be arrays or shapes. Those that are not stacked stay as they are.
    """
    found = {}
    for name, value in values.items():
        if "*" not in name:
            found[name] = value
            continue
        names = names_in_files(name, value.shape)
        if isinstance(value, jax.ShapeDtypeStruct):
            found |= dict.fromkeys(names, value.update(shape=value.shape[1:]))
        else:
            found |= dict(zip(names, value, strict=True))
    return found


def stack_layers(values: dict[str, Any]) -> dict[str, Any]:
    """The reverse of ``unstack_layers``, for arrays."""
    layers = {}  # by the name in a model, all arrays by their layers
    for name, value in values.items():
        model_name, layer = stacked_name(name)
        layers.setdefault(model_name, {})[layer] = value
    found = {}
    for name, by_layer in layers.items():
        if None in by_layer:
            found[name] = by_layer[None]
        else:
            found[name] = np.stack([by_layer[layer] for layer in range(len(by_layer))])
    return found


def load(
    folder: str | Path,
    dtype: Any = jnp.float32,
    sharding: jax.sharding.Sharding | dict | None = None,
    variant: str | None = None,
) -> tuple[dict[str, dict[str, jax.Array]], Config, Tokenizer]:
    """Read a model from a folder in diffusers' format, with safetensors or Flax' msgpack.

    Names and shapes are compared first. Then the numbers go from the files to the devices, one
    parameter at a time.

    Parameters
    ----------
    folder : str or Path
        With ``model_index.json`` and a folder for each part.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16. Samplers and norms compute in float32 in
        any case.
    sharding : jax.sharding.Sharding or dict, optional
        Where parameters lie: a sharding for all, or one for each, as
        ``course.sd.shardings`` gives them.
    variant : str, optional
        The word that the files have in their names, such as "fp16".

    Returns
    -------
    params : dict
        A dictionary of parameters for each part.
    config : Config
        The configuration, which is hashable.
    tokenize : Tokenizer
        A function from a list of prompts to token ids, int32, (prompts, text encoders, tokens).

    Raises
    ------
    FileNotFoundError, ValueError
        If something is missing, damaged, or not what the configuration means.
    """
    folder = Path(folder)
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"The dtype is {dtype}: choose float32, or bfloat16, in which no number here is too "
            "large."
        )
    try:
        config = read_config(folder)
        tokenizers = [read_tokenizer(folder / "tokenizer")]
        if len(config.text) == 2:
            tokenizers.append(read_tokenizer(folder / "tokenizer_2"))
        shapes = parameter_shapes(config)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise FileNotFoundError(
            f"{folder} is not a whole folder in diffusers' format: {error}. Download it again."
        ) from None
    found = {part: read_part(folder / part, variant) for part in shapes}
    for part in shapes:
        _check_shapes(folder / part, found[part], unstack_layers(shapes[part]))

    params = {}
    for part, values in found.items():
        params[part] = {}
        # In the order of the file, with all layers of a stacked parameter where the first one is.
        for name in dict.fromkeys(stacked_name(name)[0] for name in values):
            shape = shapes[part][name].shape
            if "*" not in name:
                value = np.array(values[name], dtype)
            else:
                value = np.empty(shape, dtype)
                for layer, each in enumerate(names_in_files(name, shape)):
                    value[layer] = values[each]
            where = sharding[part][name] if isinstance(sharding, dict) else sharding
            placed = jax.device_put(value, where)
            # So that the host's copy can go before the next one is read.
            params[part][name] = placed.block_until_ready()
    return params, config, Tokenizer(tuple(tokenizers))


def _check_shapes(folder: Path, found: dict, shapes: dict) -> None:
    """Raise ``ValueError`` if a part's files have other names, shapes or dtypes than it needs."""
    for name in sorted(found.keys() | shapes.keys()):
        have = found[name].shape if name in found else "nothing"
        need = shapes[name].shape if name in shapes else "nothing"
        if have != need:
            raise ValueError(f"{folder} has {have} for {name}, and its configuration means {need}.")
        check_numbers(folder, found[name])


def check_numbers(place: Path, value: np.ndarray) -> None:
    """Raise ``ValueError`` unless an array that a model uses has floats of 16 bits or more.

    ``place`` is the file or the folder, for the message.
    """
    name = value.dtype.name
    if name in USABLE:
        return
    if name.startswith("float8"):
        raise ValueError(
            f"{place} holds numbers of 8 bits ({name}, called fp8): get the file in float16 or "
            "bfloat16. To save memory here, read that one, and then quantize it to int8."
        )
    raise ValueError(f"{place} holds numbers as {name}: get float32, float16 or bfloat16.")


def stored_dtypes(folder: str | Path, config: Config, variant: str | None = None) -> dict[str, Any]:
    """In which dtype the files of a folder have each part: that of most of its numbers."""
    found = {}
    for part in parameter_shapes(config):
        sizes = {}
        for value in read_part(Path(folder) / part, variant).values():
            sizes[value.dtype] = sizes.get(value.dtype, 0) + value.size
        found[part] = max(sizes, key=sizes.get)
    return found


def read_part(folder: Path, variant: str | None = None) -> dict[str, np.ndarray]:
    """The parameters of one part by name; those in safetensors stay on disk until they are used.

    Raises
    ------
    FileNotFoundError, ValueError
        If files are missing or damaged.
    """
    found = {}
    for file in find_files(folder, variant):
        if file.suffix == ".msgpack":
            found |= read_flax(file)
        else:
            arrays, _ = map_safetensors(file)
            found |= arrays
    # The numbers from 0 to 76, which files from before 2023 have.
    found.pop("text_model.embeddings.position_ids", None)
    return {new_name(name): value for name, value in found.items()}


def new_name(name: str) -> str:
    """What a parameter is called today that files from before 2023 call something else."""
    for old, new in OLD_NAMES.items():
        name = name.replace(f"attentions.0.{old}.", f"attentions.0.{new}.")
    return name


def find_files(folder: Path, variant: str | None = None) -> list[Path]:
    """The files of one part.

    If there are none, a ``FileNotFoundError`` says what is there in place of them.
    """
    word = f".{variant}" if variant else ""
    for stem in ("diffusion_pytorch_model", "model"):
        file = folder / f"{stem}{word}.safetensors"
        if file.exists():
            return [file]
        index = folder / f"{stem}.safetensors.index{word}.json"
        if index.exists():
            # Of a damaged index, this takes what names it has; then parameters are found missing.
            names = re.findall(r'"([^"]+\.safetensors)"', index.read_text(encoding="utf-8"))
            return [folder / name for name in sorted(set(names))]
    flax_files = list(folder.glob("*flax_model.msgpack"))
    if flax_files and not variant:
        return flax_files
    there = ", ".join(sorted(file.name for file in folder.glob("*model*"))) or "nothing"
    if ".safetensors" in there:
        advice = f"give the variant in its files' names, which is {variant} now"
    else:
        advice = (
            "get safetensors; a .bin or .ckpt is not read, as it is a pickle, which can run any "
            "program"
        )
    raise FileNotFoundError(f"{folder} has no parameters that can be read, but {there}: {advice}.")


def map_safetensors(file: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read the header of a safetensors file, and map its arrays, which stay on disk.

    Returns
    -------
    arrays : dict of numpy.memmap
        By name, with the order of axes that this model has.
    metadata : dict of str
        What else the header says.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing or damaged, or it is a pickle or of another kind.
    """
    file = Path(file)
    if file.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{file} is {A_PICKLE}")
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: get it, or give a different file.")
    with file.open("rb") as opened:
        _refuse_other_kinds(file, opened.read(16))

    try:
        with safe_open(file, framework="numpy") as opened:  # checks the header and all offsets
            metadata = opened.metadata() or {}
    except SafetensorError as error:
        why = f"{file} is damaged or no safetensors: {error}. Get it again."
        raise ValueError(why) from None
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")  # of the header, in bytes
        header = json.loads(opened.read(length))
        data = np.memmap(opened, np.uint8, mode="r")[8 + length :]
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        numbers = data[slice(*entry["data_offsets"])]
        # A dtype that has no name in NumPy stays bytes, which nothing here can use.
        if entry["dtype"] in DTYPES:
            numbers = numbers.view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
        arrays[name] = to_channels_last(name, numbers)
    return arrays, metadata


A_PICKLE = "a pickle, which can run any program when it is read: get it as safetensors."


def _refuse_other_kinds(file: Path, start: bytes) -> None:
    """Raise ``ValueError`` if the first bytes of a file are those of a kind that is not read."""
    if start[8:9] == b"{":  # the header of safetensors, whatever its length in front of it is
        return
    if start.startswith(PICKLES):
        raise ValueError(f"{file} is {A_PICKLE}")
    if start.startswith(b"GGUF"):
        raise ValueError(
            f"{file} is GGUF, whose numbers are in blocks of 2 to 8 bits: get the model as "
            "safetensors in float16 or bfloat16."
        )
    if start.lstrip().startswith(b"<"):
        raise ValueError(
            f"{file} is a web page, as sites give it to those who have to log in: download the "
            "file in a browser, or give a token."
        )
    if start.startswith(b"version https://"):
        raise ValueError(
            f"{file} only says where the file is (Git LFS): run `git lfs pull`, or download it "
            "from its page."
        )


def to_channels_last(name: str, value: np.ndarray) -> np.ndarray:
    """A parameter with its axes in our order in place of PyTorch's.

    A convolution is turned from (out, in, height, width) to (height, width, in, out), and a linear
    layer from (out, in) to (in, out). A table of embeddings stays as it is.
    """
    if value.ndim == 4:
        return value.transpose(2, 3, 1, 0)
    if value.ndim == 2 and not name.endswith("embedding.weight"):
        return value.T
    return value


def to_channels_first(name: str, value: np.ndarray | jax.Array) -> np.ndarray:
    """A parameter with its axes in PyTorch's order in place of ours."""
    value = np.asarray(value)
    if value.ndim == 4:
        value = value.transpose(3, 2, 0, 1)
    elif value.ndim == 2 and not name.endswith("embedding.weight"):
        value = value.T
    return np.ascontiguousarray(value)


def read_flax(file: Path) -> dict[str, np.ndarray]:
    """Read parameters that a Flax pipeline saved.

    They get the names of PyTorch. The order of axes is ours already.
    """
    found = {}

    def flatten(tree: dict, prefix: str) -> None:
        for name, value in tree.items():
            if isinstance(value, dict):
                if not name.startswith("linear_"):
                    name = re.sub(r"_(\d+)$", r".\1", name)  # down_blocks_0 is down_blocks.0
                flatten(value, f"{prefix}{name}.")
            elif name == "bias":
                found[f"{prefix}bias"] = value
            else:  # a kernel, scale or embedding
                found[f"{prefix}weight"] = value

    flatten(msgpack_restore(file.read_bytes()), "")
    return found
