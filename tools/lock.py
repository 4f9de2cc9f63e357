"""Write what follows from pyproject.toml: requirements.lock, the locks in locks/, and environment.yml.

The lock holds every package for every supported Python and system, with hashes. Colab's lock is what the runtime of
that name brings before the course is installed there. The newest lock is for the chapters that need no diffusers: the
newest version of everything else, whatever pyproject.toml allows for Flax pipelines. The one called draw is for the
page that draws in a browser. The environment is for conda and Binder: Python 3.12, and the lock's versions of the
packages that pyproject.toml names.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement

from tools.publish import GITHUB, stamped_repository

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
ENVIRONMENT = ROOT / "environment.yml"
COLAB_LOCK = ROOT / "locks" / "colab.lock"
NEWEST_LOCK = ROOT / "locks" / "newest.lock"
DRAW_LOCK = ROOT / "locks" / "draw.lock"
# Colab's TPU runtime in August 2026 (github.com/googlecolab/backend-info), with Flax models in neither of the two last.
COLAB_PYTHON = "3.13"
COLAB_IMAGE = {
    "jax": "0.7.2",
    "jaxlib": "0.7.2",
    "flax": "0.11.2",
    "numpy": "2.1.3",
    "transformers": "5.15.0",
    "huggingface-hub": "1.27.0",
}
EXECUTION = ("ipykernel",)  # what tools/run_chapters.py needs beside it
INSTALLATION = ("editables", "hatchling")  # what the course itself is installed with
NEWEST_PYTHON = "3.13"
# What tools/export_model.py imports, and what stable_diffusion/ does.
DRAW = ("flax", "jax", "jax2onnx", "onnx", "safetensors", "tokenizers")
# Newer than Flax pipelines allow; and the TPU compiler.
NEWEST = ("huggingface-hub>=1", "jax[tpu]", "transformers>=5")
EXTRAS = ("tpu", "lab", "docs", "test")
PYTHON = "3.12"
PYTHONS = ("3.11", "3.12", "3.13")
HEADER = "# Written by `make lock` from pyproject.toml. Do not edit.\n"


def compile_lock(lock: Path, source: str, *options: str, requirements: str = "") -> None:
    """Write a lock from pyproject.toml, or from requirements given as text (then ``source`` is ``-``)."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", *options, source]
    # Where the wheels came from is this machine's business: the lock holds names, versions and hashes.
    command += ["--generate-hashes", "--no-header", "--no-emit-index-url", "--no-emit-find-links", "--no-annotate"]
    command += ["--output-file", str(lock.relative_to(ROOT))]
    subprocess.run(command, cwd=ROOT, check=True, input=requirements, text=True)
    lock.write_text(HEADER + lock.read_text().removeprefix(HEADER))


def locked_versions(python: str, system: str = "linux", machine: str = "x86_64") -> dict[str, str]:
    """Package names and versions that the lock gives on this Python and system."""
    environment = default_environment() | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "sys_platform": system,
        "platform_system": system.capitalize(),
        "platform_machine": machine,
    }
    lines = re.findall(r"^([a-z0-9][^\\\n]*?)\s*\\?$", LOCK.read_text(), flags=re.MULTILINE)
    requirements = [Requirement(line) for line in lines]
    return {
        requirement.name: next(iter(requirement.specifier)).version
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(environment)
    }


def named_packages() -> list[str]:
    """The packages that pyproject.toml names to run the chapters and to read them in JupyterLab."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(line).name for line in [*project["dependencies"], *project["optional-dependencies"]["lab"]]]


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that pyproject.toml allows")
    upgrade = ["--upgrade"] if parser.parse_args().upgrade else []
    extras = [argument for extra in EXTRAS for argument in ("--extra", extra)]
    compile_lock(LOCK, "pyproject.toml", "--universal", "--python-version", "3.11", *extras, *upgrade)
    image = "\n".join([*(f"{name}=={version}" for name, version in COLAB_IMAGE.items()), *EXECUTION])
    compile_lock(COLAB_LOCK, "-", "--python-version", COLAB_PYTHON, *upgrade, requirements=image)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {Requirement(line).name for line in dependencies} - {"diffusers"}
    newest = "\n".join([*sorted(names), *NEWEST, *EXECUTION, *INSTALLATION])
    compile_lock(NEWEST_LOCK, "-", "--python-version", NEWEST_PYTHON, *upgrade, requirements=newest)
    draw = ["--universal", "--python-version", PYTHONS[0], *upgrade]
    compile_lock(DRAW_LOCK, "-", *draw, requirements="\n".join(DRAW))
    ENVIRONMENT.write_text(environment_yml())
    written = (LOCK, COLAB_LOCK, NEWEST_LOCK, DRAW_LOCK, ENVIRONMENT)
    print("Wrote " + ", ".join(str(file.relative_to(ROOT)) for file in written))


if __name__ == "__main__":
    main()
