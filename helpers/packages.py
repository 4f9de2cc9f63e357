"""Which packages the course needs, in which versions, and which are installed."""

import importlib.metadata
import os
import sys
import warnings
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

DISTRIBUTION = "stable-diffusion-jax-course"
PIP = f"{sys.executable} -m pip install"  # a plain ``pip`` may belong to a different Python
# Flax pipelines need old versions of these. The chapters from 9 on need none of them, or any.
ONLY_FOR_FLAX_PIPELINES = ("diffusers", "huggingface-hub", "transformers")


@dataclass(frozen=True)
class Package:
    """A package that the course needs.

    Attributes
    ----------
    name : str
        As on PyPI.
    allowed : SpecifierSet
        The versions that the course is made for.
    installed : str or None
        The version that is installed, or None if the package is missing.
    """

    name: str
    allowed: SpecifierSet
    installed: str | None

    @property
    def fits(self) -> bool:
        """Say whether the installed version is one that the course is made for."""
        if self.installed is None:
            return False
        return self.allowed.contains(self.installed, prereleases=True)

    @property
    def is_newer(self) -> bool:
        """Say whether the installed version is newer than those that the course is made for."""
        if self.installed is None:
            return False
        for bound in self.allowed:
            if bound.operator == "<" and Version(self.installed) >= Version(bound.version):
                return True
        return False


def needed_packages() -> list[Package]:
    """Read what the distribution needs, without its extras, and what is installed of it.

    The list is empty if the course is not installed, and its folder is merely on the path.
    """
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    # Older versions of flax call jax.device_put_replicated, which JAX 0.10 removed. The metadata of
    # a distribution cannot say "if jax is new".
    jax_is_new = Version(installed_version("jax") or "0") >= Version("0.10")
    needed = []
    for requirement in map(Requirement, lines):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        allowed = requirement.specifier
        if requirement.name == "flax" and jax_is_new:
            allowed = allowed & ">=0.12.7"
        package = Package(requirement.name, allowed, installed_version(requirement.name))
        needed.append(package)
    return needed


def installed_version(name: str) -> str | None:
    """Return the version of a package that is installed, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def require_flax() -> None:
    """Stop, in one sentence, if the packages that are installed cannot run a Flax pipeline.

    Raises
    ------
    ImportError
        Names the packages, and the command that installs what is needed in their place.
    """
    names = (*ONLY_FOR_FLAX_PIPELINES, "flax")
    wrong = [package for package in needed_packages() if package.name in names and not package.fits]
    if wrong:
        raise ImportError(
            f"Flax pipelines do not run with {list_versions(wrong)}: run `{pip_command(wrong)}`, "
            "and restart."
        )


def list_versions(packages: list[Package]) -> str:
    """Write names and installed versions as a sentence has them."""
    return ", ".join(f"{package.name} {package.installed or '(missing)'}" for package in packages)


def pip_command(packages: list[Package]) -> str:
    """Return the command that installs these packages in versions that fit."""
    wanted = [f'"{package.name}{package.allowed}"' for package in packages]
    return " ".join([PIP, *wanted])


def quiet_warnings() -> None:
    """Show of what diffusers and transformers log only the errors, and of tqdm not one warning.

    Two warnings would otherwise stand in the output of nearly every chapter: that each Flax class
    is deprecated and will be removed, which is why the course keeps to the last versions that have
    them; and, on five lines, that a pipeline was loaded without its safety checker, and that
    unfiltered images are not to be shown to the public. Chapter 4 explains the safety checker and
    shows that warning. The third is that ipywidgets, which draws progress bars, is not installed.

    diffusers and transformers read their environment variable when they are imported, and tqdm
    warns then, so call this before.
    """
    os.environ["DIFFUSERS_VERBOSITY"] = "error"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    warnings.filterwarnings("ignore", message="IProgress not found")
