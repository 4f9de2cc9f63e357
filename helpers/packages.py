"""Whether the packages that the course needs are there, in versions that work together and still have Flax."""

import importlib.metadata
import logging
import os
import sys
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.version import Version

DISTRIBUTION = "stable-diffusion-jax-course"
PIP = f"{sys.executable} -m pip install"  # a plain ``pip`` may belong to a different Python
# With a wrong version of one of these, no Flax pipeline runs.
_FOR_FLAX_PIPELINES = ("diffusers", "flax", "huggingface-hub", "transformers")


@dataclass(frozen=True)
class Package:
    """A package that the course needs: its allowed versions, and the one installed (None if it is missing)."""

    requirement: Requirement
    installed: str | None

    @property
    def fits(self) -> bool:
        return self.installed is not None and self.requirement.specifier.contains(self.installed, prereleases=True)


def needed_packages() -> list[Package]:
    """What the distribution says it needs, without its extras, and what is installed of that.

    Empty if the course itself is not installed, and its folder is merely on the path.
    """
    try:
        requirements = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    for requirement in requirements:
        # Older versions call jax.device_put_replicated, which JAX 0.10 removed. No dependency can say "if jax is new".
        if requirement.name == "flax" and Version(_installed_version("jax") or "0") >= Version("0.10"):
            requirement.specifier &= ">=0.12.7"
    required = [requirement for requirement in requirements if requirement.marker is None]
    return [Package(requirement, _installed_version(requirement.name)) for requirement in required]


def require_flax() -> None:
    """Stop, in one sentence, if the packages that are installed cannot run a Flax pipeline.

    Raises
    ------
    ImportError
        Names the packages, and the command that installs what is needed in their place.
    """
    names = _FOR_FLAX_PIPELINES
    wrong = [package for package in needed_packages() if package.requirement.name in names and not package.fits]
    if wrong:
        found = ", ".join(f"{package.requirement.name} {package.installed or '(missing)'}" for package in wrong)
        raise ImportError(f"Flax pipelines do not run with {found}: run `{pip_command(wrong)}`, and restart.")


def quiet_deprecations() -> None:
    """Keep diffusers and transformers from announcing the removal of every Flax class that is used.

    Call it before they are imported, because they read their environment variables then. diffusers still warns if a
    pipeline of Stable Diffusion is loaded without its safety checker: the model's licence asks for that.
    """
    os.environ |= {"DIFFUSERS_VERBOSITY": "error", "TRANSFORMERS_VERBOSITY": "error"}
    logging.getLogger("diffusers.pipelines.stable_diffusion.pipeline_flax_stable_diffusion").setLevel("WARNING")


def pip_command(packages: list[Package]) -> str:
    """The command that installs these packages in versions that fit."""
    return " ".join([PIP, *(f'"{package.requirement.name}{package.requirement.specifier}"' for package in packages)])


def _installed_version(name: str) -> str | None:
    return next((found.version for found in importlib.metadata.distributions(name=name)), None)
