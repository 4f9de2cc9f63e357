"""Say where the course lives: ``make publish REPO=owner/name``.

Writes the setup cell (``tools/setup_cell.py``, with the repository's name in it) into every chapter, and the links that
open the chapters on Colab, Kaggle and Binder into the README. Run it again with another name, with none to keep the
name that is there, or with ``--none`` to take it out.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
SETUP_CELL = ROOT / "tools" / "setup_cell.py"
UNSTAMPED = 'REPOSITORY = ""'
BEGIN, END = "<!-- links to the chapters -->\n", "<!-- end of the links -->\n"

NOWHERE = """\
This copy of the course does not say where it lives yet. `make publish REPO=owner/name` writes a repository on GitHub
into the chapters, and links to Colab, Kaggle and Binder into this page. Until then, upload a chapter, and tell its
first cell where to find the course by a line above it:

```
%env TUTORIAL_SOURCE=git+https://github.com/owner/name
```

Anything that pip installs will do, also the path of an uploaded wheel (`.venv/bin/python -m hatchling build` makes one,
with the bundled checkpoints in it).
"""


def setup_cell(repository: str) -> str:
    """The source of the setup cell for a repository, or for none (an empty string)."""
    template = SETUP_CELL.read_text()
    assert template.count(UNSTAMPED) == 1
    return template.replace(UNSTAMPED, f'REPOSITORY = "{repository}"').rstrip("\n")


def links(repository: str) -> str:
    """The README's table of links, or without a repository what to do in its place."""
    if not repository:
        return NOWHERE
    rows = ["| chapter | open it in |", "| --- | --- |"]
    for chapter in CHAPTERS:
        path = f"{repository}/blob/main/notebooks/{chapter.name}"
        rows.append(
            f"| {chapter.stem} | [Colab](https://colab.research.google.com/github/{path}), "
            f"[Kaggle](https://kaggle.com/kernels/welcome?src=https://github.com/{path}), "
            f"[Binder](https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{chapter.name}) |"
        )
    return "\n".join(rows) + "\n"


def stamp_chapter(text: str, repository: str) -> str:
    """A chapter's text with its setup cell written anew."""
    notebook = json.loads(text)
    (cell,) = (cell for cell in notebook["cells"] if "setup" in cell["metadata"].get("tags", []))
    cell["source"] = setup_cell(repository).splitlines(keepends=True)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def stamp_readme(text: str, repository: str) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + links(repository) + END + after


def stamped_repository() -> str:
    """The repository's name that the first chapter carries; empty if none."""
    return re.search(r'REPOSITORY = \\"(.*?)\\"', CHAPTERS[0].read_text()).group(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", default=stamped_repository(), help='"owner/name" on GitHub')
    parser.add_argument("--none", action="store_true", help="take the repository's name out")
    arguments = parser.parse_args()
    repository = "" if arguments.none else arguments.repository
    if repository and not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", repository):
        parser.error(f'{repository!r} is no repository: give it as "owner/name", without https:// and github.com')
    for chapter in CHAPTERS:
        chapter.write_text(stamp_chapter(chapter.read_text(), repository))
    README.write_text(stamp_readme(README.read_text(), repository))
    print(
        f"The chapters and the README now say {repository!r}."
        if repository
        else "The chapters and the README name none."
    )


if __name__ == "__main__":
    main()
