"""The chapters: how they are written. What they do when they run is in test_execution.py."""

import re

import nbformat
import pytest

from tools.run_chapters import CHAPTERS
from tools.workshop import tags

TAGS = {"setup", "exercise", "solution", "predict", "timing", "hide-cell", "hide-input"}
UPSTREAM = r"\]\(https://((docs\.)?jax\.dev|flax\.readthedocs\.io|huggingface\.co/docs)/"


@pytest.fixture(params=CHAPTERS, ids=lambda chapter: chapter.stem)
def chapter(request):
    return request.param


@pytest.fixture
def cells(chapter):
    return nbformat.read(chapter, as_version=4).cells


@pytest.fixture
def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


@pytest.fixture
def prose(cells):
    return [cell for cell in cells if cell.cell_type == "markdown"]


def is_folded(cell) -> bool:
    """Whether a cell's source is hidden in JupyterLab and on Kaggle, and in Colab."""
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden")) and cell.metadata.get("cellView") == "form"


def test_it_is_committed_without_outputs(code):
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_setup_cell_is_the_same_everywhere():
    setups = [cell.source for path in CHAPTERS for cell in nbformat.read(path, 4).cells if "setup" in tags(cell)]
    assert len(setups) == len(CHAPTERS)
    assert len(set(setups)) == 1
    assert setups[0].startswith("# @title Setup: run this first\n")
    assert len(setups[0].splitlines()) <= 25


def test_it_is_neither_short_nor_long(cells):
    assert 15 <= len(cells) <= 40
    assert [cell.source for cell in cells if len(cell.source.splitlines()) > 30] == []


def test_it_opens_and_ends_as_every_chapter(chapter, cells):
    opening, ending = cells[0].source, cells[-1].source
    assert re.match(rf"# {int(chapter.stem[:2])}\. ", opening)
    assert "In this chapter you will" in opening
    assert "You need" in opening
    assert re.search(r"On\s+a\s+CPU", opening)
    assert any("## What you learned" in cell.source for cell in cells)
    assert ending.startswith("Next")


def test_no_tag_permits_an_error(code):
    """Colab's "Run all" stops at an exception, whatever the tags say."""
    assert set().union(*map(tags, code)) <= TAGS


def test_setup_and_solutions_are_folded_everywhere_under_a_title(code):
    folded = [cell for cell in code if tags(cell) & {"setup", "solution"}]
    assert [cell.source for cell in folded if not (is_folded(cell) and cell.source.startswith("# @title "))] == []


def test_each_exercise_has_a_solution(code):
    exercises = [k for k, cell in enumerate(code) if "exercise" in tags(cell)]
    assert 2 <= len(exercises) <= 3
    assert all({"solution", "hide-cell"} <= tags(code[k + 1]) for k in exercises)


def test_the_reader_predicts_a_figure_and_the_next_code_answers(cells):
    following = [cells[k + 1 :] for k, cell in enumerate(cells) if "**Predict.**" in cell.source]
    answers = [next(cell for cell in after if cell.cell_type == "code") for after in following]
    assert answers
    assert all("predict" in tags(cell) for cell in answers)
    assert sum("predict" in tags(cell) for cell in cells) == len(answers)


def test_it_links_to_the_pages_that_it_stands_on(prose):
    assert any(re.search(UPSTREAM, cell.source) for cell in prose)


def test_its_links_to_other_chapters_lead_somewhere(chapter, cells):
    targets = [target for cell in cells for target in re.findall(r"\]\(([^)#]+\.ipynb)", cell.source)]
    assert [target for target in targets if not (chapter.parent / target).exists()] == []


def test_it_never_counts_on_a_number_of_devices(prose):
    """Prose may tell what others promised or published, but not what the reader has."""
    for cell in prose:
        assert not re.search(r"\b(8|eight) (simulated )?devices\b(?! the guides)", cell.source) or re.search(
            "guides|Kaggle|on 8 devices, on 3", cell.source
        ), cell.source


def test_no_assertion_depends_on_a_clock(code):
    assert [cell.source for cell in code if "timing" in tags(cell) and "assert" in cell.source] == []
