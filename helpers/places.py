"""Where the files are that come with the course."""

from pathlib import Path


def find_data(name: str) -> Path:
    """Return the path of a file or folder that comes with the course.

    A clone has it at its top level, and an installed wheel inside this package.

    Raises
    ------
    FileNotFoundError
        If it is in neither place.

    Examples
    --------
    >>> find_data("checkpoints").is_dir()
    True
    """
    package = Path(__file__).parent
    for place in (package / "data", package.parent):
        if (place / name).exists():
            return place / name
    raise FileNotFoundError(
        f"This installation of the course has no {name}: install the course again."
    )
