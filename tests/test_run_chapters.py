"""tools/run_chapters.py: what `make run` does with chapters that work, fail, or are not there."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

RUNNER = Path(__file__).resolve().parents[1] / "tools" / "run_chapters.py"
PICTURE = "from PIL import Image\nImage.new('RGB', (8, 8))"


@pytest.fixture
def run(tmp_path):
    def run(**chapters: list[str]) -> subprocess.CompletedProcess:
        files = []
        for name, sources in chapters.items():
            cells = [nbformat.v4.new_code_cell(source) for source in sources]
            cells[-1].metadata["mystnb"] = {"image": {"alt": f"the picture of {name}"}}
            files.append(tmp_path / f"{name}.ipynb")
            nbformat.write(nbformat.v4.new_notebook(cells=cells), files[-1])
        command = [sys.executable, str(RUNNER), *map(str, files), "--to", str(tmp_path / "out")]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return run


def test_a_failing_chapter_is_named_and_does_not_stop_the_next(run, tmp_path):
    result = run(first=["1 / 0"], second=[PICTURE])
    assert result.returncode == 1
    assert "first" in result.stdout and "failed in cell 1: ZeroDivisionError: division by zero" in result.stdout
    assert [line.split()[-1] for line in result.stdout.splitlines() if line.startswith("second ")] == ["ok"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert "ZeroDivisionError" in page
    assert "alt='the picture of second' src='data:image/png;base64," in page
    assert len(nbformat.read(tmp_path / "out" / "second.ipynb", 4).cells[0].outputs) == 1


def test_it_ends_with_a_table_and_the_path_of_the_page(run):
    result = run(only=[PICTURE])
    assert result.returncode == 0
    lines = result.stdout.strip().splitlines()
    assert lines[-1].startswith("Pictures: ") and lines[-1].endswith("index.html")
    assert any(line.split() == ["chapter", "seconds", "memory", "result"] for line in lines)


def test_a_chapter_that_is_not_there_is_named():
    result = subprocess.run([sys.executable, str(RUNNER), "nowhere.ipynb"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "no such notebook: nowhere.ipynb" in result.stderr
