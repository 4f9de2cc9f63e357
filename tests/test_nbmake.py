"""What pytest leaves when it executes chapters by nbmake, and the page with their pictures."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from lab.site import chapters

ROOT = Path(__file__).resolve().parents[1]
PICTURE = "from PIL import Image\nImage.new('RGB', (8, 8))"
SOURCES = {
    "01_fails": ["1 / 0", "print('never')"],
    "02_prints": ["print(sorted({'b', 'a'}), hash('a'))"],
    "03_draws": [PICTURE],
}


@pytest.fixture(scope="module")
def run():
    """A run of a chapter that fails, and of two that do not, where pytest finds its settings."""
    folder = ROOT / "build" / "try"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, sources in SOURCES.items():
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        cells[-1].metadata["mystnb"] = {"image": {"alt": f"<{name}>"}}
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--verbose", str(folder)]
    return folder, subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def read(folder: Path, name: str):
    return nbformat.read(folder / f"{name}.ipynb", as_version=4)


def test_a_failing_chapter_is_named_and_does_not_stop_the_next(run):
    folder, result = run
    assert result.returncode == 1
    lines = re.findall(r"::(\w+)\.ipynb (PASSED|FAILED) in \d+ s", result.stdout)
    assert lines == [("03_draws", "PASSED"), ("02_prints", "PASSED"), ("01_fails", "FAILED")]
    assert "division by zero" in result.stdout
    failed, after = read(folder, "01_fails").cells
    assert [output.output_type for output in failed.outputs] == ["error"]
    assert after.outputs == []


@pytest.mark.skipif(sys.platform != "linux", reason="It is counted on Linux only.")
def test_an_executed_chapter_says_how_much_memory_it_took(run):
    folder, _ = run
    assert 20e6 < read(folder, "02_prints").metadata["peak_memory_so_far"] < 500e6


def test_the_page_shows_the_pictures_and_names_what_failed(run):
    folder, _ = run
    text = chapters.write_page(folder).read_text()
    problems = re.findall(r'<p class="problem">(.*)</p>', text)
    assert problems == ["Cell 1 failed: ZeroDivisionError: division by zero"]
    assert re.findall(r'<img alt="(.*?)" src="data:image/png;base64,', text) == ["&lt;03_draws&gt;"]


def test_the_page_names_a_chapter_that_was_not_executed(tmp_path):
    cell = nbformat.v4.new_code_cell("print(1)")
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), tmp_path / "dies.ipynb")
    assert "Cell 1 was not executed." in chapters.write_page(tmp_path).read_text()
