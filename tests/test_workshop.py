"""The sets for a workshop: what is in each, that the students' holds no solution, and that the instructor's runs."""

import ast
import builtins
import itertools
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

from tools import build_site, workshop
from tools.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = workshop.CHAPTERS


def read(folder: Path, chapter: Path):
    return nbformat.read(folder / "notebooks" / chapter.name, as_version=4)


def solutions(chapter: Path) -> list[str]:
    cells = nbformat.read(chapter, as_version=4).cells
    return [cell.source for cell in cells if "solution" in workshop.tags(cell)]


def each_chapter(function):
    return pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)(function)


@pytest.mark.parametrize("name", ["student", "instructor"])
def test_a_set_is_complete_in_itself(sets, name):
    folder = sets[name]
    assert [file.name for file in sorted((folder / "notebooks").iterdir())] == [chapter.name for chapter in CHAPTERS]
    (wheel,) = folder.glob("*.whl")
    assert wheel.name in (folder / "README.md").read_text()
    assert (folder / "requirements.lock").read_bytes() == (ROOT / "requirements.lock").read_bytes()
    assert (folder / "plan.md").exists() == (name == "instructor")
    for chapter in CHAPTERS:
        for cell in read(folder, chapter).cells:
            for link in re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", cell.source if cell.cell_type == "markdown" else ""):
                assert (folder / "notebooks" / link).exists(), f"{link} in {chapter.name}"
            assert not cell.get("outputs")


@each_chapter
def test_the_student_set_holds_no_solution(sets, chapter):
    cells = read(sets["student"], chapter).cells
    text = "\n".join(cell.source for cell in cells)
    assert len(solutions(chapter)) >= 2
    for solution in solutions(chapter):
        assert solution not in text
        own = [line for line in solution.splitlines() if len(line.strip()) > 30]
        # A line such as an import may stand in the chapter as well.
        assert sum(line in text for line in own) <= len(own) / 3, solution
    assert not any({"solution", "speaker-note"} & workshop.tags(cell) for cell in cells)
    exercises = [cell for cell in cells if "exercise" in workshop.tags(cell)]
    assert len(exercises) == len(solutions(chapter))
    assert all(cell.source.startswith("# Your") for cell in exercises)


def test_no_file_of_the_student_set_holds_a_solution(sets):
    found = []
    for file in sets["student"].rglob("*"):
        if file.suffix == ".ipynb":
            found += [cell.source for cell in nbformat.read(file, as_version=4).cells]
        elif file.suffix == ".whl":
            wheel = zipfile.ZipFile(file)
            found += [wheel.read(name).decode() for name in wheel.namelist() if name.endswith((".py", ".md"))]
        elif file.is_file():
            found.append(file.read_text())
    everything = "\n".join(found)
    assert "def image_grid" in everything, "the wheel was read"
    assert not any(solution in everything for chapter in CHAPTERS for solution in solutions(chapter))


def assigned_and_used(source: str) -> tuple[set[str], set[str]]:
    """The names that a cell gives a value, and all that it reads."""
    nodes = list(ast.walk(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    assigned |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assigned |= {
        arg.arg
        for node in nodes
        if isinstance(node, ast.arguments)
        for arg in (*node.args, *node.kwonlyargs, node.vararg, node.kwarg)
        if arg
    }
    assigned |= {node.name for node in nodes if isinstance(node, ast.ExceptHandler) and node.name}
    imports = [alias for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names]
    assigned |= {alias.asname or alias.name.split(".")[0] for alias in imports}
    return assigned, {name.id for name in names if isinstance(name.ctx, ast.Load)}


@each_chapter
def test_the_student_set_runs_without_what_solutions_define(sets, chapter):
    known = set(dir(builtins))
    for cell in read(sets["student"], chapter).cells:
        if cell.cell_type == "code":
            assigned, used = assigned_and_used(cell.source)
            known |= assigned
            assert used <= known, cell.source


@each_chapter
def test_the_instructor_set_is_what_was_executed_plus_notes(sets, chapter):
    """test_execution.py executed these very cells, solutions included, so they need not be executed again."""
    made = read(sets["instructor"], chapter).cells
    without_notes = [cell for cell in made if "speaker-note" not in workshop.tags(cell)]
    assert [cell.source for cell in without_notes] == [cell.source for cell in nbformat.read(chapter, 4).cells]
    for cell in without_notes:
        if "solution" in workshop.tags(cell):
            assert "hide-cell" not in workshop.tags(cell)
            assert not cell.metadata.get("jupyter", {}).get("source_hidden")
    notes = [cell for cell in made if "speaker-note" in workshop.tags(cell)]
    assert all(cell.cell_type == "markdown" and cell.source.startswith(f"> {workshop.NOTE}") for cell in notes)
    assert len(notes) == len(workshop.read_notes(chapter))


def test_an_instructors_notebook_runs_without_a_network(executed_again):
    """In full, from the unpacked set."""
    assert all(cell.execution_count for cell in executed_again if cell.cell_type == "code")
    assert [cell for cell in executed_again if "solution" in workshop.tags(cell) and cell.outputs]


def test_a_students_notebook_runs_as_it_is(site, sets, tmp_path):
    """And a Chinese one: what stands beside its code changes nothing of what the code says."""
    (wheel,) = sets["student"].glob("*.whl")
    files = workshop.set_files(False, wheel, LANGUAGE)
    name = f"notebooks/{LANGUAGE}/01_tpu_detection.ipynb"
    notebook = tmp_path / "01_tpu_detection.ipynb"
    notebook.write_bytes(files[name])
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-m", "tools.run_chapters", notebook, "--to", tmp_path / "out"]
    subprocess.run(command, cwd=ROOT, check=True)
    english = {cell.id: cell for cell in nbformat.read(build_site.EXECUTED / notebook.name, as_version=4).cells}
    executed = nbformat.read(tmp_path / "out" / notebook.name, as_version=4).cells
    code = [cell for cell in executed if cell.cell_type == "code"]
    assert len(code) > 5 and all(cell.execution_count for cell in code)
    for cell in code:
        if "timing" not in workshop.tags(cell):
            assert list(map(build_site.without_places, cell.outputs)) == list(
                map(build_site.without_places, english[cell.id].outputs)
            ), cell.source


def test_the_chinese_set_has_its_chapters_beside_the_english_ones_and_no_solution(sets):
    (wheel,) = sets["student"].glob("*.whl")
    files = workshop.set_files(False, wheel, LANGUAGE)
    chinese = [name for name in files if name.startswith(f"notebooks/{LANGUAGE}/")]
    assert len(chinese) >= 7
    assert {f"notebooks/{chapter.name}" for chapter in CHAPTERS} < set(files)
    assert "运行" in files["README.md"].decode() and wheel.name in files["README.md"].decode()
    for name in chinese:
        cells = nbformat.reads(files[name].decode(), as_version=4).cells
        assert not any("solution" in workshop.tags(cell) for cell in cells)
        for cell in cells:
            for link in re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", cell.source if cell.cell_type == "markdown" else ""):
                assert os.path.normpath(f"{os.path.dirname(name)}/{link}") in files, f"{link} in {name}"


def test_a_note_for_a_heading_that_is_not_there_is_refused():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T\n\n## A")])
    made = workshop.instructor_chapter(notebook, {"": "First.", "A": "Then."})
    assert [cell.source for cell in made.cells[1:]] == ["> **Speaker note.** First.", "> **Speaker note.** Then."]
    with pytest.raises(ValueError, match="does not have: B"):
        workshop.instructor_chapter(notebook, {"B": "Nowhere."})


def test_the_first_chapters_and_those_of_the_plans_have_notes():
    plan = (workshop.WORKSHOP / "plan.md").read_text()
    taught = {int(number) for number in re.findall(r"Chapter (\d+)", plan)}
    assert len(taught) >= 5
    for chapter in CHAPTERS:
        if int(chapter.stem[:2]) in taught:
            assert len(workshop.read_notes(chapter)) >= 3, chapter.stem


def test_the_plans_add_up():
    """Each step begins where the one before ends, and a plan takes as long as its heading says."""
    for heading, table in re.findall(
        r"^### ([^\n]+)\n(.*?)(?=^###|\Z)", (workshop.WORKSHOP / "plan.md").read_text(), re.M | re.S
    ):
        steps = [[int(h) * 60 + int(m) for h, m in re.findall(r"(\d+):(\d\d)", row)] for row in table.splitlines()]
        steps = [step for step in steps if step]
        assert steps[0][0] == 0
        assert all(begin < end for begin, end in steps)
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(steps))
        hours = {"three and a half hours": 210, "seven hours": 420}[heading.split(": ")[1]]
        assert steps[-1][1] == hours


def test_a_zip_is_the_same_each_time(tmp_path):
    files = {"b": b"2", "a": b"1"}
    for name in ("one", "two"):
        workshop.write_zip(tmp_path / name / "set.zip", files)
    assert (tmp_path / "one" / "set.zip").read_bytes() == (tmp_path / "two" / "set.zip").read_bytes()
    assert zipfile.ZipFile(tmp_path / "one" / "set.zip").namelist() == ["set/a", "set/b"]
