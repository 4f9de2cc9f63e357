"""What `make run` does with chapters that work, fail, or are not there, and where they cannot be run."""

import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import matrix, run_chapters

ROOT = Path(__file__).resolve().parents[1]
PICTURE = "from PIL import Image\nImage.new('RGB', (8, 8))"


def run(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.run_chapters", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chapters") / "with a space"


@pytest.fixture(scope="module")
def result(folder):
    """A run of a chapter that fails, of one that looks at the page of the pictures, and of one that draws."""
    look = "page = open('index.html').read(); print(page.count('still to run'), 'http-equiv=\\'refresh' in page)"
    stopped = ["1 / 0", "print('never')"]
    folder.mkdir()
    files = []
    for name, sources in {"first": stopped, "second": [look], "third": [PICTURE]}.items():
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[-1].metadata["mystnb"] = {"image": {"alt": f"the picture of {name}"}}
        files.append(folder / f"{name}.ipynb")
        nbformat.write(nbformat.v4.new_notebook(cells=cells), files[-1])
    return run(*files, "--to", folder / "out")


def outputs(folder, name):
    return [cell.outputs for cell in nbformat.read(folder / "out" / f"{name}.ipynb", as_version=4).cells]


def test_a_failing_chapter_is_named_and_does_not_stop_the_next(result, folder):
    assert result.returncode == 1
    lines = result.stdout.splitlines()
    expected = [r"FAILED in cell 1: ZeroDivisionError: division by zero", "ok", "ok"]
    names = ("first", "second", "third")
    assert len(lines) == 5, "nothing but a line for each chapter, since this is no terminal"
    for number, (name, outcome) in enumerate(zip(names, expected, strict=True), start=1):
        assert re.fullmatch(rf"\[{number}/3\] {name} +\d+ s  \d\.\d\d GiB  {outcome}", lines[number])
    assert lines[-1].startswith("2 of 3 chapters ran to the end.")
    assert [len(found) for found in outputs(folder, "first")] == [1, 0]


def test_the_page_is_named_first_and_grows_with_each_chapter(result, folder):
    page = folder / "out" / "index.html"
    assert page.as_uri() in result.stdout.splitlines()[0]
    ((output,),) = outputs(folder, "second")
    assert output.text == "2 True\n", "the second chapter found itself and the third waiting"
    text = page.read_text()
    assert "ZeroDivisionError" in text
    assert "alt='the picture of third' src='data:image/png;base64," in text
    assert "still to run" not in text and "http-equiv" not in text


def test_what_a_cell_prints_is_one_output_wherever_the_kernel_cuts_it():
    def printed(text, name="stdout"):
        return nbformat.v4.new_output("stream", text=text, name=name)

    picture = nbformat.v4.new_output("display_data", {"image/png": ""})
    cell = nbformat.v4.new_code_cell()
    cell.outputs = [printed("half a "), printed("line\n"), printed("!", "stderr"), printed("a"), picture, printed("a")]
    run_chapters.merge_prints(nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_markdown_cell()]))
    assert cell.outputs == [printed("half a line\n"), printed("!", "stderr"), printed("a"), picture, printed("a")]


def test_a_kernel_that_dies_is_a_failure_in_one_line(tmp_path):
    cell = nbformat.v4.new_code_cell("import os; os._exit(1)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "dies.ipynb")
    died = run(tmp_path / "dies.ipynb", "--to", tmp_path / "out")
    assert died.returncode == 1
    assert "FAILED in DeadKernelError: Kernel died" in died.stdout


def test_a_chapter_that_is_not_there_is_named(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run_chapters", "nowhere.ipynb"])
    with pytest.raises(SystemExit, match="2"):
        run_chapters.main()
    assert "no such notebook: nowhere.ipynb" in capsys.readouterr().err


def test_a_python_that_is_missing_stops_the_matrix_in_one_sentence():
    with pytest.raises(RuntimeError, match=r"^There is no python2\.0 here, and .*`uv python install 2\.0`\.$"):
        matrix.find_python("2.0")
