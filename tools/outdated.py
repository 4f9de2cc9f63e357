"""Compare the locked versions with the newest releases, and say which are held back and why: ``make outdated``.

The exit status is 1 if a package that nothing holds back has a newer release, so that a scheduled run shows it.
"""

import json
import subprocess
import sys
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.lock import ROOT, locked_versions

# Why a package stays behind its newest release, until the course leaves Flax's pipelines.
HELD_BACK = {
    "diffusers": "0.39 is the last release with Flax pipelines",
    "transformers": "4.57 is the last series with Flax models",
    "huggingface-hub": "transformers 4.57 needs a version below 1",
    "libtpu": "jax[tpu] names the version that it works with",
    "tokenizers": "transformers 4.57 needs a version up to 0.23",
}
ALLOWED = {
    requirement.name: requirement.specifier
    for requirement in map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
}


def newer_releases() -> list[dict[str, str]]:
    """What pip says about the locked packages in this environment: name, version, latest_version."""
    locked = locked_versions(f"{sys.version_info.major}.{sys.version_info.minor}")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    # Without an answer from the index, pip would list nothing, as if everything were new.
    if subprocess.run([*pip, "index", "versions", "diffusers"], capture_output=True).returncode:
        sys.exit("The package index cannot be reached, so nothing can be said about newer releases.")
    command = [*pip, "list", "--outdated", "--format", "json"]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    found = [package | {"name": canonicalize_name(package["name"])} for package in found]
    return [package for package in found if package["name"] in locked]


def report(newer: list[dict[str, str]]) -> int:
    """Print a table; the number of packages that nothing holds back."""
    free = 0
    for package in newer:
        reason = HELD_BACK.get(package["name"], "")
        free += not reason
        allowed = ALLOWED.get(package["name"])
        if reason:
            what = reason
        elif allowed and not allowed.contains(package["latest_version"]):
            what = f"pyproject.toml allows {allowed}: run the tests with it, then raise the bound"
        else:
            what = "nothing: run .venv/bin/python -m tools.lock --upgrade"
        print(f"{package['name']:<28}{package['version']:<14}{package['latest_version']:<14}{what}")
    if not newer:
        print("Every package is at its newest release.")
    return free


if __name__ == "__main__":
    print(f"{'package':<28}{'locked':<14}{'newest':<14}held back because")
    sys.exit(report(newer_releases()) > 0)
