"""The chapters: how they are written. What they do when they run is in test_execution.py."""

import nbformat
import pytest

from lab.site.chapters import CHAPTERS, tags

TAGS = {"setup", "exercise", "solution", "predict", "timing", "hide-cell", "hide-input"}


@pytest.fixture(params=CHAPTERS, ids=lambda chapter: chapter.stem)
def chapter(request):
    return request.param


@pytest.fixture
def cells(chapter):
    return nbformat.read(chapter, as_version=4).cells


@pytest.fixture
def code(cells):
    return [cell for cell in cells if cell.cell_type == "code"]


def is_folded(cell) -> bool:
    """Whether a cell's source is hidden in JupyterLab and in Colab."""
    return (
        bool(cell.metadata.get("jupyter", {}).get("source_hidden"))
        and cell.metadata.get("cellView") == "form"
    )


def test_it_is_committed_without_outputs(code):
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


def test_the_setup_cell_is_the_same_everywhere():
    setups = [
        cell.source
        for path in CHAPTERS
        for cell in nbformat.read(path, 4).cells
        if "setup" in tags(cell)
    ]
    assert len(setups) == len(CHAPTERS)
    assert len(set(setups)) == 1
    assert setups[0].startswith("# @title Setup: run this first\n")


def test_no_tag_permits_an_error(code):
    """Colab's "Run all" stops at an exception, whatever the tags say."""
    assert set().union(*map(tags, code)) <= TAGS


def test_what_is_hidden_is_folded_everywhere_under_a_title(code):
    for cell in code:
        if tags(cell) & {"setup", "solution", "hide-input"}:
            assert is_folded(cell) and cell.source.startswith("# @title "), cell.source


def test_kaggle_folds_what_is_hidden_and_the_outputs_of_answers(code):
    for cell in code:
        is_answer = bool(tags(cell) & {"solution", "predict"})
        is_hidden = is_answer or bool(tags(cell) & {"setup", "hide-input"})
        assert cell.metadata.get("_kg_hide-input", False) == is_hidden, cell.source
        assert cell.metadata.get("_kg_hide-output", False) == is_answer, cell.source


def test_each_exercise_has_a_solution(code):
    for number, cell in enumerate(code):
        if "exercise" in tags(cell):
            assert {"solution", "hide-cell"} <= tags(code[number + 1]), cell.source


def test_an_answer_follows_each_prediction(chapter, cells):
    """In one of the next three code cells: the first ones may prepare it."""
    predictions = [k for k, cell in enumerate(cells) if "**Predict.**" in cell.source]
    assert predictions or chapter.stem == "00_first_images"
    for k in predictions:
        code = [cell for cell in cells[k + 1 :] if cell.cell_type == "code"]
        assert any("predict" in tags(cell) for cell in code[:3]), cells[k].source


def test_no_assertion_depends_on_a_clock(code):
    for cell in code:
        assert not ("timing" in tags(cell) and "assert" in cell.source), cell.source
