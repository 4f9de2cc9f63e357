"""How pytest executes chapters by its plugin nbmake: ``pytest --nbmake notebooks/``."""

import os
import sys
import tempfile

import nbformat
import pytest

# Chapters that show how long compiling takes, or what the cache does, compile all themselves. So do
# those that train, because to keep a large program takes memory, of which Binder has little.
WITHOUT_CACHE = ("00", "04", "06", "07", "08", "11", "12", "14", "15")
CACHE = "JAX_COMPILATION_CACHE_DIR"
# The folder in which others of a run share compiled programs. Workers inherit its name.
if "PYTEST_XDIST_WORKER" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix="programs-")
    os.environ["PROGRAMS_OF_RUN"] = PROGRAMS.name


def is_chapter(path) -> bool:
    return path.suffix == ".ipynb"


def pytest_configure(config):
    # Otherwise the order of a set of words, which some outputs show, would change with every run.
    os.environ.setdefault("PYTHONHASHSEED", "0")


def pytest_collection_modifyitems(config, items):
    chapters = [item for item in items if is_chapter(item.path)]
    others = [item for item in items if not is_chapter(item.path)]
    # The first chapters are short. They come last, so that all workers end at about the same time.
    items[:] = sorted(chapters, key=lambda item: item.path.name, reverse=True) + others
    if hasattr(config, "workerinput") and len(items) > 1:
        use_own_cores(config.workerinput["workerid"], config.workerinput["workercount"])


def use_own_cores(worker: str, workers: int) -> None:
    """Give a worker, and the kernels that it starts, cores of its own, where the system can.

    XLA spreads each program over all cores that it may use. Two programs on the same cores hinder
    each other.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    number = int(worker.removeprefix("gw"))
    cores = sorted(os.sched_getaffinity(0))[number::workers]
    if cores:
        # XLA may have started threads already, if a test imports JAX.
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if not is_chapter(item.path):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        if not item.path.name.startswith(WITHOUT_CACHE) and CACHE not in os.environ:
            patch.setenv(CACHE, os.environ["PROGRAMS_OF_RUN"])
        try:
            return (yield)
        finally:
            if item.config.option.overwrite:
                note_memory(item.path)


def note_memory(path) -> None:
    """Add to an executed chapter how much memory it took.

    It is the most, in bytes, that any process of this worker's chapters has held so far.
    """
    if sys.platform != "linux":
        return
    import resource  # which Windows does not have

    notebook = nbformat.read(path, as_version=4)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    notebook.metadata["peak_memory_so_far"] = peak * 1024
    nbformat.write(notebook, path)


def pytest_report_teststatus(report):
    """Say how long each chapter took."""
    if report.when == "call" and ".ipynb" in report.nodeid:
        word = report.outcome.upper()
        return report.outcome, word[0], f"{word} in {report.duration:.0f} s"
    return None
