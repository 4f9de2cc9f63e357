"""Execute chapters on other Pythons, packages and numbers of devices: ``make test-runtimes``.

Each runtime has an environment of its own in ``build/runtimes``, made anew from a lock with hashes.
There the chapters are executed by the same command as everywhere, ``pytest --nbmake``.
``RUNTIME=colab`` chooses one; otherwise all take their turn but the one that ``make test`` is on,
and those of ``--skip``.
One that fails does not stop the next. The exit status is the number of those that failed.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from lab.site.chapters import CHAPTERS
from lab.site.lock import LOCK, ROOT, locked_versions, make_environment
from lab.site.set_repo import GITHUB, stamped_repository

BUILD = ROOT / "build" / "runtimes"
SHOWN = ("jax", "flax", "diffusers", "transformers", "numpy")


@dataclass(frozen=True)
class Runtime:
    """A Python, the packages on it, and what is executed there."""

    name: str
    python: str
    lock: Path
    devices: int
    chapters: range  # by their numbers
    has_course: bool = True  # otherwise the setup cell installs it
    variables: dict[str, str] = field(default_factory=dict)  # what such a runtime sets

    def list_chapters(self) -> list[Path]:
        return [chapter for chapter in CHAPTERS if int(chapter.name[:2]) in self.chapters]

    def describe(self) -> str:
        """What runs on what, in a line."""
        versions = locked_versions(self.python, lock=self.lock)
        shown = [f"{name} {versions[name]}" for name in SHOWN if name in versions]
        where = f"Python {self.python}, {', '.join(shown)}, {self.devices} device(s)"
        return f"{self.name}: {len(self.list_chapters())} chapters on {where}"


RUNTIMES = [
    Runtime(
        name="colab",
        python="3.13",
        lock=ROOT / "locks" / "colab.lock",
        devices=1,
        chapters=range(17),
        has_course=False,
        variables={"COLAB_RELEASE_TAG": "simulated"},
    ),
    Runtime(
        name="between",
        python="3.12",
        lock=ROOT / "locks" / "between.lock",
        devices=4,
        chapters=range(6),
    ),
    # Kaggle's image takes the newest jax on this Python.
    Runtime(name="newest", python="3.12", lock=LOCK, devices=3, chapters=range(8)),
    Runtime(name="oldest-python", python="3.11", lock=LOCK, devices=3, chapters=range(8)),
    # The chapters past the pipelines need nothing that was removed upstream.
    Runtime(
        name="without-diffusers",
        python="3.13",
        lock=ROOT / "locks" / "newest.lock",
        devices=3,
        chapters=range(9, 17),
    ),
]


def is_here(runtime: Runtime) -> bool:
    """Whether ``make test`` executes the chapters on the same Python and packages."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return (runtime.python, runtime.lock) == (here, LOCK)


def build_wheel() -> Path:
    """Build the course's wheel; its path."""
    folder = BUILD / "wheel"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def copy_chapters(runtime: Runtime, wheel: Path) -> list[Path]:
    """Copy a runtime's chapters, with the wheel where their setup cell has the course's address."""
    folder = BUILD / runtime.name / "notebooks"
    folder.mkdir(parents=True, exist_ok=True)
    address = f"git+{GITHUB}{stamped_repository()}"
    copies = []
    for chapter in runtime.list_chapters():
        copy = folder / chapter.name
        copy.write_text(chapter.read_text().replace(address, wheel.as_uri()))
        copies.append(copy)
    return copies


def execute(runtime: Runtime, wheel: Path) -> bool:
    """Execute a runtime's chapters in a new environment; whether all of them ran to the end."""
    try:
        python = make_environment(BUILD / runtime.name / "venv", runtime.python, runtime.lock)
        if runtime.has_course:
            uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*uv, "--python", str(python), str(wheel)], check=True)
    except subprocess.CalledProcessError as error:
        print(f"The environment could not be made: {error}", flush=True)
        return False
    variables = os.environ | runtime.variables | {"TUTORIAL_DEVICES": str(runtime.devices)}
    # The course and the TPU compiler are those that the environment has.
    for name in ("PYTHONPATH", "TPU_LIBRARY_PATH"):
        variables.pop(name, None)
    copies = copy_chapters(runtime, wheel)
    pytest = [str(python), "-m", "pytest", "--nbmake", "--overwrite", "--verbose"]
    return subprocess.run([*pytest, *map(str, copies)], cwd=ROOT, env=variables).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [runtime.name for runtime in RUNTIMES]
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names)}")
    parser.add_argument("--skip", action="append", default=[], metavar="name")
    arguments = parser.parse_args()
    if unknown := {*arguments.names, *arguments.skip} - set(names):
        parser.error(f"there is no runtime {min(unknown)!r}: choose from {', '.join(names)}")
    if arguments.names:
        chosen = [runtime for runtime in RUNTIMES if runtime.name in arguments.names]
    else:
        chosen = [runtime for runtime in RUNTIMES if not is_here(runtime)]
    chosen = [runtime for runtime in chosen if runtime.name not in arguments.skip]
    wheel = build_wheel()
    outcomes = []
    for runtime in chosen:
        print(f"\n=== {runtime.describe()}", flush=True)
        outcomes.append(execute(runtime, wheel))
    print("\n=== Summary")
    for runtime, passed in zip(chosen, outcomes, strict=True):
        print(f"{'passed' if passed else 'FAILED'}  {runtime.describe()}")
    return outcomes.count(False)


if __name__ == "__main__":
    sys.exit(main())
