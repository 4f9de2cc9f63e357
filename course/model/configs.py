"""Reading the configuration files of diffusers and transformers.

A model has a frozen class for each of theirs, with the options that it reads, and a table of the
values that it has for options that it does not read.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")


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
    return kind(**read)


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
            message = f"{where} asks for {name} = {value!r}, which this model does not have"
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
    if name in types and not _fits(value, types[name]):
        return False
    if name in allowed:
        values = value if isinstance(value, list) else [value]
        return all(each in allowed[name] for each in values)
    if name in types or no_difference is None or name in no_difference or name.startswith("_"):
        return True
    return value is None or value is False  # unknown, but switched off


def _fits(value: Any, annotation: Any) -> bool:
    """Return whether a value is a list, one value or null, as the type of its option allows."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    if value is None:
        return NoneType in kinds or bool in kinds  # some files have null for what is switched off
    if isinstance(value, list):
        return any(get_origin(kind) is tuple for kind in kinds)
    return any(get_origin(kind) is not tuple and kind is not NoneType for kind in kinds)
