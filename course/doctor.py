"""What is installed, what JAX sees, and what to do about it: ``python -m course.doctor``.

Prints one page, and exits with 1 if there is a problem. MODEL, if you give one or several, is a
folder in diffusers' format, a Hub id or a bundled name: the page says which model it is and how
large, and names what a folder lacks. Of one on the Hub only the configuration is downloaded.

Each check imports what it needs, as a package that is missing is a problem like others.
"""

import argparse
import importlib.metadata
import json
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from course.commands import make_parser, run
from helpers import packages
from helpers.hub_token import without_passwords

GIB = 2**30
LEAST_FREE = 2 * GIB  # what the chapters take of memory, and the installation and images of disk
HUB_TIMEOUT = 5  # seconds
ROOT = Path(__file__).parents[1]  # of a clone, or of all packages that are installed


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
    except Exception as error:  # whatever jaxlib, numpy or a file named jax.py of one's own raise
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


def find_repair(root: Path = ROOT) -> str:
    """Say how to get files of the course again that are missing or damaged."""
    if (root / ".git").exists():  # another installation would only point to the same files
        return "git checkout -- checkpoints"
    if (root / "pyproject.toml").exists():
        return "download the folder of the course again"
    try:
        about = importlib.metadata.distribution(packages.DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        about = None
    if not about:
        return "install the course again, from where you have it"
    origin = json.loads(about)
    address = f"{'git+' if 'vcs_info' in origin else ''}{origin['url']}"
    return f'{packages.PIP} --force-reinstall --no-deps "{address}"'


def check_checkpoints(checkpoints: Path | None = None) -> Iterator[str]:
    """Load every bundled checkpoint, as chapters do; what is missing or damaged is a problem."""
    import numpy as np

    from course.families import find_code
    from course.model.files import read_safetensors
    from helpers.models import MODELS, bundled_names
    from helpers.places import find_data

    try:
        folder = checkpoints or find_data("checkpoints")
    except FileNotFoundError:
        yield f"The bundled checkpoints are missing: {find_repair()}"
        return
    names = {model.bundled for model in MODELS.values()} | {*bundled_names()}
    for name in sorted(names):
        try:
            params, *_ = find_code(folder / name).load(folder / name, "float32")
            arrays = [np.asarray(value) for part in params.values() for value in part.values()]
            if not all(np.isfinite(array).all() for array in arrays):
                raise ValueError("it has numbers that are not finite")
        except Exception as error:  # damaged files raise errors of many kinds
            yield f"The bundled checkpoint {name} cannot be read ({error}): {find_repair()}"
        else:
            size = sum(array.nbytes for array in arrays)
            print(f"Bundled checkpoint {name}: {size / 1e6:.1f} MB of numbers, complete")
    for file in sorted(folder.glob("*/*.safetensors")):  # LoRAs, and what is beside them
        try:
            read_safetensors(file)
        except (OSError, ValueError) as error:
            yield f"{error} ({find_repair()})"


def check_models(names: Sequence[str]) -> Iterator[str]:
    """Say which models somebody has; one that no command could load is a problem."""
    from course.families import find_code
    from helpers.models import MODELS, NO_WEIGHTS, find_local, find_model, which_model

    for name in names:
        try:
            folder = find_model(name, only=NO_WEIGHTS)
            code = find_code(folder)
            config = code.read_config(folder)
            if find_local(name):
                code.read_files(folder, config)  # names and shapes, as numbers stay on the disk
                code.load_tokenizer(folder, config)
        except Exception as error:  # damaged files raise errors of many kinds
            yield str(error)
            continue
        parts = code.parameter_shapes(config).values()
        count = sum(shape.size for shapes in parts for shape in shapes.values())
        pipeline = MODELS[which_model(folder)].pipeline.removeprefix("Flax")
        print(
            f"Model {name}: {pipeline}, {count / 1e9:.3f} billion parameters, "
            f"{2 * count / GIB:.2f} GiB in bfloat16"
        )


def check_hub() -> Iterator[str]:
    """Say whether the Hugging Face Hub answers; the chapters run without it, too."""
    from huggingface_hub import constants

    from helpers.hub_token import has_token

    shown = without_passwords(constants.ENDPOINT)
    try:
        address = shown.replace("…@", "")
        urlopen(f"{address}/api/models?limit=1", timeout=HUB_TIMEOUT).close()
        answer = "answers"
    except HTTPError as error:
        answer = f"answers with {error.code}"
    except (OSError, ValueError) as error:
        answer = f"cannot be reached ({error}), so only bundled checkpoints can be loaded"
    print(f"The Hub, {shown}: {answer}")
    try:
        found = "found" if has_token() else "none, which public models do not need"
        print(f"A token for the Hub: {found}")
    except OSError as error:
        yield f"The token for the Hub cannot be read ({error}): set HF_HOME to another folder"


def check_memory_and_disk() -> Iterator[str]:
    """Print how much memory and disk is free; too little, or a read-only disk, is a problem."""
    import jax
    import psutil
    from huggingface_hub import constants

    from helpers.checkpoints import existing_parent, free_disk

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
    caches = {"HF_HOME": constants.HF_HUB_CACHE}
    if jax.config.jax_compilation_cache_dir:
        caches["JAX_COMPILATION_CACHE_DIR"] = jax.config.jax_compilation_cache_dir
    for variable, cache in caches.items():
        try:
            tempfile.TemporaryFile(dir=existing_parent(cache)).close()
        except OSError as error:
            yield (
                f"{cache} cannot be written ({error.strerror}): set {variable} to a folder that "
                "can be"
            )


def print_page(options: argparse.Namespace) -> int:
    """Print what all checks say, and return the exit status: 1 if there is a problem, else 0."""
    problems = [*check_packages(), *check_jax()]
    print()
    checks = [check_devices, check_checkpoints, check_hub, check_memory_and_disk]

    def check_own_models() -> Iterator[str]:
        return check_models(options.models)

    if options.models:
        checks.append(check_own_models)
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
        print(f"Problem {number}: {without_passwords(problem)}")
    return int(bool(problems))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser("course.doctor", __doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="a folder, a Hub id or a name")
    return run(parser, print_page, arguments)


if __name__ == "__main__":
    sys.exit(main())
