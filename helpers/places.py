"""Where the files are that come with the course."""

from pathlib import Path


def find_data(name: str) -> Path:
    """The path of a file or folder that a clone of the course has at its top level, and a wheel inside this package.

    Examples
    --------
    >>> find_data("checkpoints").is_dir()
    True
    """
    package = Path(__file__).parent
    for place in (package / "data", package.parent):
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(f"This installation of the course has no {name}: install the course again.")
