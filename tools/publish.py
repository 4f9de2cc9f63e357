"""Say where the course lives: ``make publish REPO=owner/name``.

Writes the repository's name into every place that needs it: the setup cell (``tools/setup_cell.py``) of every chapter,
the README's links that open the chapters on Colab, Kaggle and Binder, the pages that say how to clone the course,
environment.yml, pyproject.toml and CITATION.cff. The site's launch buttons follow from what the chapters carry, at its
next build. Run it again with another name, with none to keep the name that is there, or with
``--none`` to take it out.
"""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
README = ROOT / "README.md"
PROJECT = ROOT / "pyproject.toml"
ENVIRONMENT = ROOT / "environment.yml"
CITATION = ROOT / "CITATION.cff"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
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

Anything that pip installs will do, also the path of an uploaded wheel (`.venv/bin/python -m hatchling build -t wheel`
makes one in `dist/`, with the bundled checkpoints in it).
"""


def setup_cell(repository: str) -> str:
    """The source of the setup cell for a repository, or for none (an empty string)."""
    template = SETUP_CELL.read_text()
    assert template.count(UNSTAMPED) == 1
    return template.replace(UNSTAMPED, f'REPOSITORY = "{repository}"').rstrip("\n")


def launch_links(repository: str, chapter: str) -> list[tuple[str, str]]:
    """Where a chapter's file can be opened, by name and address; none without a repository."""
    if not repository:
        return []
    path = f"{repository}/blob/main/notebooks/{chapter}"
    return [
        ("Colab", f"https://colab.research.google.com/github/{path}"),
        ("Kaggle", f"https://kaggle.com/kernels/welcome?src=https://github.com/{path}"),
        ("Binder", f"https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{chapter}"),
    ]


def links(repository: str) -> str:
    """The README's table of links, or without a repository what to do in its place."""
    if not repository:
        return NOWHERE
    rows = ["| chapter | open it in |", "| --- | --- |"]
    for chapter in CHAPTERS:
        places = ", ".join(f"[{name}]({address})" for name, address in launch_links(repository, chapter.name))
        rows.append(f"| {chapter.stem} | {places} |")
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


def stamp_page(text: str, repository: str) -> str:
    """A page's text, with the address in its ``git clone`` commands; ``owner/name`` stands where there is none."""
    return re.sub(r"(git clone https://github\.com/)\S+", rf"\g<1>{repository or 'owner/name'}", text)


def stamp_project(text: str, repository: str) -> str:
    """pyproject.toml's text, with the address that the package's metadata give."""
    entry = f'Repository = "https://github.com/{repository}"\n' if repository else ""
    stamped, places = re.subn(r"(\[project\.urls\]\n#.*\n)(Repository = .*\n)?", rf"\g<1>{entry}", text)
    assert places == 1
    return stamped


def stamp_environment(text: str, repository: str) -> str:
    """environment.yml's text, whose second line says which clone its ``-e .`` installs."""
    first, _, rest = text.split("\n", 2)
    address = f"https://github.com/{repository}" if repository else "the course"
    return f"{first}\n# It belongs into a clone of {address}, which its last line installs.\n{rest}"


def stamp_citation(text: str, repository: str) -> str:
    """CITATION.cff's text, with the address of the code."""
    text = re.sub(r"repository-code: .*\n", "", text)
    return text + f'repository-code: "https://github.com/{repository}"\n' if repository else text


def places() -> dict[Path, Callable[[str, str], str]]:
    """Every file that carries the name, with the function that stamps its text."""
    stamps = dict.fromkeys(CHAPTERS, stamp_chapter) | dict.fromkeys(PAGES, stamp_page)
    stamps |= {README: stamp_readme, PROJECT: stamp_project, ENVIRONMENT: stamp_environment}
    return stamps | {CITATION: stamp_citation}


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
    stamped = {path: stamp(path.read_text(), repository) for path, stamp in places().items()}
    for path, text in stamped.items():  # only now, so that a text that cannot be stamped leaves all as they are
        if path.read_text() != text:  # a new pyproject.toml, even with the same text, makes make install again
            path.write_text(text)
    print(f"{len(stamped)} files name {f'the repository {repository}' if repository else 'no repository'}.")


if __name__ == "__main__":
    main()
