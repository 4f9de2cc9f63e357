"""Reading the configuration files of diffusers and transformers."""

from pathlib import Path


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
