"""How much memory kernels take, which tests of the chapters and `make run` rely on; and how much is left to them."""

import os
import socket
import subprocess
import sys
import time
from urllib.error import URLError
from urllib.request import urlopen

import nbformat
import psutil
from nbclient import NotebookClient

from tools import memory

MIB = 2**20


def peak_of(*sources: str) -> float:
    """The peak of a kernel, in MiB, that runs these cells."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    with memory.KernelMemory() as watched:
        NotebookClient(nbformat.v4.new_notebook(cells=cells)).execute()
    return watched.peak / MIB


def test_memory_that_was_given_back_counts():
    small = peak_of("pass")
    assert 20 < small < 300
    take = "import time; block = b'1' * (400 * 2**20); time.sleep(1); del block"
    assert 380 < peak_of(take) - small < 500


def test_what_a_kernel_starts_counts_and_a_fork_of_it_does_not_count_twice():
    child = "import time; block = b'1' * (400 * 2**20); time.sleep(2)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert peak_of(start) > 420
    fork = "import os, time; block = b'1' * (400 * 2**20); pid = os.fork()"
    ends = "if pid == 0:\n    time.sleep(1)\n    os._exit(0)\nos.waitpid(pid, 0)"
    assert peak_of(fork + "\n" + ends) < 700


def test_processes_that_are_no_kernels_do_not_count():
    with memory.KernelMemory() as watched:
        subprocess.run([sys.executable, "-c", "import time; block = b'1' * (100 * 2**20); time.sleep(1)"], check=True)
    assert watched.peak == 0


def test_jupyterlab_leaves_the_chapters_their_share_of_binder(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--IdentityProvider.token=", f"--notebook-dir={tmp_path}"]
    folders = {"JUPYTER_CONFIG_DIR": str(tmp_path), "JUPYTER_RUNTIME_DIR": str(tmp_path)}
    server = subprocess.Popen(command, env=os.environ | folders, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                for page in ("lab", "api/contents", "lab/api/settings"):
                    urlopen(f"http://127.0.0.1:{port}/{page}", timeout=60).read()
                break
            except URLError:
                assert time.monotonic() < deadline, "JupyterLab does not answer"
                time.sleep(0.5)
        processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
        peak = sum(map(memory.resident_peak, processes))
    finally:
        server.terminate()
        server.wait()
    assert 0 < peak < memory.SERVER


def test_what_a_kernel_gave_back_before_it_started_another_process_does_not_count_with_it():
    take = "block = b'1' * (400 * 2**20); del block"
    child = "import time; block = b'1' * (300 * 2**20); time.sleep(2)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    assert peak_of(take, "import time; time.sleep(1)", start) < 620
