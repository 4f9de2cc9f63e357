"""Execute chapters on other Pythons, packages and numbers of devices: ``make test-runtimes``.

Each session makes an environment anew from a lock with hashes, in ``build/runtimes``, and there
executes copies of chapters by the same command as everywhere, ``pytest --nbmake``.
``make test-runtimes RUNTIME=colab`` chooses one; ``.venv/bin/nox --list`` names them, and
``.venv/bin/nox --session colab -- 3 5`` executes these chapters of one.
CONTRIBUTING.md says why each has the chapters and devices that it has.
"""

import os
import shutil
import sys
from pathlib import Path

import nox

from lab.site.chapters import CHAPTERS
from lab.site.set_repo import GITHUB, stamped_repository

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"  # what `make test` runs on
# The course and the TPU compiler are those that the environment has.
NONE_OF_OURS = {"PYTHONPATH": None, "TPU_LIBRARY_PATH": None}

# Those of chapters 0 to 8 between which all calls of the pipelines, pmap and the compiler stand.
OF_PIPELINES = (0, 4, 5, 7, 8)
# What ``nox -- short`` executes, where one machine does all of it, beside its own `make test`: of
# each set a few chapters that call most of what differs between the sets.
SHORT = {
    "colab": (5, 7, 8),
    "between": (3,),
    "newest": (5,),
    "oldest-python": (5,),
    "newest-python": (5,),
    "without-diffusers": (13, 16),
}
# Programs that are compiled in less time and run for longer: chapters just have to end here.
FASTER = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}

# pyenv puts the commands of all its versions on the path, and runs only those of these.
os.environ["PYENV_VERSION"] = "3.11:3.12:3.13"
nox.options.default_venv_backend = "uv"
nox.options.envdir = "build/runtimes"
nox.options.error_on_missing_interpreters = True


def execute(session, lock: str, devices: int, numbers, has_course: bool = True, **variables: str):
    """Execute the chapters of these numbers; without the course, the setup cell installs it.

    Other numbers can be given behind ``--``, or ``short``.
    """
    if session.posargs == ["short"]:
        numbers = SHORT[session.name]
    elif session.posargs:
        numbers = [int(number) for number in session.posargs]
    session.install("--require-hashes", "-r", lock)
    folder = Path("build", "chapters-of-runtimes", session.name).resolve()
    shutil.rmtree(folder, ignore_errors=True)
    build = ("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    session.run(sys.executable, *build, external=True, silent=True)
    (wheel,) = folder.glob("*.whl")
    if has_course:
        session.install("--no-deps", str(wheel))
    # The setup cell installs this wheel in place of what is published.
    where = {f"{GITHUB}{stamped_repository()}\\": f"{wheel.as_uri()}\\", "git+{source}": "{source}"}
    for chapter in CHAPTERS:
        if int(chapter.name[:2]) in numbers:
            text = chapter.read_text()
            for published, here in where.items():
                assert published in text, f"{chapter.name} does not install the course as expected"
                text = text.replace(published, here)
            (folder / chapter.name).write_text(text)
    pytest = ("python", "-m", "pytest", "--nbmake", "--overwrite", "--verbose", str(folder))
    session.run(*pytest, env={**NONE_OF_OURS, "TUTORIAL_DEVICES": str(devices), **variables})


# The setup cell needs pip.
@nox.session(python="3.13", venv_params=["--seed"])
def colab(session):
    """Every chapter on Colab's packages, with the oldest JAX, on one device."""
    like_colab = {"COLAB_RELEASE_TAG": "simulated"}
    execute(session, "locks/colab.lock", 1, range(18), False, **like_colab, **FASTER)


@nox.session(python="3.12")
def between(session):
    """The chapters on pmap, on packages between the oldest and the newest, on four devices."""
    execute(session, "locks/between.lock", 4, (3, 4, 5), **FASTER)


# The lock has the same packages for Python 3.12 and newer, among them the newest JAX.
@nox.session(python="3.12", default=HERE == "3.11")
def newest(session):
    """Chapters that need Flax's pipelines, on the newest JAX, on three devices."""
    execute(session, "requirements.lock", 3, OF_PIPELINES, **FASTER)


@nox.session(python="3.11", name="oldest-python", default=HERE != "3.11")
def oldest_python(session):
    """Chapters that need Flax's pipelines, on the oldest Python, on three devices."""
    execute(session, "requirements.lock", 3, OF_PIPELINES, **FASTER)


# Few machines have this Python yet.
@nox.session(python="3.14", name="newest-python", default=bool(shutil.which("python3.14")))
def newest_python(session):
    """Chapters that need Flax's pipelines, on the newest Python and JAX, on three devices."""
    execute(session, "requirements.lock", 3, OF_PIPELINES, **FASTER)


@nox.session(python="3.13", name="without-diffusers")
def without_diffusers(session):
    """The chapters past the pipelines, on the newest of all packages, on three devices."""
    execute(session, "locks/newest.lock", 3, range(9, 18), **FASTER)
