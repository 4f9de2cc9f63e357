"""On which Pythons, packages and numbers of devices the tests execute the chapters, and how these are installed.

``make test`` executes them on .venv, and ``make test-matrix`` on all others, each in an environment of its own in
``build/matrix``, made anew from a lock with hashes. On Colab's there is no course at first, and a transformers without
Flax: there the setup cell of whichever chapter runs first installs what it does on Colab. Without diffusers only the
chapters past the pipelines are executed, and with the lock on another Python only those before.
"""

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread

from tools import offline
from tools.install import add_course, install
from tools.lock import COLAB_LOCK, COLAB_PYTHON, LOCK, NEWEST_LOCK, NEWEST_PYTHON, ROOT
from tools.run_chapters import CHAPTERS, EXECUTED

MATRIX = ROOT / "build" / "matrix"


@dataclass(frozen=True)
class Runtime:
    """A Python, the packages on it, and what is executed there."""

    name: str
    python: str
    lock: Path
    devices: int
    chapters: str = ""  # a regular expression for what their file names begin with
    environment: dict[str, str] = field(default_factory=dict)  # what the runtime sets
    has_course: bool = True  # else the setup cell installs it

    def list_chapters(self) -> list[Path]:
        return [chapter for chapter in CHAPTERS if re.match(self.chapters, chapter.name)]

    @property
    def executed(self) -> Path:
        """The folder in which executed chapters are left."""
        return EXECUTED if self is HERE else MATRIX / self.name / "chapters"


# The site shows what is executed here, so the chapters need not run once more for it.
HERE = Runtime("here", f"{sys.version_info.major}.{sys.version_info.minor}", LOCK, devices=8)
PIPELINES, PAST_THEM = "0|10", "1[1-4]"
# Which cores other tests have here, and which the chapters beside them; empty where that cannot be chosen.
CORES = sorted(os.sched_getaffinity(0)) if shutil.which("taskset") else []
TESTS_CORES, CHAPTERS_CORES = set(CORES[: len(CORES) // 2]), set(CORES[len(CORES) // 2 :])
COLAB = {"COLAB_RELEASE_TAG": "simulated", "TUTORIAL_SOURCE": ROOT.as_uri()}
OTHERS = [
    Runtime("colab", COLAB_PYTHON, COLAB_LOCK, devices=1, environment=COLAB, has_course=False),
    Runtime("newest", "3.12", LOCK, devices=3, chapters=PIPELINES),  # as on Kaggle, whose image takes the newest jax
    Runtime("oldest-python", "3.11", LOCK, devices=3, chapters=PIPELINES),
    Runtime("without-diffusers", NEWEST_PYTHON, NEWEST_LOCK, devices=3, chapters=PAST_THEM),
]
OTHERS = [runtime for runtime in OTHERS if (runtime.python, runtime.lock) != (HERE.python, HERE.lock)]


def find_python(version: str) -> str:
    """The path of an interpreter of this version.

    Raises
    ------
    RuntimeError
        If this machine has none.
    """
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        # pyenv puts every version on the path, and runs only those that are selected.
        selected = os.environ | {"PYENV_VERSION": version}
        return subprocess.run(command, env=selected, capture_output=True, text=True, check=True).stdout.strip()
    except (FileNotFoundError, subprocess.CalledProcessError):
        raise RuntimeError(
            f"There is no python{version} here, and the chapters are tested on it, too: install it, for example by "
            f"`uv python install {version}`."
        ) from None


def make_environment(runtime: Runtime) -> Path:
    """Make a runtime's environment anew, as one starts from its image; the path of its Python."""
    if runtime is HERE:
        return Path(sys.executable)
    folder = MATRIX / runtime.name / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([find_python(runtime.python), "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    install(python, runtime.lock)
    if runtime.has_course:
        add_course(python)
    return python


def without_tests_own() -> dict[str, str]:
    """The environment without what tests set to compile less: chapters show what a reader's own machine does."""
    return {name: value for name, value in os.environ.items() if name not in ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")}


class Execution:
    """Chapters that are executed on a runtime, each by a process of its own.

    One runs at a time. On HERE they have no network, if the system can take it away, and that one has half of the cores
    while other tests have the rest, since programs that XLA spreads over the same cores hinder each other. As soon as a
    test waits for a chapter, a second one runs on the tests' cores. The last chapter comes first: at the end short ones
    are left, and neither half waits for long.
    """

    def __init__(self, runtime: Runtime, chapters: list[Path]) -> None:
        here = runtime is HERE
        python = make_environment(runtime)
        without_network = [sys.executable, "-m", "tools.offline"] if here and offline.why_not() is None else []
        self._command = [*without_network, sys.executable, "-m", "tools.run_chapters"]
        self._options = ["--to", runtime.executed, "--python", python, "--timeout", "600", "--no-page"]
        self._environment = without_tests_own() | runtime.environment | {"TUTORIAL_DEVICES": str(runtime.devices)}
        if not here:
            # The course and libtpu are those installed there; importing jax has set the second variable to libtpu here.
            for variable in ("PYTHONPATH", "TPU_LIBRARY_PATH"):
                self._environment.pop(variable, None)
        # Of each worker that may still start. One chapter takes all that there are.
        self._cores_left = [TESTS_CORES, CHAPTERS_CORES] if here and len(chapters) > 1 else [set()]
        self._said = {chapter: Future() for chapter in chapters}
        self._left, self._processes, self._workers = list(chapters), [], []
        self._start_worker()

    def _start_worker(self) -> None:
        self._workers.append(Thread(target=self._work, args=(self._cores_left.pop(),), daemon=True))
        self._workers[-1].start()

    def _work(self, cores: set[int]) -> None:
        pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
        while True:
            try:
                chapter = self._left.pop()
            except IndexError:
                return
            try:
                command = [*pinned, *self._command, chapter, *self._options]
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
                process = subprocess.Popen(command, cwd=ROOT, env=self._environment, **pipes)
                self._processes.append(process)
                self._said[chapter].set_result(process.communicate())
            except Exception as error:  # else a test would wait for ever
                self._said[chapter].set_exception(error)

    def wait_for(self, chapter: Path) -> str:
        """What is printed of a chapter at its end."""
        if self._cores_left:
            self._start_worker()
        said, errors = self._said[chapter].result()
        found = [line for line in said.splitlines(keepends=True) if f"] {chapter.stem} " in line]
        if not found:
            raise RuntimeError(f"{chapter.stem} was not executed: {said}{errors}")
        return found[0]

    def stop(self) -> None:
        """End the processes, if they have not ended by themselves, and begin no more."""
        self._left.clear()
        for worker in self._workers:
            while worker.is_alive():
                for process in self._processes:
                    process.terminate()
                worker.join(0.1)
