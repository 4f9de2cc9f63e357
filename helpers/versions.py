"""Whether the packages that this course needs are there, in versions that still have Flax."""

import importlib.metadata
import sys
from dataclasses import dataclass

from packaging.requirements import Requirement

DISTRIBUTION = "stable-diffusion-jax-course"
PIP = f"{sys.executable} -m pip install"  # by the Python that runs this: a plain ``pip`` may be another one's
# Newer ones have no Flax models, or cannot work with one that has: with these, nothing in the course would run.
_WITH_FLAX = ("diffusers", "transformers", "huggingface-hub")


@dataclass(frozen=True)
class Package:
    """A package that the course needs: its allowed versions, and the one installed (None where it is missing)."""

    requirement: Requirement
    installed: str | None

    @property
    def fits(self) -> bool:
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)


def needed_packages() -> list[Package]:
    """What the distribution says it needs, without its extras, and what is installed of that.

    Empty where the course itself is not installed, and its folder is merely on the path.
    """
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    requirements = [Requirement(line) for line in lines]
    return [
        Package(requirement, _installed_version(requirement.name))
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    ]


def require_flax() -> None:
    """Stop, in one sentence, where a package is installed that has no Flax any more.

    Raises
    ------
    ImportError
        Names the packages, what is needed in their place, and the command that installs it.
    """
    wrong = [package for package in needed_packages() if package.requirement.name in _WITH_FLAX and not package.fits]
    if wrong:
        found = " and ".join(f"{package.requirement.name} {package.installed or '(missing)'}" for package in wrong)
        raise ImportError(
            f"This course cannot run with {found}, but only with versions that still have Flax: run "
            f"`{pip_command(wrong)}`, and restart the kernel."
        )


def pip_command(packages: list[Package]) -> str:
    return " ".join([PIP, *(f'"{package.requirement.name}{package.requirement.specifier}"' for package in packages)])


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
