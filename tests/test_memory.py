"""How much memory kernels take at their peak, as `make run` measures it and the tests of executed chapters judge it."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
TAKE = "block = b'1' * ({} * 2**20)"


def start(code: str) -> str:
    """A cell that runs code in a process that the kernel starts."""
    return f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"


CELLS = {
    "nothing": ["pass"],
    "given back": [TAKE.format(400) + "; import time; time.sleep(1); del block"],
    "in a process": [start(TAKE.format(400) + "; import time; time.sleep(1)")],
    "in a fork": [
        TAKE.format(400),
        "import os, time\npid = os.fork()\nif pid == 0:\n    time.sleep(1)\n    os._exit(0)\nos.waitpid(pid, 0)",
    ],
    "given back before a process": [
        TAKE.format(400) + "; del block",
        "import time; time.sleep(1)",
        start(TAKE.format(300) + "; import time; time.sleep(1)"),
    ],
}


@pytest.fixture(scope="module")
def peaks(tmp_path_factory):
    """The peak of a kernel that runs such cells, in MiB."""
    folder = tmp_path_factory.mktemp("memory")
    for name, sources in CELLS.items():
        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = [sys.executable, "-m", "tools.run_chapters", *folder.glob("*.ipynb"), "--to", folder / "executed"]
    subprocess.run(command, cwd=ROOT, check=True)
    executed = {name: nbformat.read(folder / "executed" / f"{name}.ipynb", as_version=4) for name in CELLS}
    return {name: notebook.metadata["peak_memory"] / MIB for name, notebook in executed.items()}


def test_memory_that_was_given_back_counts(peaks):
    assert 20 < peaks["nothing"] < 300
    assert 380 < peaks["given back"] - peaks["nothing"] < 500


def test_what_a_kernel_starts_counts(peaks):
    assert 380 < peaks["in a process"] - peaks["nothing"] < 500


def test_a_fork_does_not_count_twice(peaks):
    assert 380 < peaks["in a fork"] - peaks["nothing"] < 500


def test_what_was_given_back_before_another_process_started_does_not_count_with_it(peaks):
    assert peaks["given back before a process"] - peaks["nothing"] < 500


def test_processes_that_are_no_kernels_do_not_count():
    code = "import subprocess, sys; from tools.memory import KernelMemory\nwith KernelMemory() as memory:\n"
    code += f"    subprocess.run([sys.executable, '-c', {TAKE.format(100) + '; import time; time.sleep(1)'!r}])\n"
    code += "print(memory.peak)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "0\n"
