"""TPU chips to ask the compiler about: what each can do, and its compile-only devices."""

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
from jax.experimental import topologies
from packaging.requirements import Requirement
from packaging.version import Version

from helpers.devices import has_tpu_chips

OLDEST_JAX = Version("0.9.2")  # 0.7 crashes when it compiles; none before has the table of chips


@dataclass(frozen=True)
class Chip:
    """What one JAX device of a kind of chip can do. A TPU7x chip is two, any other is one."""

    name: str  #: a key of ``CHIPS``
    peak: float  #: floating-point operations in a second, in bfloat16
    bandwidth: float  #: bytes from or to HBM in a second
    #: bytes of memory on the chip itself (VMEM, and on v4 CMEM), where weights can stay
    on_chip: int
    usable_hbm: int  #: bytes of HBM that the compiler lets a program use


class Kind(NamedTuple):
    """What JAX's table of chips does not say about one."""

    device_kinds: tuple[str, ...]  #: what JAX calls a device, now or earlier
    grids: dict[int, tuple[int, ...]]  #: for each number of chips, how they lie
    usable_gib: float  #: of HBM on a device; the compiler says so when it refuses a program
    cores: int = 1  #: that act as one device
    mxu: int = 128  #: its matrix unit has so many rows and columns of multipliers
    int8_rate: int = 2  #: how many products of int8 it takes in the time of one of bfloat16


class Place(NamedTuple):
    """How another process finds a device: ``compile_only_devices(chip, chips)[index]``."""

    chip: str
    chips: int
    index: int


# Bytes in a second that a link of a v5e chip to its neighbour carries each way: 400 GB/s for both
# ways of a chip's four links together (docs.cloud.google.com/tpu/docs/v5e), and 5e10 in the table
# of jax-ml.github.io/scaling-book/tpus.
ICI_LINK = 400e9 / 4 / 2

PLACES: dict[jax.Device, Place] = {}  # of every device that `tpu_devices` gave

FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4)}
CUBIC = {1: (1, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
CHIPS = {
    "v4": Kind(("TPU v4",), CUBIC, usable_gib=30.75, cores=2, int8_rate=1),
    "v5e": Kind(("TPU v5 lite", "TPU v5e"), FLAT, usable_gib=15.75),
    "v5p": Kind(("TPU v5", "TPU v5p"), CUBIC, usable_gib=95.74, cores=2),
    "v6e": Kind(("TPU v6 lite", "TPU v6e"), FLAT, usable_gib=31.25, mxu=256),
    "tpu7x": Kind(("TPU7x",), CUBIC, usable_gib=94.75, mxu=256, int8_rate=1),
}


def require_compiler() -> None:
    """Raise a RuntimeError, of one sentence, if the TPU compiler cannot be asked here."""
    instead = "or read the recorded answers (python -m course.tpu --recorded)."
    system = platform.system()
    machine = platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"The TPU compiler, libtpu, exists for Linux on x86-64 only, and this is {system} on "
            f"{machine}: use such a machine (Binder will do), {instead}"
        )
    if Version(jax.__version__) < OLDEST_JAX:
        raise RuntimeError(
            f"The TPU compiler can be asked from JAX {OLDEST_JAX} on, and this is "
            f"{jax.__version__}: install a newer one, {instead}"
        )
    install = f"run `pip install 'jax[tpu]=={jax.__version__}'`, which brings the one that fits"
    try:
        installed = Version(importlib.metadata.version("libtpu"))
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            f"The TPU compiler, libtpu, is not installed: {install}, {instead}"
        ) from None
    needed = needed_libtpu()
    if needed and installed < needed:
        raise RuntimeError(
            f"libtpu {installed} is too old for JAX {jax.__version__}, which needs {needed} or "
            f"newer and crashes otherwise: {install}, and start again, {instead}"
        )


def needed_libtpu() -> Version | None:
    """Return the oldest libtpu that the installed JAX asks for; None if it does not say.

    Its extra ``tpu`` requires, for example, ``libtpu==0.0.42.*``.
    """
    for line in importlib.metadata.requires("jax") or []:
        requirement = Requirement(line)
        if requirement.name == "libtpu":
            for specifier in requirement.specifier:
                if specifier.operator in ("==", ">=", "~="):
                    return Version(specifier.version.removesuffix(".*"))
    return None


@cache
def find_chip(name: str) -> Chip:
    """Return the figures of a kind of chip.

    Builds on ``jax.experimental.pallas.tpu.get_tpu_info_for_chip``.
    """
    if name not in CHIPS:
        raise ValueError(f"No chip {name!r} is known here: choose one of {', '.join(CHIPS)}.")
    require_compiler()
    from jax.experimental.pallas import tpu  # older versions of JAX have no such table

    kind = CHIPS[name]
    core = tpu.get_tpu_info_for_chip(tpu.ChipVersion(name.removeprefix("tpu")), kind.cores)
    bandwidth = float(kind.cores * core.mem_bw_bytes_per_second)
    if name == "v5p":
        # Google documents more (cloud.google.com/tpu/docs/v5p), and a bound must take the more.
        bandwidth = max(bandwidth, 2.765e12)
    return Chip(
        name=name,
        peak=float(kind.cores * core.bf16_ops_per_second),
        bandwidth=bandwidth,
        on_chip=kind.cores * (core.vmem_capacity_bytes + core.cmem_capacity_bytes),
        usable_hbm=int(kind.usable_gib * 2**30),
    )


def tpu_devices(chip: str = "v5e", chips: int = 1) -> list:
    """Return devices to compile for and nothing else: they can run no program and hold no array.

    Builds on ``jax.experimental.topologies.get_topology_desc``.

    Parameters
    ----------
    chip : str
        A key of ``CHIPS``.
    chips : int
        1, 4 or 8, all of them on one machine. Each is one device, but for TPU7x, of which each is
        two.

    Raises
    ------
    ValueError
        If the chip is unknown, or cannot be had in this number.
    RuntimeError
        If the compiler cannot be asked here, or another process holds it; one sentence says what to
        do.
    """
    grids = CHIPS[find_chip(chip).name].grids
    if chips not in grids:
        raise ValueError(f"{chips} chips cannot be asked for: choose 1, 4 or 8.")
    return list(compile_only_devices(chip, chips))


@cache
def compile_only_devices(chip: str, chips: int) -> tuple[jax.Device, ...]:
    """Return the devices of `tpu_devices`, without its checks; libtpu is asked for them once.

    Devices are equal only to themselves, and a program needs all of its devices from one answer.
    """
    if not has_tpu_chips():
        _silence_libtpu()
    grid = CHIPS[chip].grids[chips]
    # All on one host, because `pmap` takes devices of its own host only.
    options = {"chips_per_host_bounds": (*grid, 1)[:3]}
    if chip == "v4":
        # As on a real machine, where both cores act as one device.
        options["chip_config_name"] = "megacore"
    name = f"{chip}:{'x'.join(map(str, grid))}"
    try:
        devices = tuple(topologies.get_topology_desc(name, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if not is_lock(str(error)):
            raise
        raise RuntimeError(LOCKED) from None
    for index, device in enumerate(devices):
        PLACES[device] = Place(chip, chips, index)
    return devices


LOCKED = (
    "Another process holds libtpu: wait until it has ended, or, since compiling touches no chip, "
    "set ALLOW_MULTIPLE_LIBTPU_LOAD=1 and start again."
)


def is_lock(message: str) -> bool:
    """Say whether libtpu complains that another process has loaded it."""
    return "lockfile" in message or "already in use" in message


def _silence_libtpu() -> None:
    """Answer what libtpu would ask the network about, and complain about, without chips.

    There is nothing to protect either, so several processes may load it at once.
    """
    variables = {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_MIN_LOG_LEVEL": "3",
        "TPU_STDERR_LOG_LEVEL": "3",
    }
    for variable, value in variables.items():
        os.environ.setdefault(variable, value)
