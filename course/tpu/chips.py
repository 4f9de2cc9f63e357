"""TPU chips that the compiler can be asked about: what each can do at most, and its compile-only devices."""

import importlib.util
import os
import platform
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
from jax.experimental import topologies

from helpers.devices import has_tpu_chips


@dataclass(frozen=True)
class Chip:
    """What one JAX device of a kind of chip can do at most. A TPU7x chip is two devices, any other is one."""

    name: str  #: a key of ``CHIPS``
    peak: float  #: floating-point operations in a second, in bfloat16
    bandwidth: float  #: bytes from or to HBM in a second
    on_chip: int  #: bytes of memory on the chip itself (VMEM, and CMEM on v4), where weights can stay between two runs
    usable_hbm: int  #: bytes of HBM that the compiler lets a program use


class Kind(NamedTuple):
    """What JAX's table of chips does not say about one."""

    device_kinds: tuple[str, ...]  #: what JAX calls a device, now or earlier
    grids: dict[int, str]  #: for each number of chips how they lie
    usable_gib: float  #: of HBM on a device; the compiler says so when it refuses a program
    cores: int = 1  #: that act as one device


_FLAT, _CUBIC = {1: "1x1", 4: "2x2", 8: "2x4"}, {1: "1x1x1", 4: "2x2x1", 8: "2x2x2"}
CHIPS = {
    "v4": Kind(("TPU v4",), _CUBIC, 30.75, cores=2),
    "v5e": Kind(("TPU v5 lite", "TPU v5e"), _FLAT, 15.75),
    "v5p": Kind(("TPU v5", "TPU v5p"), _CUBIC, 95.74, cores=2),
    "v6e": Kind(("TPU v6 lite", "TPU v6e"), _FLAT, 31.25),
    "tpu7x": Kind(("TPU7x",), _CUBIC, 94.75),
}


def require_compiler() -> None:
    """Raise a RuntimeError, of one sentence, if the TPU compiler cannot be asked here."""
    system, machine = platform.system(), platform.machine()
    instead = "or read the recorded reports (python -m course.tpu --recorded)."
    if (system, machine) != ("Linux", "x86_64"):
        raise RuntimeError(
            f"The TPU compiler, libtpu, exists for Linux on x86-64 only, and this is {system} on {machine}: use such a "
            f"machine (Binder or Kaggle will do), {instead}"
        )
    if jax.__version_info__ < (0, 9, 2):  # 0.7 crashes when it compiles; none before 0.9.2 has the table of chips
        raise RuntimeError(
            f"The TPU compiler can be asked from JAX 0.9.2 on, and this is {jax.__version__}: install a newer one, "
            f"{instead}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError(
            "The TPU compiler, libtpu, is not installed: run `pip install 'jax[tpu]'`, which brings the one for the "
            f"installed JAX, {instead}"
        )


@cache
def find_chip(name: str) -> Chip:
    """The figures of a kind of chip, by ``jax.experimental.pallas.tpu.get_tpu_info_for_chip``."""
    if name not in CHIPS:
        raise ValueError(f"No chip {name!r} is known here: choose one of {', '.join(CHIPS)}.")
    require_compiler()
    from jax.experimental.pallas import tpu  # older versions of JAX have no such table

    kind = CHIPS[name]
    core = tpu.get_tpu_info_for_chip(tpu.ChipVersion(name.removeprefix("tpu")), kind.cores)
    bandwidth = float(kind.cores * core.mem_bw_bytes_per_second)
    if name == "v5p":  # of which Google documents more (cloud.google.com/tpu/docs/v5p), and a bound must take the more
        bandwidth = max(bandwidth, 2.765e12)
    on_chip = kind.cores * (core.vmem_capacity_bytes + core.cmem_capacity_bytes)
    return Chip(name, float(kind.cores * core.bf16_ops_per_second), bandwidth, on_chip, int(kind.usable_gib * 2**30))


def tpu_devices(chip: str = "v5e", chips: int = 1) -> list:
    """Devices to compile for, and for nothing else: they can run no program and hold no array.

    Builds on ``jax.experimental.topologies.get_topology_desc``.

    Parameters
    ----------
    chip : str
        A key of ``CHIPS``.
    chips : int
        1, 4 or 8, all of them on one machine. Each is one device, but for TPU7x, of which each is two.

    Raises
    ------
    ValueError
        If the chip is unknown, or cannot be had in this number.
    RuntimeError
        If the compiler cannot be asked here, or another process holds it; one sentence says what to do.
    """
    kind = CHIPS[find_chip(chip).name]
    if chips not in kind.grids:
        raise ValueError(f"{chips} chips cannot be asked for: choose 1, 4 or 8.")
    if not has_tpu_chips():
        # Nothing to protect: without chips, several processes may compile at once. The rest answers what libtpu would
        # otherwise ask the network about, and complain about.
        quiet = {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-1", "TPU_SKIP_MDS_QUERY": "1"}
        quiet |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3"}
        for variable, value in quiet.items():
            os.environ.setdefault(variable, value)
    grid = kind.grids[chips]
    options = {"chips_per_host_bounds": (*map(int, grid.split("x")), 1)[:3]}  # one host: `pmap` takes a host's own
    if chip == "v4":
        options["chip_config_name"] = "megacore"  # as on a real machine, where both cores act as one
    try:
        return list(topologies.get_topology_desc(f"{chip}:{grid}", "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        if "lockfile" not in str(error) and "already in use" not in str(error):
            raise
        raise RuntimeError(
            "Another process holds libtpu: wait until it has ended, or, since compiling touches no chip, set "
            "ALLOW_MULTIPLE_LIBTPU_LOAD=1 and start again."
        ) from None
