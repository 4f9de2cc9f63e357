"""What is installed, what JAX sees, and what to do about it: ``python -m course.doctor``.

Prints one page, and exits with 1 if there is a problem. Each check imports what it needs, as a
package that is missing is a problem like others.
"""

import argparse
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from course.commands import make_parser, run
from helpers import packages

GIB = 2**30
LEAST_FREE = 2 * GIB  # what the chapters take of memory, and the installation and images of disk
HUB_TIMEOUT = 5  # seconds
# In a clone, another installation would only point to the files that are missing.
REPAIR = f"{packages.PIP} --force-reinstall --no-deps ."
if Path(__file__).parents[1].joinpath(".git").exists():
    REPAIR = "git checkout -- checkpoints"


def check_packages() -> Iterator[str]:
    """Print a line for each package that the course needs; yield the problems."""
    print(f"Python {platform.python_version()} on {platform.system()} {platform.machine()}")
    print(f"{sys.executable}\n")
    needed = packages.needed_packages()
    if not needed:
        yield (
            f"{packages.DISTRIBUTION} is not installed: in a clone of the course, run "
            f"`{packages.PIP} .`"
        )
    for package in needed:
        print(f"{package.name:<18}{package.installed or 'missing':<14}{package.allowed}")
        if not package.fits:
            yield (
                f"{package.name} is {package.installed or 'missing'}, and "
                f"{package.name}{package.allowed} is needed: {packages.pip_command([package])}"
            )
    wrong = {package.name for package in needed if not package.fits}
    if wrong and wrong <= set(packages.ONLY_FOR_FLAX_PIPELINES):
        print("\nThe chapters from 9 on run as it is: no Flax pipeline is in them.")


def check_jax() -> Iterator[str]:
    """Import JAX, and yield why if that fails."""
    try:
        import jax  # noqa: F401
    except (ImportError, RuntimeError) as error:  # the latter if jaxlib has another version
        needed = [package for package in packages.needed_packages() if package.name == "jax"]
        yield f"JAX cannot be imported ({error}): {packages.pip_command(needed)} --force-reinstall"


def check_devices() -> Iterator[str]:
    """Say what JAX runs on; an accelerator that JAX does not use is a problem."""
    from helpers import devices

    try:
        devices.simulate_devices()  # as every chapter does
        print(devices.device_report())
    except (RuntimeError, ValueError) as error:
        yield f"JAX does not start: {error}"
        return
    if devices.find_runtime() == "laptop":
        print("There is no accelerator here, and none is needed.")
        return
    try:
        devices.require_accelerator()
    except RuntimeError as error:
        yield str(error)


def check_checkpoints() -> Iterator[str]:
    """Read every bundled checkpoint's files; unreadable ones are a problem."""
    from helpers.checkpoints import bundled_checkpoint
    from helpers.models import bundled_names

    names = bundled_names()
    if not names:
        yield f"The bundled checkpoints are missing: {REPAIR}"
    for name in names:
        try:
            folder = Path(bundled_checkpoint(name).source)
            files = [*folder.rglob("*.msgpack"), *folder.rglob("*.safetensors")]
            size = sum(len(file.read_bytes()) for file in files)
        except (OSError, RuntimeError) as error:
            yield f"The bundled checkpoint {name} cannot be read ({error}): {REPAIR}"
        else:
            print(f"Bundled checkpoint {name}: {size / 1e6:.1f} MB of weights, readable")


def check_hub() -> Iterator[str]:
    """Say whether the Hugging Face Hub answers; the chapters run without it, too."""
    from huggingface_hub import constants

    from helpers.hub_token import has_token

    try:
        urlopen(f"{constants.ENDPOINT}/api/models?limit=1", timeout=HUB_TIMEOUT).close()
        answer = "answers"
    except HTTPError as error:
        answer = f"answers with {error.code}"
    except (OSError, ValueError) as error:
        answer = f"cannot be reached ({error}), so only bundled checkpoints can be loaded"
    print(f"The Hub, {constants.ENDPOINT}: {answer}")
    if has_token():
        print("A token for the Hub: found")
    else:
        print("A token for the Hub: none, which public models do not need")
    yield from ()


def check_room() -> Iterator[str]:
    """Print how much memory and disk is free; too little is a problem."""
    import psutil
    from huggingface_hub import constants

    from helpers.checkpoints import free_disk

    memory = psutil.virtual_memory()
    print(f"Memory: {memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free")
    if memory.available < LEAST_FREE:
        yield "Less than 2 GiB of memory is free: shut down other kernels"
    free = free_disk(constants.HF_HUB_CACHE)
    print(f"Disk: {free / GIB:.1f} GiB free for {constants.HF_HUB_CACHE}")
    if free < LEAST_FREE:
        yield (
            f"Less than 2 GiB of disk is free for {constants.HF_HUB_CACHE}: delete weights there, "
            "as `hf cache --help` says, or set HF_HOME elsewhere"
        )


def print_page(_: argparse.Namespace) -> int:
    """Print what all checks say, and return the exit status: 1 if there is a problem, else 0."""
    problems = [*check_packages(), *check_jax()]
    print()
    checks = [check_devices, check_checkpoints, check_hub, check_room]
    if "jax" not in sys.modules:
        checks = []  # they all need it
    for check in checks:
        try:
            problems.extend(check())
        except Exception as error:  # what nobody foresaw must not hide what was found
            problems.append(f"{check.__name__} failed: {type(error).__name__}: {error}")
        print()
    if not problems:
        print("No problem found.")
    for number, problem in enumerate(problems, 1):
        print(f"Problem {number}: {problem}")
    return int(bool(problems))


def main(arguments: Sequence[str] | None = None) -> int:
    return run(make_parser("course.doctor", __doc__), print_page, arguments)


if __name__ == "__main__":
    sys.exit(main())
