"""The sets for a workshop: each is complete in itself, and the students' holds no solution."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from lab.site import workshop
from lab.site.chapters import CHAPTERS, tags
from lab.site.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folders(sets):
    """The folders of all sets, by their names."""
    return sets | {"chinese": workshop.write_set("student", LANGUAGE)}


def cells_of(notebook: Path):
    return nbformat.read(notebook, as_version=4).cells


def solutions(chapter: Path) -> list[str]:
    return [cell.source for cell in cells_of(chapter) if "solution" in tags(cell)]


@pytest.mark.parametrize("name", ["student", "instructor", "chinese"])
def test_a_set_is_complete_in_itself(folders, name):
    folder = folders[name]
    (wheel,) = folder.glob("*.whl")
    assert wheel.name in (folder / "README.md").read_text()
    assert (folder / "requirements.lock").read_bytes() == (ROOT / "requirements.lock").read_bytes()
    assert {file.name for file in (folder / "notebooks").glob("*.ipynb")} == {
        chapter.name for chapter in CHAPTERS
    }
    for notebook in folder.rglob("*.ipynb"):
        for cell in cells_of(notebook):
            if cell.cell_type == "markdown":
                for link in re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", cell.source):
                    assert (notebook.parent / link).exists(), f"{link} in {notebook.name}"


def test_the_instructor_set_has_solutions_the_plan_and_notes(sets):
    folder = sets["instructor"]
    for chapter in CHAPTERS:
        assert solutions(folder / "notebooks" / chapter.name) == solutions(chapter)
    assert (folder / "plan.md").exists()
    assert (folder / "notes" / "03_replicate_shard.md").exists()


def test_the_chinese_set_has_the_chinese_chapters_too(folders):
    chinese = folders["chinese"] / "notebooks" / LANGUAGE
    kept = (ROOT / "notebooks" / LANGUAGE).glob("[0-9]*.ipynb")
    assert {file.name for file in chinese.iterdir()} == {file.name for file in kept}
    assert "运行" in (folders["chinese"] / "README.md").read_text()


@pytest.mark.parametrize("name", ["student", "chinese"])
def test_no_file_of_a_students_set_holds_a_solution(folders, name):
    texts = []
    for file in folders[name].rglob("*"):
        if file.suffix == ".ipynb":
            texts += [cell.source for cell in cells_of(file)]
        elif file.suffix == ".whl":
            wheel = zipfile.ZipFile(file)
            modules = [module for module in wheel.namelist() if module.endswith((".py", ".md"))]
            texts += [wheel.read(module).decode() for module in modules]
        elif file.is_file():
            texts.append(file.read_text())
    everything = "\n".join(texts)
    assert "def image_grid" in everything, "the wheel was read"
    for chapter in CHAPTERS:
        assert solutions(chapter) or chapter.stem == "00_first_images"  # which has no exercise
        for solution in solutions(chapter):
            assert solution not in everything


def test_the_student_set_runs_without_what_solutions_define(sets):
    """Ruff finds names that no cell defines."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821"]
    checked = subprocess.run([*command, sets["student"]], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
