"""On which Pythons, packages and numbers of devices the tests execute the chapters, and how these are installed.

``make test`` executes them on .venv, and ``make test-matrix`` on all others, each in an environment of its own in
``build/matrix``, made anew from a lock with hashes. On Colab's there is no course at first, and a transformers without
Flax: there the first chapter's setup cell installs what it does on Colab. Without diffusers only the chapters past the
pipelines are executed, and with the lock on another Python only those before.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

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
    """Chapters that are executed on a runtime, one after the other, in a process of their own.

    Here they have no network, if the system can take it away.
    """

    def __init__(self, runtime: Runtime, chapters: list[Path]) -> None:
        here = runtime is HERE
        python = make_environment(runtime)
        without_network = [sys.executable, "-m", "tools.offline"] if here and offline.why_not() is None else []
        command = [*without_network, sys.executable, "-m", "tools.run_chapters", *chapters]
        command += ["--to", runtime.executed, "--python", python, "--timeout", "600"]
        environment = without_tests_own() | runtime.environment | {"TUTORIAL_DEVICES": str(runtime.devices)}
        if not here:
            # The course and libtpu are those installed there; importing jax has set the second variable to libtpu here.
            for variable in ("PYTHONPATH", "TPU_LIBRARY_PATH"):
                environment.pop(variable, None)
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        self._lines: list[str] = []

    def wait_for(self, chapter: Path) -> str:
        """What is printed of a chapter at its end."""
        while not (found := [line for line in self._lines if f"] {chapter.stem} " in line]):
            if not (line := self._process.stdout.readline()):
                raise RuntimeError(f"{chapter.stem} was not executed: {''.join(self._lines)}")
            self._lines.append(line)
        return found[0]

    def stop(self) -> None:
        """End the process, if it has not ended by itself."""
        self._process.terminate()
        self._process.communicate()
