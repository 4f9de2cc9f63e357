"""Where the files are that come with the course."""

import json
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


def read_record(name: str) -> list[dict]:
    """Read what was recorded of a subject: asked of the TPU compiler, scored or clocked.

    Parameters
    ----------
    name : str
        Such as ``score/sd``. The command ``python -m lab.record`` with this name records it.

    Returns
    -------
    list of dict
        Each has a question and its answer, which are dictionaries, too, the date, and the versions
        of packages. Many have the machine.

    Examples
    --------
    >>> row = read_record("clock/draw")[0]
    >>> row["question"]["prompts"], row["date"]
    (192, '2026-11-25')
    """
    return json.loads(find_data(f"lab/records/{name}.json").read_text(encoding="utf-8"))
