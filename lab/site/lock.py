"""Write environment.yml, as a part of ``make lock``; and read locks.

The environment is for conda and Binder: Python 3.12, and the lock's versions of the packages that
pyproject.toml names to run the chapters and to read them in JupyterLab.
"""

import re
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

from lab.site.set_repo import GITHUB, stamped_repository

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
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
