"""Reading the configuration files of diffusers and transformers.

A model has a frozen class for each of theirs, with the options that it reads, and a table of the
values that it has for options that it does not read.
"""

import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")

# How large numbers may be, so that no file can fill the memory: whole ones by a word in their name.
LARGEST = {"layers": 100, "sample_size": 4096, "": 1_000_000}
LARGEST_FLOAT = 1e9
MAY_BE_ZERO = ("steps_offset", "eos_token_id")
LEVELS = 10  # how many values a list may have
# Options that have one value for each level of a model, or the same for all; and those of them by
# which the width of a level is divided.
DIVISORS = ("norm_num_groups", "attention_head_dim", "num_attention_heads")
BY_LEVEL = (*DIVISORS, "down_block_types", "up_block_types", "transformer_layers_per_block")


def part_class(folder: Path, index: dict, part: str) -> str:
    """Return the class of a part, as ``index``, a folder's ``model_index.json``, names it.

    Raises
    ------
    ValueError
        If it does not.
    """
    match index.get(part):
        case [_, str(kind)]:  # the library and the class
            return kind
    raise ValueError(
        f"{folder} is not a whole folder in diffusers' format: its model_index.json names no class "
        f"for {part!r}. Download it again."
    )


def read_options(
    kind: type[Kind],
    options: Mapping[str, Any],
    where: str | Path,
    allowed: Mapping[str, tuple],
    no_difference: Collection[str] | None = None,
) -> Kind:
    """Read the options that a file has into a configuration class, with tuples for lists.

    Parameters
    ----------
    kind : type
        The class. Where a file does not say something, its default holds.
    options : dict
        As the file has them.
    where : str or Path
        The file, for messages.
    allowed, no_difference : dict, set
        As of ``check_options``.

    Raises
    ------
    ValueError
        As ``check_options``.
    """
    types = get_type_hints(kind)
    check_options(options, where, allowed, types, no_difference)
    read = {}
    for name, value in options.items():
        if name in types:
            read[name] = tuple(value) if isinstance(value, list) else value
    config = kind(**read)
    _check_sizes(config, where)
    return config


def _check_sizes(config: Any, where: str | Path) -> None:
    """Raise ``ValueError`` if sizes do not fit each other: in number, or as parts of a width."""
    widths = getattr(config, "block_out_channels", None) or (getattr(config, "hidden_size", 0),)
    for name in BY_LEVEL:
        value = getattr(config, name, 1)
        values = value if isinstance(value, tuple) else (value,) * len(widths)
        is_divisor = name in DIVISORS and not hasattr(config, "head_dim")
        if len(values) != len(widths) or (
            is_divisor and any(width % n for width, n in zip(widths, values, strict=True))
        ):
            raise ValueError(
                f"{where} has {name} = {reprlib.repr(value)}, which does not fit widths of "
                f"{', '.join(map(str, widths))}: download the folder again."
            )


def check_options(
    options: Mapping[str, Any],
    where: str | Path,
    allowed: Mapping[str, tuple],
    types: Mapping[str, Any],
    no_difference: Collection[str] | None = None,
) -> None:
    """Raise ``ValueError`` if an option asks for something that a model does not have.

    Parameters
    ----------
    options : dict
        As the file has them.
    where : str or Path
        The file, for messages.
    allowed : dict of tuple
        The values that the model has for an option. If the option is a list, each of its values is
        one of these.
    types : dict
        Of the options that are read.
    no_difference : set of str, optional
        Options that change nothing. With it, all others have to be switched off; without it, they
        are not looked at.
    """
    for name, value in options.items():
        if not _is_possible(name, value, allowed, types, no_difference):
            shown = reprlib.repr(value)
            message = f"{where} asks for {name} = {shown}, which this model does not have"
            if name in allowed:
                message += f": it has {' and '.join(map(repr, allowed[name]))}"
            raise ValueError(f"{message}.")


def _is_possible(
    name: str,
    value: Any,
    allowed: Mapping[str, tuple],
    types: Mapping[str, Any],
    no_difference: Collection[str] | None,
) -> bool:
    """Return whether a model has an option with this value; arguments as of ``check_options``."""
    if name in types and not _fits(name, value, types[name]):
        return False
    if name in allowed:
        values = value if isinstance(value, list) else [value]
        return all(each in allowed[name] for each in values)
    if name in types or no_difference is None or name in no_difference or name.startswith("_"):
        return True
    return value is None or value is False  # unknown, but switched off


def _fits(name: str, value: Any, annotation: Any) -> bool:
    """Return whether the value of an option is of its type, and no number out of all bounds."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if value is None:
        return NoneType in kinds or bool in kinds  # some files have null for what is switched off
    if isinstance(value, list):
        of_list = [get_args(kind) for kind in kinds if get_origin(kind) is tuple]
        if not of_list or not 0 < len(value) <= LEVELS:
            return False
        return all(_fits(name, each, of_list[0][0]) for each in value)
    if type(value) is int and int in kinds:
        least = 0 if name in MAY_BE_ZERO else 1
        largest = next(size for word, size in LARGEST.items() if word in name)
        return least <= value <= largest
    if type(value) in (int, float):  # some files have a float as a whole number
        return float in kinds and 0 < value < LARGEST_FLOAT
    return type(value) in kinds


def check_parts_fit(folder: str | Path, sizes: Mapping[str, tuple[int | None, int]]) -> None:
    """Raise ``ValueError`` if a size in one part's configuration is not what other parts have.

    ``sizes`` has the option's own number and theirs, by the names of options.
    """
    for option, (own, others) in sizes.items():
        if own != others:
            raise ValueError(
                f"{folder} has a part with {option} = {own}, and the other parts have {others}: "
                "they are of different models, so download the folder again."
            )
