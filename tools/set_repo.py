"""Say where the course lives: ``make set-repo REPO=owner/name``.

Puts the repository's name in the place of the one that pyproject.toml has, in every file that git
tracks: setup cells, links, ``environment.yml``. Until the course is published, that is a
placeholder; give it as the name to take a repository's name out again.
"""

import argparse
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
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


def main() -> None:
    old = stamped_repository()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "repository", nargs="?", default=old, help='"owner/name" on GitHub; by default, it stays'
    )
    new = parser.parse_args().repository
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", new):
        parser.error(
            f'{new!r} is not a repository: give it as "owner/name", without https:// and github.com'
        )
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    named = 0
    for name in filter(None, tracked.split("\0")):
        file = ROOT / name
        before = file.read_bytes()
        after = before.replace(old.encode(), new.encode())
        if new.encode() in after:
            named += 1
        # A new pyproject.toml, even with the same text, would make `make` install again.
        if after != before:
            file.write_bytes(after)
    print(f"{named} files name the repository {new}.")


if __name__ == "__main__":
    main()
