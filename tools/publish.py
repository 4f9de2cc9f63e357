"""Say where the course lives: ``make publish REPO=owner/name``.

Writes the setup cell (``tools/setup_cell.py``) into every chapter, and puts the repository's name in the place of the
one that pyproject.toml has, in every file that git tracks. Until the course is published, that is a placeholder; give
it as the name to take a repository's name out again.
"""

import argparse
import json
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETUP_CELL = ROOT / "tools" / "setup_cell.py"
GITHUB = "https://github.com/"


def stamped_repository() -> str:
    """The repository's name, or the placeholder, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"].removeprefix(GITHUB)


def launch_links(repository: str, chapter: str) -> list[tuple[str, str]]:
    """Where a chapter's file can be opened, by name and address."""
    path = f"{repository}/blob/main/notebooks/{chapter}"
    return [
        ("Colab", f"https://colab.research.google.com/github/{path}"),
        ("Kaggle", f"https://kaggle.com/kernels/welcome?src={GITHUB}{path}"),
        ("Binder", f"https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{chapter}"),
    ]


def with_setup_cell(chapter: str, source: str) -> str:
    """A chapter's text with this source in its setup cell."""
    notebook = json.loads(chapter)
    (cell,) = (cell for cell in notebook["cells"] if "setup" in cell["metadata"].get("tags", []))
    cell["source"] = source.rstrip("\n").splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    old = stamped_repository()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", default=old, help='"owner/name" on GitHub; by default, it stays')
    new = parser.parse_args().repository
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", new):
        parser.error(f'{new!r} is not a repository: give it as "owner/name", without https:// and github.com')
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    setup_cell = SETUP_CELL.read_text().replace(old, new)
    named = 0
    for file in (ROOT / name for name in tracked.split("\0") if name):
        before = file.read_bytes()
        after = before.replace(old.encode(), new.encode())
        if file.suffix == ".ipynb":
            after = with_setup_cell(after.decode(), setup_cell).encode()
        named += new.encode() in after
        if after != before:  # a new pyproject.toml, even with the same text, makes make install again
            file.write_bytes(after)
    print(f"{named} files name the repository {new}.")


if __name__ == "__main__":
    main()
