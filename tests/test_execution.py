"""What the chapters do where they run.

Each is executed once here: on .venv, with 8 devices, and without a network if the system can take it away. ``make
test-matrix`` makes the same assertions on the other runtimes of tools/matrix.py: all chapters on Colab's packages with
1 device, those of the pipelines with the lock on a different Python with 3, and those past them on the newest packages
without diffusers with 3. So a fault shows only if it follows from the packages alone, or from the number of devices
alone. Nobody runs the lock on this Python with 1 or 3 devices, Colab's packages with 3 or 8, the lock on another Python
with 1 or 8, the lock on Python 3.13, or the chapters past the pipelines with the lock on any Python but this.
"""

import re
from types import SimpleNamespace

import nbformat
import pytest

from tools import matrix
from tools.memory import BINDER, SERVER

# What a chapter must print at the start of a line, as regular expressions.
MEASURED = ("cold compile", "warm cache", "loaded executable", "first call", "steady call")
PRINTED = {
    "07_sdxl_aot": [rf"{row} +\d" for row in MEASURED],
    "10_many_hosts": [
        r"\[0\] 6 prompt\(s\), 0 drawn already; 2 round\(s\) to go, on 4 device\(s\) of 2 process\(es\)$",
        r"\[0\] 6 of 6 image\(s\) written",  # and not what fills the last round
        r"\[launch\] process 1 \(pid \d+\) was killed by SIGKILL$",
        r"\[0\] 6 prompt\(s\), [1-5] drawn already; [12] round\(s\) to go, on 4 device\(s\) of 1 process\(es\)$",
    ],
}


def pytest_generate_tests(metafunc):
    runtimes = matrix.OTHERS if metafunc.config.getoption("matrix") else [matrix.HERE]
    pairs = [(runtime, chapter) for runtime in runtimes for chapter in runtime.list_chapters()]
    ids = [f"{runtime.name}-{chapter.stem}" for runtime, chapter in pairs]
    # One parameter, not two: pytest would take a chapter on all runtimes before it takes the next.
    metafunc.parametrize("where_and_what", pairs, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def where_and_what(request):
    return request.param


@pytest.fixture(scope="session")
def runtime(where_and_what):
    return where_and_what[0]


@pytest.fixture(scope="session")
def chapter(where_and_what):
    return where_and_what[1]


@pytest.fixture(scope="session")
def executed(runtime, chapter, execute):
    """An executed chapter: its notebook, its code cells, all that it printed, and what `make run` says of it."""
    said = execute(runtime).wait_for(chapter)
    notebook = nbformat.read(runtime.executed / chapter.name, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return SimpleNamespace(notebook=notebook, code=code, printed="".join(map(printed_by, code)), said=said)


def printed_by(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_it_runs_to_the_end_without_an_error(executed):
    assert executed.said.endswith(" ok\n"), executed.said
    assert all(cell.execution_count for cell in executed.code)
    assert [output for cell in executed.code for output in cell.outputs if output.output_type == "error"] == []


def test_it_ran_where_it_should(executed, runtime, chapter):
    assert executed.notebook.metadata.language_info.version.startswith(f"{runtime.python}.")
    assert [c.source for c in executed.notebook.cells] == [c.source for c in nbformat.read(chapter, as_version=4).cells]


def test_pictures_and_texts_in_their_place_go_together(executed):
    for cell in executed.code:
        shows_picture = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert shows_picture == bool(cell.metadata.get("mystnb", {}).get("image", {}).get("alt")), cell.source


def test_no_cell_prints_a_wall_of_lines(executed):
    assert [cell.source for cell in executed.code if len(printed_by(cell).splitlines()) >= 30] == []


def test_what_a_chapter_is_about_is_printed(executed, chapter):
    for line in PRINTED.get(chapter.stem, ()):
        assert re.search(rf"^{line}", executed.printed, flags=re.MULTILINE), f"no line {line!r}"


def test_it_fits_into_binders_memory(executed):
    assert 0 < executed.notebook.metadata["peak_memory"] < BINDER - SERVER
