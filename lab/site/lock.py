"""Write environment.yml, as a part of ``make lock``; and read locks, and install them.

The environment is for conda and Binder: Python 3.12, and the lock's versions of the packages that
pyproject.toml names to run the chapters and to read them in JupyterLab.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

from lab.site.set_repo import GITHUB, stamped_repository

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
DRAW_LOCK = ROOT / "locks" / "draw.lock"
ENVIRONMENT = ROOT / "environment.yml"
PYTHON = "3.12"
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = "# Written by `make lock` from pyproject.toml. Do not edit.\n"


def locked_versions(
    python: str, system: str = "linux", machine: str = "x86_64", lock: Path = LOCK
) -> dict[str, str]:
    """Package names and versions that a lock gives on this Python and system."""
    environment = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": system,
        "platform_system": system.capitalize(),
        "platform_machine": machine,
    }
    lines = re.findall(r"^([a-z0-9][^\\\n]*?)\s*\\?$", lock.read_text(), flags=re.MULTILINE)
    requirements = [Requirement(line) for line in lines]
    return {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


def make_environment(folder: Path, python: str, lock: Path) -> Path:
    """Make an environment anew with a lock's packages, whose hashes are checked.

    Parameters
    ----------
    folder
        Where it will be. What is there is deleted.
    python
        A version, which uv finds on this machine or downloads, or an interpreter's path.
    lock
        What to install.

    Returns
    -------
    Path
        The environment's own Python.

    Raises
    ------
    subprocess.CalledProcessError
        If there is no such Python, or a package cannot be installed. uv has said why.
    """
    uv = [sys.executable, "-m", "uv", "--quiet"]
    # pyenv puts the commands of all its versions on the path, and runs only those of this one.
    selected = os.environ | {"PYENV_VERSION": python}
    venv = [*uv, "venv", "--clear", "--seed", "--python", python, str(folder)]
    subprocess.run(venv, env=selected, check=True)
    own_python = folder / "bin" / "python"
    install = [*uv, "pip", "install", "--python", str(own_python)]
    subprocess.run([*install, "--require-hashes", "-r", str(lock)], check=True)
    return own_python


def named_packages() -> list[str]:
    """The packages that pyproject.toml names to run the chapters and to read them in JupyterLab."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        Requirement(line).name
        for line in [*project["dependencies"], *project["optional-dependencies"]["lab"]]
    ]


def environment_yml() -> str:
    """The text of environment.yml."""
    versions = locked_versions(PYTHON)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = named_packages()
    has_libtpu = "platform_system == 'Linux' and platform_machine == 'x86_64'"
    pins = [f"jax[tpu]=={versions['jax']}; {has_libtpu}"]
    pins += [f"{name}=={versions[name]}" for name in names]
    lines = [
        f"# It belongs in a clone of {GITHUB}{stamped_repository()}, which its last line installs.",
        f"name: {project['name']}",
        "channels:",
        "  - conda-forge",
        "dependencies:",
        f"  - python={PYTHON}",
        "  - pip",
        "  - pip:",
        *(f'      - "{pin}"' for pin in pins),
        "      - -e .",
    ]
    return HEADER + "\n".join(lines) + "\n"


if __name__ == "__main__":
    ENVIRONMENT.write_text(environment_yml())
