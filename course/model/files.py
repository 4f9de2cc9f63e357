"""Reading and writing parameters and configurations: safetensors, JSON, and Flax' msgpack.

For each part of a model ("unet", "transformer", "vae", "text_encoder" …) parameters are a
dictionary with the names in the part's files, but that equal layers are stacked: ``jax.lax.scan``
runs them one after another. The order of axes changes while they are read, or XLA would change it
at every step: PyTorch's (out, in, height, width) becomes (height, width, in, out), and (out, in)
becomes (in, out).
"""

import functools
import json
import math
import mmap
import os
import re
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_restore
from safetensors import SafetensorError, safe_open

# The dtypes that a model can use, by the names that safetensors have for them. A file may have
# others, in arrays that are not used.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# What pickles begin with, by any protocol, PyTorch's archives of them included.
PICKLE = re.compile(rb"PK\x03\x04|PK\x05\x06|\x80[\x01-\x05]|[(}\])][dlq(t]|c[\w.]+\n[\w.]+\n")
PICKLE_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
A_PICKLE = "a pickle, which can run any program when it is read: get it as safetensors."
ARCHIVES = (b"\x1f\x8b", b"7z\xbc\xaf", b"Rar!")

LONGEST_NAME = 500  # letters of an array's name
# Of a file of safetensors. The largest that are read have 3,000 arrays, and a LoRA may say in its
# header what it was trained on, in some megabytes.
LARGEST_HEADER = 2 * 10**7  # bytes
MOST_ARRAYS = 20_000
LARGEST_TEXT = 10**8  # bytes; the tokenizer of a model with 250,000 tokens has a third of that
LARGEST_NUMBER = 8  # bytes; a Flax file with more for each number of its part is none

# What a folder may call a part, and what files with parameters are called in a part's folder.
PART_NAME = re.compile(r"[a-z0-9_]+")
PARAMETER_FILE = re.compile(
    r"(diffusion_)?((pytorch|flax)_)?model([.-].+)?\.(safetensors|bin|msgpack)(\.index.*\.json)?"
)
WITH_VARIANT = re.compile(r"(?:diffusion_pytorch_)?model\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors")

# What the folder of a tokenizer may have, besides its settings.
TOKENIZER_FILES = (
    "vocab.json",
    "merges.txt",
    "tokenizer.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

# What parameters of CLIP begin with in files of transformers 5, which leaves out "text_model.".
SHORT_NAME = re.compile(r"embeddings\.(token|position)|encoder\.layers\.|final_layer_norm\.")
# Names in a VAE's attention, as in Flax and in files from before 2023, and what they are now.
OLD_NAMES = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}

# What PyTorch's and PEFT's wrappers around a model put into the name of a layer. It says nothing.
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:base_model\.model|module|_orig_mod)\.")

# Layers that are equal but for their numbers. A file has each of them by its number, and a model
# has them as one array, with "*" in place of the number and a first axis for the layers.
LAYER = re.compile(
    r"(.*\b(?:(?:single_)?transformer_blocks|(?:encoder|model)\.layers)\.)(\d+)(\..+)"
)

# How the names of matrices end that no vector is multiplied by: their rows are looked up.
TABLES = ("embedding.weight", "embed_tokens.weight")


# Places.


def find_inside(folder: Path, *names: str) -> Path:
    """Return the place of a file or folder inside of a model's folder.

    Parameters
    ----------
    folder : Path
        The model's, or that of a part of it.
    names : str
        One below the other. They may come from a file, such as the index of shards.

    Raises
    ------
    ValueError
        If the place is outside of the model's folder, by ``..`` or by a link. Links into the
        Hub's cache, where snapshots of models are made of them, are no fault.
    FileNotFoundError
        If there is a link that leads to nothing.
    """
    place = folder.joinpath(*names)
    home = folder.resolve()
    if (home.parent / "model_index.json").is_file():  # the folder is that of a part
        home = home.parent
    homes = [home]
    for parent in home.parents:
        if parent.name == "snapshots":
            homes.append(parent.parent / "blobs")
    try:
        target = place.resolve()
        is_inside = any(target.is_relative_to(each) for each in homes)
        leads_nowhere = place.is_symlink() and not place.exists()
    except (OSError, RuntimeError, ValueError):  # a loop of links, or no name of a file at all
        is_inside, leads_nowhere = False, False
    if not is_inside:
        raise ValueError(
            f"{str(place)!r} is outside of {folder}, which may only use files of its own: put the "
            "file there, or get the folder from a source that you trust."
        )
    if leads_nowhere:
        raise FileNotFoundError(
            f"{place} is a link to {target}, and nothing is there: download the folder again."
        )
    return place


# Texts.


def read_data(file: Path) -> bytes:
    """Read a file with a text, which may be in no UTF-8.

    Raises
    ------
    FileNotFoundError, ValueError
        If it is missing, no file, or so large that it is no text of a model.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: give a whole folder in diffusers' format.")
    size = file.stat().st_size
    if size > LARGEST_TEXT:
        raise ValueError(f"{file} has {size / 1e6:.0f} MB, which no such text has: get it again.")
    return file.read_bytes()


def read_text(file: str | Path) -> str:
    """Read a text file in UTF-8; errors name the file, as those of ``read_json`` do."""
    file = Path(file)
    data = read_data(file)
    try:
        return data.decode("utf-8-sig")  # Windows may write a mark in front
    except UnicodeDecodeError as error:
        refuse_other_kinds(file, data)
        raise ValueError(f"{file} is damaged, or no text: {error}. Get it again.") from None


def read_json(file: str | Path) -> dict:
    """Read a JSON file with an object in it, such as a configuration.

    Raises
    ------
    FileNotFoundError, ValueError
        If it is missing, no UTF-8, no JSON, or has something else than an object.
    """
    text = read_text(file)
    try:
        content = parse_json(text, str(file))
    except ValueError:
        refuse_other_kinds(Path(file), text.encode())
        raise
    if isinstance(content.get("error"), str):
        refuse_other_kinds(Path(file), text.encode())
    return content


def parse_json(text: str, what: str) -> dict:
    """Return the object that a text has in JSON. ``what`` the text is, is for the message.

    Raises
    ------
    ValueError
        If it is no JSON, or something else than an object.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter if it is nested without end
        raise ValueError(f"{what} is damaged, or no JSON: {error}. Get it again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{what} is no object with names and values: get it again.")
    return content


def to_json(content: dict) -> bytes:
    """Return the text of a JSON file as diffusers writes it, but that letters stay letters."""
    return f"{json.dumps(content, indent=2, ensure_ascii=False)}\n".encode()


def write_json(file: Path, content: dict) -> None:
    """Write a JSON file, by ``write_bytes``."""
    write_bytes(file, to_json(content))


def write_bytes(file: Path, data: bytes) -> None:
    """Write a file, by ``write_whole``."""
    write_whole(file, lambda place: place.write_bytes(data))


def write_whole(file: Path, write: Callable[[Path], Any]) -> None:
    """Write a file beside its place, and move it there once it is whole and on the disk.

    So a disk that is full, or a power cut, leaves an earlier file as it was. The file's folder is
    made if it is not there. Whoever may read other new files of this user may read it.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")  # no other process'
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.unlink(missing_ok=True)  # it may be a link
        unfinished.touch()
        mode = unfinished.stat().st_mode  # as the umask has it, which safetensors does not ask
        write(unfinished)
        unfinished.chmod(mode)
        with unfinished.open("rb+") as stream:
            os.fsync(stream.fileno())
        unfinished.replace(file)
    except (OSError, SafetensorError) as error:  # the latter is no OSError, whatever went wrong
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"{file} cannot be written ({reason}): make room, or give a different place, and start "
            "the same again."
        ) from None
    finally:
        if unfinished.is_file():
            unfinished.unlink()


# Safetensors.


@dataclass(frozen=True)
class Stored:
    """An array in a file. Its numbers stay on disk until ``read`` or ``np.asarray`` gets them."""

    shape: tuple[int, ...]
    dtype: np.dtype | str  # if no model can use it, the name that the file has for it
    read: Callable[[], np.ndarray]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.read(), dtype)

    def change(self, function: Callable[[np.ndarray], np.ndarray]) -> "Stored":
        """Return what a function makes of the array, which is called when that is read.

        The function may cut the array, and change the order of its axes.
        """
        without_numbers = np.broadcast_to(np.int8(0), self.shape)
        shape = function(without_numbers).shape
        return Stored(shape, self.dtype, lambda: function(self.read()))


class Rows(NamedTuple):
    """Where a parameter is in an array of a file: in some of so many equal pieces of its rows.

    Files may have several matrices as one, one below the other, or the same in another order.

    >>> Rows(3, (1,)).take(np.arange(6))
    array([2, 3])
    >>> Rows(2, (1, 0)).take(np.arange(6))
    array([3, 4, 5, 0, 1, 2])
    """

    pieces: int
    taken: tuple[int, ...]  # which of them the parameter is, from 0 on, in its own order

    def take(self, value: np.ndarray, axis: int = 0) -> np.ndarray:
        """Return the parameter, whose rows are on that axis. The pieces have to divide it."""
        pieces = np.split(value, self.pieces, axis)
        taken = [pieces[n] for n in self.taken]
        return taken[0] if len(taken) == 1 else np.concatenate(taken, axis)

    def whole(self, size: int) -> int:
        """Return how many rows the array has, if the parameter has so many."""
        return size // len(self.taken) * self.pieces

    def put(self, value: np.ndarray, axis: int = 0) -> np.ndarray:
        """Return the array with the parameter in its rows, and zeros in the others.

        >>> Rows(3, (1,)).put(np.array([2, 3]))
        array([0, 0, 2, 3, 0, 0])
        """
        own = np.split(value, len(self.taken), axis)
        pieces = [np.zeros_like(own[0])] * self.pieces
        for n, piece in zip(self.taken, own, strict=True):
            pieces[n] = piece
        return np.concatenate(pieces, axis)


def read_safetensors(file: str | Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read what the header of a safetensors file says, and leave the numbers on disk.

    Builds on ``safetensors.safe_open``, which compares the header with the size of the file.

    Returns
    -------
    arrays : dict of Stored
        By name, with the order of axes that they have in the file.
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
    with file.open("rb") as stream:
        start = stream.read(200)
    length = int.from_bytes(start[:8], "little")  # of the header, which is JSON
    if start[8:9] != b"{" or length > file.stat().st_size:
        refuse_other_kinds(file, start)
    elif length > LARGEST_HEADER:
        raise ValueError(
            f"{file} has a header of {length / 1e6:.0f} MB, which no model here has: get it from a "
            "source that you trust."
        )
    try:
        opened = safe_open(file, framework="numpy")
    except SafetensorError as error:
        why = f"{file} is damaged or no safetensors: {error}. Get it again."
        raise ValueError(why) from None
    names = opened.offset_keys()  # in the order of the numbers
    if len(names) > MOST_ARRAYS:
        raise ValueError(
            f"{file} has {len(names)} arrays, which no model here has: get it from a source "
            "that you trust."
        )
    arrays = {}
    for name in names:
        check_name(file, name)
        entry = opened.get_slice(name)
        kind = entry.get_dtype()
        dtype = jnp.dtype(FLOATS[kind]) if kind in FLOATS else kind
        read = functools.partial(_read_array, opened, file, name)
        arrays[name] = Stored(tuple(entry.get_shape()), dtype, read)
    return arrays, opened.metadata() or {}


def _read_array(opened: Any, file: Path, name: str) -> np.ndarray:
    """Read one array of an open file of safetensors, and check its numbers."""
    value = opened.get_tensor(name)
    check_finite(file, name, value)
    return value


def refuse_other_kinds(file: Path, start: bytes) -> None:
    """Raise ``ValueError`` if a file is of a kind that is not read, by its first bytes.

    Nothing is raised where they do not say what it is.
    """
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"GGUF"):
        raise ValueError(
            f"{file} is GGUF, whose numbers are in blocks of 2 to 8 bits: get the model as "
            "safetensors in float16 or bfloat16."
        )
    if text.startswith(b"<"):
        raise ValueError(
            f"{file} is a web page, as sites give it to those who have to log in: download the "
            "file in a browser, or give a token."
        )
    if text.startswith(b"version https://"):
        raise ValueError(
            f"{file} only says where the file is (Git LFS): run `git lfs pull`, or download it "
            "from its page."
        )
    if PICKLE.match(start):
        raise ValueError(f"{file} is {A_PICKLE}")
    if start.startswith(ARCHIVES):
        raise ValueError(f"{file} is an archive: unpack it, and give the file that is in it.")
    is_text = re.match(rb"[\s -~]{9}", text)
    if is_text and (b'"error"' in text[:200] or not text.startswith((b"{", b"["))):
        message = " ".join(text[:80].decode("utf-8", "replace").split())
        raise ValueError(
            f"{file} is the message of a site in place of the file, {message!r}: log in there, or "
            "give a token, and download it again."
        )


def check_name(file: Path, name: str) -> None:
    """Raise ``ValueError`` if an array's name is one that no message should show."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise ValueError(
            f"{file} has an array called {reprlib.repr(name)}, which is no name of a parameter: "
            "get it from a source that you trust."
        )


def check_numbers(place: Path, value: Stored | np.ndarray) -> None:
    """Raise ``ValueError`` unless an array that a model uses has floats of 16 bits or more.

    ``place`` is the file or the folder, for the message.
    """
    name = str(value.dtype)
    if name in FLOATS.values():
        return
    if name.startswith("F8"):
        raise ValueError(
            f"{place} holds numbers of 8 bits ({name}, called fp8): get the file in float16 or "
            "bfloat16. To save memory here, read that one, and then quantize it to int8."
        )
    raise ValueError(f"{place} holds numbers as {name}: get float32, float16 or bfloat16.")


def check_finite(place: str | Path, name: str, value: np.ndarray) -> None:
    """Raise ``ValueError`` if an array has numbers that are infinite, or none at all (NaN).

    ``place`` is the file that has the array, and ``name`` what it is called there.
    """
    value = np.asarray(value)
    if str(value.dtype) not in FLOATS.values():
        return
    # In all formats of floats, these are the numbers whose exponent is that of infinity. To look
    # at the bits is faster than to ask for each number.
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.dtype.itemsize}")
    exponent = np.array(np.inf, value.dtype).view(bits.dtype)
    for start in range(0, bits.size, 2**22):  # so that little memory is needed
        if ((bits[start : start + 2**22] & exponent) == exponent).any():
            raise ValueError(
                f"{place} has numbers in {name} that are infinite or NaN, with which a model draws "
                "nothing: get it again, or train it anew with a smaller learning rate."
            )


def write_safetensors(
    file: Path,
    tensors: Mapping[str, Stored | np.ndarray],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write safetensors, by ``write_whole``.

    The package's own function takes all arrays at once, and copies them. Here one after another is
    read and written, so that those that are ``Stored`` need the memory of the largest.

    Raises
    ------
    OSError
        If it cannot be written, because of a full disk for example.
    ValueError
        If numbers are infinite or NaN.
    """
    arrays = {}
    for name, value in tensors.items():
        if isinstance(value, Stored) and not isinstance(value.dtype, str):
            arrays[name] = value
        else:
            arrays[name] = np.asarray(value)
            check_finite(f"What was to be written as {file}", name, arrays[name])
    kinds = {name: kind for kind, name in FLOATS.items()}
    # The largest numbers come first, so that each lies at a multiple of its size.
    order = sorted(arrays, key=lambda name: (-arrays[name].dtype.itemsize, name))
    header = {"__metadata__": {"format": "pt"} | (metadata or {})}
    end = 0
    for name in order:
        shape, dtype = arrays[name].shape, arrays[name].dtype
        start, end = end, end + math.prod(shape) * dtype.itemsize
        kind = kinds.get(dtype.name) or f"{dtype.kind.upper()}{8 * dtype.itemsize}"  # such as I64
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def write(place: Path) -> None:
        with place.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for name in order:
                value = np.asarray(arrays[name], order="C")
                if isinstance(arrays[name], Stored):  # the others were checked above
                    check_finite(f"What was to be written as {file}", name, value)
                stream.write(value.reshape(-1).view(np.uint8))

    write_whole(file, write)


# The order of axes.


def _axes_of_pytorch(name: str, axes: int) -> tuple[int, ...]:
    """Return which of PyTorch's axes each of ours is, for a parameter with so many."""
    if axes == 4:
        return (2, 3, 1, 0)
    if axes == 2 and not name.endswith(TABLES):
        return (1, 0)
    return tuple(range(axes))


def to_channels_last(name: str, value: np.ndarray) -> np.ndarray:
    """Return a parameter with its axes in our order in place of PyTorch's.

    A convolution is turned from (out, in, height, width) to (height, width, in, out), and a linear
    layer from (out, in) to (in, out). A table of embeddings stays as it is.
    """
    return value.transpose(_axes_of_pytorch(name, value.ndim))


def to_channels_first(name: str, value: np.ndarray | jax.Array | Stored) -> np.ndarray:
    """Return a parameter with its axes in PyTorch's order in place of ours."""
    value = np.asarray(value)
    axes = np.argsort(_axes_of_pytorch(name, value.ndim))
    return np.asarray(value.transpose(axes), order="C")


# Layers, stacked in a model and single in files.


def stacked_name(name: str) -> tuple[str, int | None]:
    """Return what a parameter of a file is called in a model, and which layer's it is.

    >>> stacked_name("mid_block.attentions.0.transformer_blocks.3.norm1.bias")
    ('mid_block.attentions.0.transformer_blocks.*.norm1.bias', 3)
    >>> stacked_name("conv_in.bias")
    ('conv_in.bias', None)
    """
    match = LAYER.fullmatch(name)
    if match is None:
        return name, None
    before, number, after = match.groups()
    return f"{before}*{after}", int(number)


def names_in_files(name: str, shape: tuple[int, ...]) -> list[str]:
    """Return what a file calls the layers of a model's parameter; for most, the one same name.

    >>> names_in_files("text_model.encoder.layers.*.layer_norm1.bias", (2, 32))
    ['text_model.encoder.layers.0.layer_norm1.bias', 'text_model.encoder.layers.1.layer_norm1.bias']
    """
    if "*" not in name:
        return [name]
    return [name.replace("*", str(layer)) for layer in range(shape[0])]


def unstack_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's parameters by the names in files; of stacked ones, each layer by itself.

    They may be arrays or shapes. Those that are not stacked stay as they are.
    """
    single = {}
    for name, value in values.items():
        if "*" not in name:
            single[name] = value
            continue
        names = names_in_files(name, value.shape)
        if isinstance(value, jax.ShapeDtypeStruct):
            single |= dict.fromkeys(names, value.update(shape=value.shape[1:]))
        else:
            single |= dict(zip(names, value, strict=True))
    return single


def stack_layers(values: Mapping[str, np.ndarray | Stored]) -> dict[str, np.ndarray]:
    """Return a part's parameters by the names in a model: the reverse of ``unstack_layers``."""
    layers = {}  # by the name in a model, all arrays by their layers
    for name, value in values.items():
        model_name, layer = stacked_name(name)
        layers.setdefault(model_name, {})[layer] = np.asarray(value)
    stacked = {}
    for name, by_layer in layers.items():
        if None in by_layer:
            stacked[name] = by_layer[None]
        else:
            stacked[name] = np.stack([by_layer[layer] for layer in range(len(by_layer))])
    return stacked


# Folders in diffusers' format.


def find_files(folder: Path, variant: str | None = None) -> list[Path]:
    """Return the files that have the parameters of one part.

    Parameters
    ----------
    folder : Path
        The part's.
    variant : str, optional
        The word that the files have in their names, such as "fp16". It is needed where there are
        several variants, or files without such a word as well.

    Raises
    ------
    FileNotFoundError, ValueError
        If there are none, with what is there in place of them; or the index of several is damaged.
    """
    word = f".{variant}" if variant else ""
    for stem in ("diffusion_pytorch_model", "model"):
        file = find_inside(folder, f"{stem}{word}.safetensors")
        if file.exists():
            return [file]
        index = find_inside(folder, f"{stem}.safetensors.index{word}.json")
        if index.exists():
            return _files_of_index(index)
    flax_files = [find_inside(folder, file.name) for file in folder.glob("*flax_model.msgpack")]
    if flax_files and not variant:
        return flax_files
    names = [file.name for file in folder.glob("*.safetensors")]
    variants = {match[1] for name in names if (match := WITH_VARIANT.fullmatch(name))}
    if not variant and len(variants) == 1:
        return find_files(folder, variants.pop())
    raise FileNotFoundError(_why_nothing_is_read(folder, variant))


def _files_of_index(index: Path) -> list[Path]:
    """Return the files that an index names, which says where each parameter is."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} does not say where parameters are: get it again.")
    for name in places.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ValueError(f"{index} names {name!r}, which is no file beside it: get it again.")
    return [find_inside(index.parent, name) for name in sorted(set(places.values()))]


def _why_nothing_is_read(folder: Path, variant: str | None) -> str:
    """Return a sentence on what a part's folder has in place of parameters, and what to do."""
    there = ", ".join(sorted(file.name for file in folder.glob("*model*"))) or "nothing"
    if "-of-" in there and ".index" not in there:
        advice = "their index (….safetensors.index.json) is missing, so download the folder again"
    elif ".safetensors" in there:
        advice = "give the variant in its files' names"
        if variant:
            advice += f", which is {variant} now"
    elif there == "nothing":
        advice = "download the folder again"
    else:
        advice = (
            "get safetensors; a .bin or .ckpt is not read, as it is a pickle, which can run any "
            "program"
        )
    return f"{folder} has no parameters that can be read, but {there}: {advice}."


def read_part(
    folder: Path, variant: str | None = None, shapes: Mapping[str, Any] | None = None
) -> dict[str, Stored | np.ndarray]:
    """Return the parameters of one part by the names in files, with our order of axes.

    Those in safetensors stay on disk until they are used. Those of Flax are read, unless their file
    is far larger than what a model needs: ``shapes`` are that, by the names in files.

    Raises
    ------
    FileNotFoundError, ValueError
        As ``find_files`` and ``read_safetensors``, or if two files have the same parameter.
    """
    parameters = {}
    places = {}  # in which file each of them is
    for file in find_files(folder, variant):
        if file.suffix == ".msgpack":
            check_size(file, shapes)
            arrays = read_flax(file)
        else:
            arrays = {}
            for name, stored in read_safetensors(file)[0].items():
                arrays[name] = stored.change(functools.partial(to_channels_last, name))
        for name, value in arrays.items():
            if name in places:
                raise ValueError(f"{places[name]} and {file} both have {name}: remove one of them.")
            places[name] = file
            parameters[new_name(name)] = value
    return parameters


def new_name(name: str) -> str:
    """Return what a parameter is called here that other files in diffusers' format call otherwise.

    Those from before 2023 do for the VAE, and those of transformers 5 for CLIP.

    >>> new_name("encoder.layers.0.mlp.fc1.bias")
    'text_model.encoder.layers.0.mlp.fc1.bias'
    """
    if SHORT_NAME.match(name):
        return f"text_model.{name}"
    for old, new in OLD_NAMES.items():
        name = name.replace(f"attentions.0.{old}.", f"attentions.0.{new}.")
    return name


def check_size(file: Path, shapes: Mapping[str, Any] | None) -> None:
    """Raise ``ValueError`` if a file with whole arrays is far larger than those with such shapes.

    To read it takes twice its size of memory, even if most of it is nothing.
    """
    if shapes is None or not file.is_file():
        return
    numbers = sum(math.prod(each.shape) for each in shapes.values())
    largest = LARGEST_NUMBER * numbers + LONGEST_NAME * len(shapes)
    if file.stat().st_size > largest:
        raise ValueError(
            f"{file} has {file.stat().st_size / 1e6:.1f} MB, and its configuration means at most "
            f"{largest / 1e6:.1f} MB: get both from the same model."
        )


def read_flax(file: Path) -> dict[str, np.ndarray]:
    """Read parameters that a Flax pipeline saved.

    They get the names of PyTorch. The order of axes is ours already.
    """
    parameters = {}

    def flatten(tree: dict, prefix: str) -> None:
        for name, value in tree.items():
            name = str(name)
            if isinstance(value, dict):
                if not name.startswith("linear_"):
                    name = re.sub(r"_(\d+)$", r".\1", name)  # down_blocks_0 is down_blocks.0
                flatten(value, f"{prefix}{name}.")
                continue
            name = "bias" if name == "bias" else "weight"  # a kernel, scale or embedding
            check_name(file, f"{prefix}{name}")
            check_finite(file, f"{prefix}{name}", value)
            parameters[f"{prefix}{name}"] = value

    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing, or no file: download the folder again.")
    with file.open("rb") as stream:
        start = stream.read(200)
        # As a map of msgpack begins: what is none is not read to its end.
        if start and (start[0] >> 4 == 0x8 or start[0] in (0xDE, 0xDF)):
            data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        else:
            data = b""
    try:
        tree = msgpack_restore(data)
        leaves = jax.tree.leaves(tree, is_leaf=lambda value: value is None)
        is_whole = isinstance(tree, dict) and all(isinstance(x, np.ndarray) for x in leaves)
    except Exception:  # the package raises many kinds
        is_whole = False
    if not is_whole:
        refuse_other_kinds(file, start)
        raise ValueError(f"{file} is damaged, or holds no parameters of Flax: get it again.")
    flatten(tree, "")
    return parameters


def check_part(
    place: Path, parameters: Mapping[str, Stored | np.ndarray], shapes: Mapping[str, Any]
) -> None:
    """Raise ``ValueError`` if files have other names, shapes or dtypes than a part needs.

    ``place`` is the file or the folder, for the message. Both dictionaries are by the names in
    files.
    """
    for name in sorted(parameters.keys() | shapes.keys()):
        have = parameters[name].shape if name in parameters else "nothing"
        need = shapes[name].shape if name in shapes else "nothing"
        if have != need:
            raise ValueError(
                f"{place} has {have} for {name}, and its configuration means {need}: get both from "
                "the same model."
            )
        check_numbers(place, parameters[name])


def check_dtype(dtype: Any) -> np.dtype:
    """Return a dtype that a model computes in; raise ``ValueError`` for the others."""
    dtype = jnp.dtype(dtype)
    if dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(
            f"The dtype is {dtype}: choose float32, or bfloat16, in which no number here is too "
            "large."
        )
    return dtype


def read_parts(
    folder: Path,
    shapes: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    variant: str | None = None,
    is_unread: Callable[[str, str], bool] | None = None,
) -> dict[str, dict[str, Stored | np.ndarray]]:
    """Return the parameters in a folder in diffusers' format, by the names in files.

    Names and shapes are compared with those that a model needs. What files may have besides, as of
    ``load_parts``, is in the result, too.
    """
    stored = {}
    for part, needed in shapes.items():
        single = unstack_layers(needed)
        stored[part] = read_part(find_inside(folder, part), variant, single)
        read = {}
        for name, value in stored[part].items():
            if name in single or is_unread is None or not is_unread(part, name):
                read[name] = value
        check_part(folder / part, read, single)
    return stored


def load_parts(
    folder: Path,
    shapes: Mapping[str, Mapping[str, jax.ShapeDtypeStruct]],
    sharding: jax.sharding.Sharding | dict | None = None,
    variant: str | None = None,
    is_unread: Callable[[str, str], bool] | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Read the parameters of a model from a folder in diffusers' format.

    Names and shapes are compared first. Then the numbers go from the files to the devices, one
    parameter at a time, so that the host never holds the whole model.

    Parameters
    ----------
    folder : Path
        With a folder for each part.
    shapes : dict
        For each part, what a model needs, by its names: shapes and the dtype to read them in.
    sharding : jax.sharding.Sharding or dict, optional
        Where parameters lie: a sharding for all, or one for each.
    variant : str, optional
        The word that the files have in their names.
    is_unread : callable, optional
        Of a part and a name which the model does not need: whether files may have it all the same.

    Raises
    ------
    FileNotFoundError, ValueError
        If something is missing, damaged, or not what the configuration means.
    """
    params = {}
    for part, values in read_parts(folder, shapes, variant, is_unread).items():
        params[part] = {}
        # In the order of the file, with all layers of a stacked parameter where the first one is.
        for name in dict.fromkeys(stacked_name(name)[0] for name in values):
            if name not in shapes[part]:
                continue
            value = _gather_layers(values, name, shapes[part][name])
            where = sharding[part][name] if isinstance(sharding, dict) else sharding
            placed = jax.device_put(value, where)
            # So that the host's copy can go before the next one is read.
            params[part][name] = placed.block_until_ready()
    return params


def _gather_layers(
    values: Mapping[str, Stored | np.ndarray], name: str, needed: jax.ShapeDtypeStruct
) -> np.ndarray:
    """Read one parameter of a model, of all layers if it is stacked."""
    if "*" not in name:
        return np.array(values[name], needed.dtype)
    value = np.empty(needed.shape, needed.dtype)
    for layer, each in enumerate(names_in_files(name, needed.shape)):
        value[layer] = values[each]
    return value


def to_files(parameters: Mapping[str, Any], dtype: Any = None) -> dict[str, np.ndarray | Stored]:
    """Return a part's parameters as files have them: single layers, and PyTorch's order of axes.

    ``dtype`` is what to save them in; by default they keep theirs. Arrays that are ``Stored`` stay
    on disk until they are used.

    Raises
    ------
    ValueError
        If a number is too large for float16.
    """
    tensors = {}
    for name, value in unstack_layers(parameters).items():
        read = functools.partial(_to_file, name, value, dtype)
        if isinstance(value, Stored):
            axes = np.argsort(_axes_of_pytorch(name, len(value.shape)))
            shape = tuple(value.shape[axis] for axis in axes)
            is_cast = dtype is not None and str(value.dtype) in FLOATS.values()
            tensors[name] = Stored(shape, jnp.dtype(dtype) if is_cast else value.dtype, read)
        else:
            tensors[name] = read()
    return tensors


def _to_file(name: str, value: Any, dtype: Any) -> np.ndarray:
    """Return one parameter as ``to_files`` does."""
    return cast(name, to_channels_first(name, value), dtype)


def cast(name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array of floats in a dtype, or as it is if that is None.

    ``name`` is for the message.
    """
    if dtype is None or value.dtype == dtype or str(value.dtype) not in FLOATS.values():
        return value
    with np.errstate(over="ignore"):
        changed = value.astype(dtype)
    if not np.isfinite(np.float32(changed)).all() and np.isfinite(np.float32(value)).all():
        raise ValueError(
            f"{name} has numbers up to {np.abs(np.float32(value)).max():.3g}, too large for "
            f"{jnp.dtype(dtype).name}: choose bfloat16 or float32."
        )
    return changed


def read_settings(
    source: Path, parts: Collection[str]
) -> tuple[dict[str, Any], dict[str, dict[str, bytes]]]:
    """Return what a folder in diffusers' format has besides parameters.

    Parameters
    ----------
    source : Path
    parts : collection of str
        Which of the parts that have parameters are wanted.

    Returns
    -------
    index : dict
        What ``model_index.json`` says. Parts that are not wanted are empty, as diffusers has it.
    texts : dict of dict
        For each part, a tokenizer or the scheduler, its files by their names.
    """
    index = read_json(find_inside(source, "model_index.json"))
    texts = {}
    for name, value in index.items():
        if not isinstance(value, list):  # a name that begins with "_", or an option
            continue
        if name not in parts and not name.startswith(("tokenizer", "scheduler")):
            index[name] = [None, None]
            continue
        if not PART_NAME.fullmatch(name):
            raise ValueError(
                f"{source} has a part called {name!r}: names of parts have small letters, digits "
                "and _ alone, so get the folder from a source that you trust."
            )
        folder = find_inside(source, name)
        if not folder.is_dir():
            raise FileNotFoundError(
                f"{folder} is missing: give a whole folder in diffusers' format."
            )
        texts[name] = {}
        for file in sorted(file.name for file in folder.iterdir()):
            if file.endswith((".json", ".txt", ".jinja")) and ".index" not in file:
                texts[name][file] = read_data(find_inside(folder, file))
    return index, texts


def write_settings(folder: Path, texts: Mapping[str, Mapping[str, bytes]]) -> None:
    """Write what ``read_settings`` gives for each part, in place of what the folder has."""
    for name, files in texts.items():
        place = find_inside(folder, name)
        for file, data in files.items():
            write_bytes(place / file, data)
        for file in TOKENIZER_FILES:
            if file not in files:
                (place / file).unlink(missing_ok=True)  # of the model that was there before


def check_readable(params: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if arrays that lie in files have bad numbers, before any is written."""
    for values in params.values():
        for value in values.values():
            if isinstance(value, Stored):
                value.read()


def save_parts(params: Mapping[str, Mapping[str, Any]], folder: Path, dtype: Any = None) -> None:
    """Write the parameters of a model into a folder in diffusers' format, in place of what it has.

    ``dtype`` is what to save them in, one for all or one for each part; by default they keep
    theirs.
    """
    for part, values in params.items():
        wanted = dtype.get(part) if isinstance(dtype, dict) else dtype
        stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        written = find_inside(folder, part) / f"{stem}.safetensors"
        write_safetensors(written, to_files(values, wanted))
        for file in written.parent.iterdir():  # parameters of the model that was there before
            if file != written and PARAMETER_FILE.fullmatch(file.name):
                file.unlink()
