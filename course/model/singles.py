"""Files with a whole model or a part of it, by names that other programs gave to parameters.

What they call a parameter is a model's own: ``course.sd.convert`` and ``course.flux2.convert`` have
a ``Naming`` each. Everything else is here: finding the parts, reading them, and writing such files.
"""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from course.model.files import (
    WRAPPERS,
    Rows,
    Stored,
    check_numbers,
    find_inside,
    new_name,
    read_part,
    read_safetensors,
    to_channels_first,
    to_channels_last,
    unstack_layers,
)
from course.model.kinds import made_for


class Layout(NamedTuple):
    """How a file may name the parameters of a part."""

    prefix: str  # what its names begin with
    names: str  # which names follow, one of ``Naming.names``


@dataclass(frozen=True)
class Naming:
    """What files may call the parameters of a kind of model."""

    kinds: re.Pattern  # which of the models of ``course.model.kinds`` are of this kind
    called: str  # this kind, in a sentence
    denoiser: str  # the part that is asked at every step, and may be alone in a file
    prefixes: Mapping[str, tuple[str, ...]]  # for each part
    names: Mapping[str, tuple[str, ...]]
    # Names by which one sees whether a part is there in some layout.
    probes: Mapping[str, tuple[str, ...]]
    # What the names of a part begin with that is alone in its file, if it may have no others.
    beginnings: Mapping[str, tuple[str, ...]]
    unread: re.Pattern  # names that it may have besides
    # Of a layout, a part, a name and a configuration: what the parameter is called there, and which
    # rows of the array it is.
    name: Callable[[Layout, str, str, Any], tuple[str, Rows | None]]


# What a file is that has such a name in it, if it is no model that is read here.
FOREIGN = {
    "control_model.": "is for ControlNet",
    "controlnet_": "is for ControlNet",
    ".lora_": "is a LoRA, which course.lora builds into a model",
    "edm_mean": "is for Playground 2.5, which was trained for other amounts of noise (EDM)",
    "edm_vpred.": "is for a model that was trained for other amounts of noise (EDM)",
}


# Reading.


def read_arrays(file: Path) -> dict[str, Stored]:
    """Read the arrays of a single file, without what wrappers put in front of their names."""
    arrays, _ = read_safetensors(file)
    unwrapped = {}
    for name, value in arrays.items():
        inner = WRAPPERS.sub("", name).removeprefix("state_dict.")
        if inner in unwrapped:
            raise ValueError(
                f"{file} has {inner} twice, as {name} and without what stands around it there: get "
                "it from a different source."
            )
        unwrapped[inner] = value
    return unwrapped


def read_model(
    file: Path,
    arrays: Mapping[str, Stored],
    shapes: Mapping[str, Mapping[str, Any]],
    naming: Naming,
    config: Any,
    others: Mapping[str, str | Path | None],
) -> dict[str, dict[str, Stored | np.ndarray]]:
    """Return the parameters of a model out of a file, by the names of diffusers' files.

    Parameters
    ----------
    file : Path
    arrays : dict
        What it has, as ``read_arrays`` returns it.
    shapes : dict
        Of all parameters that the model needs, for each part.
    naming : Naming
    config : Config
        The model's.
    others : dict
        For each part that can come from elsewhere, the file or folder that it comes from, or None.
    """
    check_kind(file, arrays, naming)
    needed = {part: unstack_layers(each) for part, each in shapes.items()}
    layouts = {}
    for part in needed:
        if others.get(part) is None:
            is_denoiser = part == naming.denoiser
            layouts[part] = find_layout(arrays, part, naming, config, may_be_alone=is_denoiser)
    missing = [part for part, layout in layouts.items() if layout is None]
    if missing:
        options = " and ".join(f"--{part.replace('_', '-')}" for part in missing if part in others)
        advice = f"give it by {options}" if options else "get one with all parts"
        raise ValueError(
            f"{file} has no {' and '.join(missing)} in it, or is for a different model: {advice}. "
            f"{whose(arrays)}"
        )
    params = {}
    for part, each in needed.items():
        if part in layouts:
            params[part] = _take_part(file, arrays, layouts[part], part, each, naming, config)
        else:
            params[part] = _read_other(Path(others[part]), part, each, naming, config)
    return params


def check_kind(file: Path, arrays: Mapping[str, Stored], naming: Naming) -> None:
    """Raise ``ValueError`` if a single file is of a kind that can be named, and is not read."""
    kind = None
    for word, sentence in FOREIGN.items():
        if any(word in name for name in arrays):
            kind = sentence
            break
    else:
        model = made_for({name: value.shape for name, value in arrays.items()})
        if model and not naming.kinds.match(model):
            kind = f"is for {model}"
    if kind:
        raise ValueError(f"{file} {kind}: this model is {naming.called}, so take a file for that.")


def find_layout(
    arrays: Mapping[str, Stored], part: str, naming: Naming, config: Any, may_be_alone: bool
) -> Layout | None:
    """Return the first layout in which a file has a part; None if there is none.

    A part that is alone in its file may be without a prefix.
    """
    prefixes = naming.prefixes[part] + (("",) if may_be_alone else ())
    for prefix, names in itertools.product(prefixes, naming.names[part]):
        layout = Layout(prefix, names)
        probes = [naming.name(layout, part, probe, config)[0] for probe in naming.probes[part]]
        if all(probe in arrays for probe in probes):
            return layout
    return None


def _take_part(
    file: Path,
    arrays: Mapping[str, Stored],
    layout: Layout,
    part: str,
    shapes: Mapping[str, Any],
    naming: Naming,
    config: Any,
) -> dict[str, Stored]:
    """Return the arrays of one part out of those of a file, by the names of diffusers' files."""
    if layout.names == "diffusers":
        arrays = {new_name(name): value for name, value in arrays.items()}
    taken = {}
    used = set()
    for name, needed in shapes.items():
        theirs, rows = naming.name(layout, part, name, config)
        if theirs.endswith("text_projection") and f"{theirs}.weight" in arrays:
            theirs = f"{theirs}.weight"  # as diffusers' own script for XL writes it
        if theirs not in arrays:
            raise ValueError(
                f"{file} has no {theirs}: its {part} is that of a different model. {whose(arrays)}"
            )
        used.add(theirs)
        stored = arrays[theirs]
        check_numbers(file, stored)
        if rows is None or (stored.shape and stored.shape[0] % rows.pieces == 0):
            change = functools.partial(
                _to_our_axes, name=name, theirs=theirs, rows=rows, axes=len(needed.shape)
            )
            stored = taken[name] = stored.change(change)
        if stored.shape != needed.shape:
            raise ValueError(
                f"{file} has {theirs} as {stored.shape}, and the model of {part} has "
                f"{needed.shape}. {whose(arrays)}"
            )
    _refuse_more(file, arrays, used, layout, part, naming)
    return taken


def _to_our_axes(
    value: np.ndarray, name: str, theirs: str, rows: Rows | None, axes: int
) -> np.ndarray:
    """Return an array of a file with the axes of ours, or those of its rows that are ours."""
    if rows is not None:
        value = rows.take(value)
    if axes == 2 and value.shape[2:] == (1, 1):
        value = value[:, :, 0, 0]  # the VAE's attention was made of convolutions of one pixel
    if theirs.endswith("text_projection"):
        return value  # of OpenCLIP, where it is no linear layer's weight: the order is ours
    return to_channels_last(name, value)


def _refuse_more(
    file: Path,
    arrays: Iterable[str],
    used: Collection[str],
    layout: Layout,
    part: str,
    naming: Naming,
) -> None:
    """Raise ``ValueError`` if a file has more of a denoiser or a VAE than this model does.

    A text encoder may have more layers than are used, and numbers of positions.
    """
    if part not in naming.beginnings:
        return
    unused = []
    for name in set(arrays) - set(used):
        is_of_part = name.startswith(layout.prefix or naming.beginnings[part])
        if is_of_part and not naming.unread.search(name):
            unused.append(name)
    if unused:
        raise ValueError(
            f"{file} has {len(unused)} names too many, such as {min(unused)}: "
            f"it is for a different model. {whose(arrays)}"
        )


def _read_other(
    place: Path, part: str, shapes: Mapping[str, Any], naming: Naming, config: Any
) -> dict[str, Stored | np.ndarray]:
    """Return the arrays of a part that comes from a file or a folder of its own."""
    if place.is_dir():
        folder = find_inside(place, part) if (place / part).is_dir() else place
        return _read_other_folder(folder, part, shapes, naming)
    arrays = read_arrays(place)
    layout = find_layout(arrays, part, naming, config, may_be_alone=True)
    if layout is None:
        raise ValueError(f"{place} has no {part} in it: give a different file.")
    return _take_part(place, arrays, layout, part, shapes, naming, config)


def _read_other_folder(
    folder: Path, part: str, shapes: Mapping[str, Any], naming: Naming
) -> dict[str, Stored | np.ndarray]:
    """Return the arrays of a part that comes from a folder in diffusers' format."""
    arrays = read_part(folder, shapes=shapes)
    taken = {}
    for name, needed in shapes.items():
        value = arrays.get(name)
        if isinstance(value, Stored) and value.shape == (1, 1, *needed.shape):
            # The VAE's attention was made of convolutions of one pixel.
            value = value.change(lambda convolution: convolution[0, 0])
        have = "nothing" if value is None else value.shape
        if have != needed.shape:
            raise ValueError(
                f"{folder} has {have} for {name}, and this model has {needed.shape}: its {part} is "
                f"that of a different model. {whose(arrays)}"
            )
        check_numbers(folder, value)
        taken[name] = value
    _refuse_more(folder, arrays, taken, Layout("", "diffusers"), part, naming)
    return taken


def whose(arrays: Mapping[str, Stored | np.ndarray]) -> str:
    """Return a sentence that says for which model a file is, as far as one can see it."""
    kind = made_for({name: value.shape for name, value in arrays.items()})
    if kind:
        return f"By its sizes it is for {kind}: take a configuration (--like) of that."
    return "Take a configuration (--like) of the same kind of model."


# Writing.


def to_single(
    values: Mapping[str, Any], layout: Layout, part: str, naming: Naming, config: Any
) -> dict[str, np.ndarray]:
    """Return the arrays of a part as a single file has them, by its names and with its axes."""
    tensors = {}
    for name, value in unstack_layers(values).items():
        theirs, rows = naming.name(layout, part, name, config)
        value = to_channels_first(name, value)
        if theirs.endswith("text_projection"):
            value = np.ascontiguousarray(value.T)
        if ".attn_1." in theirs and value.ndim == 2:
            value = value[:, :, None, None]  # the VAE's attention is made of convolutions
        if rows is not None:
            value = rows.put(value)
            if theirs in tensors:  # with other rows
                value += tensors[theirs]
        tensors[theirs] = value
    return tensors
