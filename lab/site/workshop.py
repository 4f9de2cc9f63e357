"""Write the sets for a workshop, ``student.zip`` and ``instructor.zip``: ``make workshop``.

Both have the chapters, the pages that these link to, the lock, and the course's own wheel, so a
class installs it from a copy and needs no repository. The students' chapters are without solutions;
the instructor's set has the plan and the speaker notes of ``docs/workshop`` beside them.
``--language zh-CN`` writes ``student-zh-CN.zip``: the student set with the Chinese chapters beside
the English ones.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
from nbconvert.preprocessors import TagRemovePreprocessor

from lab.site.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[2]
WORKSHOP = ROOT / "docs" / "workshop"
BUILD = ROOT / "build" / "workshop"


def write_set(name: str, language: str = "en") -> Path:
    """Write a set, "student" or "instructor", as a folder and as a zip file of it.

    Returns
    -------
    pathlib.Path
        The folder, in which Chinese students find the Chinese chapters as well.
    """
    folder = BUILD / (name if language == "en" else f"{name}-{language}")
    shutil.rmtree(folder, ignore_errors=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    for file in ("LICENSE", "requirements.lock"):
        shutil.copy(ROOT / file, folder)
    texts = WORKSHOP if language == "en" else ROOT / "docs" / language / "workshop"
    readme = (texts / f"{name}.md").read_text()
    (folder / "README.md").write_text(readme.replace("WHEEL", wheel.name))
    chapters = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    if language != "en":
        chapters += sorted((ROOT / "notebooks" / language).glob("[0-9]*.ipynb"))
    for chapter in chapters:
        copy_with_links(chapter, folder)
    if name == "student":
        for chapter in folder.rglob("*.ipynb"):
            remove_solutions(chapter)
    else:
        (folder / "plan.md").write_text(f"# Plans\n\n{(WORKSHOP / 'plan.md').read_text()}")
        shutil.copytree(WORKSHOP / "notes", folder / "notes")
    shutil.make_archive(str(folder), "zip", root_dir=BUILD, base_dir=folder.name)
    return folder


def copy_with_links(chapter: Path, folder: Path) -> None:
    """Copy a chapter to its place in a set, and the files that it links to, but for chapters."""
    files = [chapter]
    for cell in nbformat.read(chapter, as_version=4).cells:
        if cell.cell_type == "markdown":
            for link in re.findall(r"\]\((\.\./[^)\s#]+)", cell.source):
                files.append(Path(os.path.normpath(chapter.parent / link)))
    for file in files:
        target = folder / file.relative_to(ROOT)
        wanted = file == chapter or (file.is_file() and file.suffix != ".ipynb")
        if wanted and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def remove_solutions(chapter: Path) -> None:
    """Take the solutions out of a chapter."""
    remover = TagRemovePreprocessor(remove_cell_tags={"solution"})
    notebook, _ = remover.preprocess(nbformat.read(chapter, as_version=4), {})
    nbformat.write(notebook, chapter)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--language", choices=["en", LANGUAGE], default="en", help="what the students read"
    )
    language = parser.parse_args().language
    for name in ("student", "instructor") if language == "en" else ("student",):
        target = write_set(name, language).with_suffix(".zip")
        print(f"{os.path.relpath(target)}: {target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
