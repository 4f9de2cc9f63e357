"""Write the sets for a workshop, ``build/workshop/student.zip`` and ``instructor.zip``: ``make workshop``.

Both follow from the chapters. The student set has their solutions taken out; the instructor set has them open, and the
speaker notes of ``docs/workshop/notes`` beneath the headings that they belong to. Each set brings the lock and the
course's own wheel, so a class installs it from a copy and needs no repository. ``--language zh-CN`` writes
``student-zh-CN.zip`` instead: the student set with the Chinese chapters beside the English ones.
"""

import argparse
import copy
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import nbformat

from tools.run_chapters import CHAPTERS
from tools.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
WORKSHOP = ROOT / "docs" / "workshop"
BUILD = ROOT / "build" / "workshop"
NOTE = "**Speaker note.** "


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def student_chapter(notebook):
    """A chapter without its solutions."""
    notebook = copy.deepcopy(notebook)
    notebook.cells = [cell for cell in notebook.cells if "solution" not in tags(cell)]
    return notebook


def instructor_chapter(notebook, notes: dict[str, str]):
    """A chapter with its solutions open, and its speaker notes: cells of their own.

    Raises
    ------
    ValueError
        If a note belongs to a heading that the chapter does not have.
    """
    notebook = copy.deepcopy(notebook)
    notes = dict(notes)
    cells = []
    for cell in notebook.cells:
        if "solution" in tags(cell):
            cell.metadata["tags"] = [tag for tag in cell.metadata["tags"] if tag != "hide-cell"]
            cell.metadata.pop("jupyter", None)  # which folds it in JupyterLab
            cell.metadata.pop("cellView", None)  # and in Colab
        cells.append(cell)
        here = ["", *headings(cell)] if cell is notebook.cells[0] else headings(cell)
        for heading in here:
            if heading in notes:
                cells.append(note_cell(f"{cell.id}-note-{here.index(heading)}", notes.pop(heading)))
    if notes:
        raise ValueError(f"There are notes for headings that the chapter does not have: {', '.join(notes)}.")
    notebook.cells = cells
    return notebook


def headings(cell) -> list[str]:
    """The second-level headings of a cell."""
    return re.findall(r"^## (.+)$", cell.source, flags=re.MULTILINE) if cell.cell_type == "markdown" else []


def note_cell(name: str, text: str):
    """A cell that shows a note set off from the chapter's own text."""
    quoted = "\n".join(f"> {line}".rstrip() for line in (NOTE + text).splitlines())
    metadata = {"tags": ["speaker-note"], "slideshow": {"slide_type": "notes"}}
    return nbformat.v4.new_markdown_cell(quoted, id=name, metadata=metadata)


def read_notes(chapter: Path) -> dict[str, str]:
    """A chapter's speaker notes by heading; what stands before the first heading, under the empty name."""
    file = WORKSHOP / "notes" / f"{chapter.stem}.md"
    if not file.exists():
        return {}
    first, *parts = re.split(r"^## (.+)\n", file.read_text(), flags=re.MULTILINE)
    notes = {"": first} | dict(zip(parts[::2], parts[1::2], strict=True))
    return {heading: text.strip() for heading, text in notes.items() if text.strip()}


def set_files(instructor: bool, wheel: Path, language: str = "en") -> dict[str, bytes]:
    """The files of a set, by their names in it."""
    rooms = {"en": [ROOT / "notebooks"], LANGUAGE: [ROOT / "notebooks", ROOT / "notebooks" / LANGUAGE]}[language]
    texts = WORKSHOP if language == "en" else ROOT / "docs" / language / "workshop"
    readme = (texts / ("instructor.md" if instructor else "student.md")).read_text().replace("WHEEL", wheel.name)
    files = {
        "README.md": readme.encode(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "requirements.lock": (ROOT / "requirements.lock").read_bytes(),
        wheel.name: wheel.read_bytes(),
    }
    if instructor:
        files["plan.md"] = b"# Plans\n\n" + (WORKSHOP / "plan.md").read_bytes()
    for chapter in (chapter for room in rooms for chapter in sorted(room.glob("[0-9]*.ipynb"))):
        notebook, name = nbformat.read(chapter, as_version=4), chapter.relative_to(ROOT).as_posix()
        made = instructor_chapter(notebook, read_notes(chapter)) if instructor else student_chapter(notebook)
        files[name] = (nbformat.writes(made) + "\n").encode()
        for page in linked_pages(made, name):
            files[page] = (ROOT / page).read_bytes()
    return files


def linked_pages(notebook, name: str) -> set[str]:
    """The repository's files that a chapter links to, but for chapters and the README, which a set has its own of."""
    found = set()
    for cell in notebook.cells:
        for target in re.findall(r"\]\((\.\./[^)\s#]+)", cell.source if cell.cell_type == "markdown" else ""):
            path = os.path.normpath(f"{os.path.dirname(name)}/{target}")
            if path != "README.md" and not path.startswith("notebooks/") and (ROOT / path).is_file():
                found.add(path)
    return found


def write_zip(target: Path, files: dict[str, bytes]) -> None:
    """Write a zip file that is the same whenever its files are."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(f"{target.stem}/{name}", date_time=(2026, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--language", choices=["en", LANGUAGE], default="en", help="what the students read")
    language = parser.parse_args().language
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(folder).glob("*.whl")
        for name in ("student", "instructor") if language == "en" else (f"student-{language}",):
            target = BUILD / f"{name}.zip"
            write_zip(target, set_files(name == "instructor", wheel, language))
            print(f"{os.path.relpath(target)}: {target.stat().st_size / 1e6:.0f} MB")
    for chapter in CHAPTERS:
        if not read_notes(chapter):
            print(f"There are no speaker notes for {chapter.stem}: write docs/workshop/notes/{chapter.stem}.md.")


if __name__ == "__main__":
    main()
