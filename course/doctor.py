"""What is installed, what JAX sees, and what to do about it: ``python -m course.doctor``.

Prints one page, and exits with 1 if there is a problem.
"""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from helpers import packages

GIB = 2**30
# What the bundled chapters need at their peak, and what the installation and the images take.
LEAST_MEMORY = 2 * GIB
LEAST_DISK = 2 * GIB
HUB_TIMEOUT = 5  # seconds
# What puts the checkpoints back: in a clone, an installation would only point to the files that are missing there.
_IN_CLONE = (Path(__file__).parents[1] / ".git").exists()
REPAIR = "git checkout -- checkpoints" if _IN_CLONE else f"{packages.PIP} --force-reinstall --no-deps ."


def check_packages() -> Iterator[str]:
    """Print a line for each package; yield the problems."""
    print(f"{'package':<18}{'installed':<14}expected")
    needed = packages.needed_packages()
    if not needed:
        yield f"{packages.DISTRIBUTION} is not installed: in a clone of the course, run `{packages.PIP} .`"
    wrong = {package.requirement.name for package in needed if not package.fits}
    for package in needed:
        name, expected = package.requirement.name, str(package.requirement.specifier) or "any"
        verdict = "" if package.fits else "   <- problem"
        print(f"{name:<18}{package.installed or 'missing':<14}{expected}{verdict}")
        if not package.fits:
            found = f"{name} {package.installed} is installed" if package.installed else f"{name} is missing"
            yield f"{found}, and {name} {expected} is needed: {packages.pip_command([package])}"
    if wrong and wrong <= {"diffusers", "huggingface-hub", "transformers"}:
        print("The chapters from 11 on run as it is: they need no diffusers, and any versions of the other two.")


def check_devices() -> Iterator[str]:
    """Say what JAX runs on; a machine with an accelerator that JAX does not use is a problem."""
    try:
        from helpers import devices
    except (ImportError, RuntimeError) as error:  # jax raises the latter if jaxlib has a different version
        jax = [package for package in packages.needed_packages() if package.requirement.name == "jax"]
        if jax:  # otherwise, what is wrong was said with the packages
            yield f"JAX cannot be imported ({error}): {packages.pip_command(jax)} --force-reinstall"
        return
    try:
        devices.simulate_devices()  # as every chapter does
        print(devices.device_report())
    except ValueError as error:
        yield f"{error} Correct it, or: unset {devices.DEVICES_VARIABLE}"
        return
    except RuntimeError as error:
        yield f"JAX does not start ({error}). Stop other processes that use the accelerator, and: unset JAX_PLATFORMS"
        return
    try:
        devices.require_accelerator()
    except RuntimeError as error:
        # On a laptop this is not a problem: the chapters run on its CPU.
        if devices.find_runtime() == "laptop":
            print("There is no accelerator here, and none is needed.")
        else:
            yield str(error)


def check_checkpoints() -> Iterator[str]:
    """Read every bundled checkpoint's files; unreadable ones are a problem."""
    try:
        from helpers.checkpoints import bundled_checkpoint, bundled_names
    except (ImportError, RuntimeError):
        return  # reported with the packages or with JAX
    names = bundled_names()
    if not names:
        yield f"The bundled checkpoints are missing: {REPAIR}"
    for name in names:
        folder = Path(bundled_checkpoint(name).source)
        try:
            size = sum(len(file.read_bytes()) for file in folder.rglob("*.msgpack"))
        except OSError as error:
            yield f"The bundled checkpoint {name} cannot be read ({error}): {REPAIR}"
        else:
            print(f"Bundled checkpoint {name}: {size / 1e6:.1f} MB of weights, readable")


def find_token() -> str | None:
    """Say in words where this runtime holds a token for the Hub; never the token itself."""
    from huggingface_hub import constants, get_token

    from helpers.tokens import TOKEN, has_token, take_kaggle_secret

    if not has_token():
        return None
    token, file = get_token(), Path(constants.HF_TOKEN_PATH)
    if take_kaggle_secret():
        return f"Kaggle's secret {TOKEN}"
    if token in (os.environ.get(name, "").strip() for name in (TOKEN, "HUGGING_FACE_HUB_TOKEN")):
        return f"the environment variable {TOKEN}"
    if file.is_file() and file.read_text().strip() == token:
        return f"the file {file}"
    return f"Colab's secret {TOKEN}"


def check_hub() -> Iterator[str]:
    """Say whether the Hugging Face Hub answers, and where a token for it is. Without either, there is no problem."""
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        with urlopen(f"{address}/api/models?limit=1", timeout=HUB_TIMEOUT):
            answer = "answers"
    except HTTPError as error:
        answer = f"answers with {error.code}"
    except (URLError, OSError, ValueError) as error:
        answer = f"cannot be reached ({getattr(error, 'reason', error)}), so only bundled checkpoints can be loaded"
    print(f"The Hub, {address}: {answer}")
    try:
        place = find_token()
    except ImportError:
        return  # reported with the packages
    print(f"Token for the Hub: in {place}" if place else "Token for the Hub: none, which public models do not need")
    if "COLAB_RELEASE_TAG" in os.environ and not place:
        print("Colab shows its secrets to notebooks only, and not to a command such as this.")
    yield from ()


def check_room() -> Iterator[str]:
    """Free memory, and free disk in the place of the Hub's files."""
    try:
        import psutil

        from helpers.checkpoints import free_disk
    except (ImportError, RuntimeError):
        return  # reported with the packages or with JAX
    memory = psutil.virtual_memory()
    print(f"Memory: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")
    if memory.available < LEAST_MEMORY:
        yield "Less than 2 GiB of memory is free: shut down other kernels"
    cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    free = free_disk(cache)
    print(f"Disk: {free / GIB:.1f} GiB free for {cache}")
    if free < LEAST_DISK:
        yield f"Less than 2 GiB of disk is free for {cache}: `hf cache delete --disable-tui`, or set HF_HOME elsewhere"


def main() -> int:
    """Print the page; 1 if there is a problem, else 0."""
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}\n")
    problems = []
    for check in (check_packages, check_devices, check_checkpoints, check_hub, check_room):
        try:
            for problem in check():
                problems.append(problem)
        except Exception as error:  # what nobody foresaw must not hide what was found
            problems.append(f"{check.__name__} failed: {type(error).__name__}: {error}")
        print()
    if not problems:
        print("No problem found.")
    for number, problem in enumerate(problems, 1):
        print(f"Problem {number}: {problem}")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
