"""The TPU compiler: for which chips it can be asked, and what it answers."""

import ctypes
import datetime
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from helpers.devices import has_tpu_chips

_ANSWER = 2  # raised whenever a figure in an answer changes its meaning, so that older ones in the cache do not count
_PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers")


@dataclass(frozen=True)
class Chip:
    """A kind of TPU chip: what it can do at most, and how to ask the compiler for some.

    Attributes
    ----------
    kinds : tuple of str
        What JAX calls its ``device_kind``, now or earlier.
    flops, bandwidth : float
        Most operations in bfloat16 in a second, and most bytes from HBM in a second.
    on_chip : int
        Bytes of memory on the chip itself (VMEM, and CMEM on v4), where weights can stay between two steps.
    topologies : dict
        For each number of chips the arguments of ``get_topology_desc``.
    """

    kinds: tuple[str, ...]
    flops: float
    bandwidth: float
    on_chip: int
    topologies: dict[int, dict]


def _topologies(*names: str, **options) -> dict[int, dict]:
    """Arguments for grids such as ``v5e:2x4``, each on one machine: `pmap` takes a machine's own."""
    found = {}
    for name in names:
        grid = [int(side) for side in name.split(":")[1].split("x")]
        bounds = (*grid, 1)[:3]
        found[math.prod(grid)] = {"topology_name": name, "chips_per_host_bounds": bounds} | options
    return found


# The figures are JAX's own, from jax/_src/pallas/mosaic/tpu_info.py in jax 0.10.2, but for the bandwidth of v5p, where
# Google documents more (cloud.google.com/tpu/docs/v5p), and a bound must take the more. Both cores of a v4 chip act as
# one ("megacore") on a real machine, which the compiler has to be told.
_V4 = _topologies("v4:1x1x1", "v4:2x2x1", "v4:2x2x2", chip_config_name="megacore")
_V5P = _topologies("v5p:1x1x1", "v5p:2x2x1", "v5p:2x2x2")
CHIPS = {
    "v4": Chip(("TPU v4",), 275e12, 1.23e12, 2 * 16 * 2**20 + 134_000_000, _V4),
    "v5e": Chip(("TPU v5 lite", "TPU v5e"), 197e12, 820e9, 128 * 2**20, _topologies("v5e:1x1", "v5e:2x2", "v5e:2x4")),
    "v5p": Chip(("TPU v5", "TPU v5p"), 459e12, 2.765e12, 2 * 64 * 2**20, _V5P),
    "v6e": Chip(("TPU v6 lite", "TPU v6e"), 920e12, 1.64e12, 128 * 2**20, _topologies("v6e:1x1", "v6e:2x2", "v6e:2x4")),
}


def require_compiler() -> None:
    """Stop, in one sentence, where the TPU compiler cannot run.

    Raises
    ------
    RuntimeError
        On another system than Linux on x86-64, with JAX 0.7, and where libtpu is not installed.
    """
    system, machine = platform.system(), platform.machine()
    instead = "or read the recorded report (python -m helpers.tpu --recorded)."
    if (system, machine) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"The TPU compiler, libtpu, exists for Linux on x86-64 only, and this is {system} on {machine}: use such a "
            f"machine (Binder or Kaggle will do), {instead}"
        )
    if jax.__version_info__ < (0, 8):  # a segmentation fault whenever `jit` compiles for a device that is not there
        raise RuntimeError(f"With JAX {jax.__version__} the TPU compiler crashes: install a newer JAX, {instead}")
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "The TPU compiler, libtpu, is not installed: run `pip install 'jax[tpu]'`, which brings the one for the "
            f"installed JAX, {instead}"
        )


def tpu_devices(chip: str = "v5e", chips: int = 1) -> list:
    """Devices to compile for, and for nothing else: they can run no program and hold no array.

    Builds on ``jax.experimental.topologies.get_topology_desc``.

    Raises
    ------
    ValueError
        If the chip is unknown, or cannot be had in this number.
    RuntimeError
        If the compiler is not there, or another process holds it; one sentence says what to do.
    """
    if chip not in CHIPS:
        raise ValueError(f"No chip {chip!r} is known here: choose one of {', '.join(CHIPS)}.")
    if chips not in CHIPS[chip].topologies:
        raise ValueError(f"{chips} chips cannot be asked for: choose 1, 4 or 8.")
    require_compiler()
    if not has_tpu_chips():
        # Nothing to protect: without chips, several processes may compile at once. The rest answers what libtpu would
        # otherwise ask the network about, and complain about.
        quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_SKIP_MDS_QUERY": "1"}
        quiet |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
        for variable, value in quiet.items():
            os.environ.setdefault(variable, value)
    try:
        return list(topologies.get_topology_desc(platform="tpu", **CHIPS[chip].topologies[chips]).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error) and "already in use" not in str(error):
            raise
        raise RuntimeError(
            "Another process holds libtpu: wait until it has ended, or, since compiling touches no chip, set "
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1 and start again."
        ) from None


def versions() -> dict[str, str]:
    """What decides what the compiler answers: the versions of the packages that make and compile the program."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def default_cache() -> Path:
    """The folder of answers: ``TUTORIAL_TPU_CACHE``, or one under the user's cache folder."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "stable-diffusion-jax-course" / "tpu"
    return Path(os.environ.get("TUTORIAL_TPU_CACHE") or usual)


def ask_compiler(
    lowered, chip: str, params=None, *, label="", cache: Path | None = None, say=lambda line: None
) -> dict:
    """Compile a lowered program, or find the answer in the cache, where it lies under chip, program text and versions.

    Parameters
    ----------
    lowered : jax.stages.Lowered
    chip : str
        For which it was lowered; the program's text does not say.
    params : tree, optional
        The program's second argument, to find out which of it the program does not read.
    cache : Path, optional
        A folder; without one, nothing is kept.
    say : callable
        Takes a line about the progress.

    Returns
    -------
    dict
        ``fits``, ``compile_seconds`` and ``date``; where it fits ``flops`` and ``bytes_accessed`` (both count a loop's
        body once) and ``memory``, in bytes on each chip; where not, the compiler's ``message``.

    Raises
    ------
    RuntimeError
        JAX's own, if the compiler refuses the program for anything but the size of the chip's HBM.
    """
    text = json.dumps([_ANSWER, chip, versions()]) + lowered.as_text()
    kept = cache and cache / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if kept and kept.exists():
        say(f"{label}: found in {cache}")
        return json.loads(kept.read_text())
    say(f"{label}: compiling {len(text) / 1e6:.1f} MB of program …")
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory() as dump, _heartbeat(say):
            compiled = lowered.compile(compiler_options={"xla_dump_to": dump})
            temporaries = temporary_bytes(dump)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "hbm" not in str(error).lower():
            raise
        answer = {"fits": False, "message": str(error)[:2000]}
    else:
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        answer = {"fits": True, "flops": cost["flops"], "bytes_accessed": cost["bytes accessed"]}
        answer["memory"] = {
            "arguments": memory.argument_size_in_bytes,
            "unread": 0 if params is None else _unread_bytes(compiled, params),
            "temporaries": temporaries,
            "program": memory.generated_code_size_in_bytes,
            "output": memory.output_size_in_bytes,
        }
    ctypes.CDLL(None).malloc_trim(0)  # the compiler leaves hundreds of MB to the C library, which keeps them otherwise
    answer["compile_seconds"] = round(time.monotonic() - start, 1)
    answer["date"] = datetime.datetime.now(datetime.UTC).date().isoformat()
    say(f"{label}: {answer['compile_seconds']:.0f} s")
    if kept:
        write_json(kept, answer)
    return answer


def temporary_bytes(dump: str | Path) -> int:
    """Bytes of HBM for what comes and goes while a program runs, with gaps; by these the compiler decides if it fits.

    Read from the compiler's buffer assignment, since ``temp_size_in_bytes`` of libtpu 0.0.42 counts the gaps twice.

    Parameters
    ----------
    dump : str or Path
        The folder that was given to the compiler as its option ``xla_dump_to``, for one program.

    Raises
    ------
    RuntimeError
        If there is not one buffer assignment, or not in the form that is known.
    """
    texts = [file.read_text() for file in Path(dump).glob("*after_optimizations-buffer-assignment.txt")]
    # Other memories than HBM have a color: "size 176, color 2, preallocated-temp".
    allocations = re.findall(r"^allocation \d+: size (\d+), (.+)", texts[0], re.MULTILINE) if len(texts) == 1 else []
    if not allocations:
        raise RuntimeError(
            f"{dump} does not say how the compiler laid out one program's memory. If it compiled one with this folder "
            "as xla_dump_to, this libtpu says it in another form: install the version in the course's lock."
        )
    return sum(int(size) for size, kind in allocations if kind.startswith("preallocated-temp"))


def usable_hbm(chip: str) -> int:
    """Bytes of a chip's HBM that the compiler lets a program use: it says so when it refuses one that is too large."""
    too_large = jax.ShapeDtypeStruct((2**17, 2**17), jnp.float32, sharding=SingleDeviceSharding(tpu_devices(chip)[0]))
    message = ask_compiler(jax.jit(lambda x: x + 1).lower(too_large), chip)["message"]
    # It says the first before it has laid out the memory, the second after.
    gib = re.search(r"available HBM \(([\d.]+)G|Used [\d.]+G of ([\d.]+)G", message)
    return int(float(gib[1] or gib[2]) * 2**30)


def write_json(path: Path, content) -> None:
    """Write a file whole or not at all, so that an interruption leaves nothing half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def _unread_bytes(compiled, params) -> int:
    """Bytes of parameters that lie on the chip and are not read, such as the VAE's encoder: JAX drops them."""

    def leaves(tree):  # None stands for a parameter that is not read, and for a field that a state leaves empty
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    pairs = zip(leaves(compiled.input_shardings[0][1]), leaves(params), strict=True)
    return sum(leaf.size * leaf.dtype.itemsize for sharding, leaf in pairs if sharding is None and leaf is not None)


@contextmanager
def _heartbeat(say: Callable[[str], None], every: float = 60.0):
    """Say every minute that the compiler is still at work."""
    done, start = threading.Event(), time.monotonic()

    def beat():
        while not done.wait(every):
            say(f"  … {time.monotonic() - start:.0f} s")

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
