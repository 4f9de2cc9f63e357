"""What the TPU compiler says about a function: does it fit, what does it do, and what is the least time for that."""

import ctypes
import dataclasses
import datetime
import importlib.metadata
import json
import logging
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_type_hints

import jax

from course.collectives import Collective, find_collectives
from course.tpu.chips import CHIPS, Chip, find_chip, tpu_devices

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM that a program needs on each device."""

    arguments: int  #: with what fills up tiles, and with arguments that the program does not read
    temporaries: int  #: what comes and goes while the program runs, with the gaps between
    program: int  #: the program itself
    output: int  #: but for what takes the place of a donated argument

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))

    def __str__(self) -> str:
        rows = [f"{kind:<20}{size / 2**20:>10,.1f}" for kind, size in dataclasses.asdict(self).items()]
        return "\n".join([f"{'HBM on each device':<20}{'MiB':>10}", *rows])


@dataclass(frozen=True)
class Work:
    """What a program does in one run on each device. The compiler counts a loop's body once."""

    flops: float  #: floating-point operations
    bytes_accessed: float  #: the compiler's estimate, which is no lower bound
    least_bytes: int  #: of the arguments that are read, and of the output, which have to be moved at least


@dataclass(frozen=True)
class Part:
    """A program that runs several times in a row."""

    name: str
    runs: int
    work: Work  #: of one run
    compile_seconds: float


@dataclass(frozen=True)
class Times:
    """Seconds that a chip takes, by its figures: a bound, and beside it an estimate."""

    operations: float  #: for all operations, at the chip's peak
    transfers: float  #: for the bytes that have to be moved, at the full bandwidth of HBM
    estimate: float  #: for operations or for all bytes that are accessed, whatever takes longer, summed over all runs

    @property
    def bound(self) -> float:
        """What no program beats that does these operations and moves these bytes."""
        return max(self.operations, self.transfers)

    @property
    def bound_by(self) -> str:
        return "FLOPs" if self.operations >= self.transfers else "bytes"

    def __str__(self) -> str:
        return f"At least {self.bound:.3g} s, by its {self.bound_by}; the estimate is {self.estimate:.3g} s."


def find_times(parts: Iterable[Part], chip: Chip) -> Times:
    """The bound and the estimate for parts that run one after another.

    What fits into the memory on the chip has to be read only once in all of a part's runs.

    Examples
    --------
    >>> chip = Chip("small", peak=100.0, bandwidth=10.0, on_chip=0, usable_hbm=1000)
    >>> part = Part("product", 2, Work(flops=50, bytes_accessed=20, least_bytes=8), compile_seconds=1)
    >>> find_times([part], chip)
    Times(operations=1.0, transfers=1.6, estimate=4.0)
    """
    operations = transfers = estimate = 0.0
    for runs, work in ((part.runs, part.work) for part in parts):
        operations += runs * work.flops / chip.peak
        transfers += (work.least_bytes + (runs - 1) * max(0, work.least_bytes - chip.on_chip)) / chip.bandwidth
        estimate += runs * max(work.flops / chip.peak, work.bytes_accessed / chip.bandwidth)
    return Times(operations, transfers, estimate)


@dataclass(frozen=True)
class Report:
    """What the compiler says about a program. All figures are those of one device. ``print`` makes a page of it."""

    chip: Chip
    memory: Memory | None  #: None if the compiler refuses the program
    work: Work | None  #: None if the compiler refuses the program
    message: str  #: what the compiler says when it refuses
    compile_seconds: float  #: on the clock, whatever else the machine did
    date: str
    versions: dict[str, str]  #: see `versions`
    collectives: tuple[Collective, ...] = ()  #: what devices exchange; in the body of a loop, once

    @property
    def fits(self) -> bool:
        return self.memory is not None and self.memory.total <= self.chip.usable_hbm

    @property
    def verdict(self) -> str:
        """Whether the program fits, in a sentence."""
        if self.memory is None:
            return f"It does not fit. The compiler: {self.message.splitlines()[0]}"
        sizes = f"{self.memory.total / 2**30:.2f} GiB on each device, of {self.chip.usable_hbm / 2**30:.2f} GiB."
        return f"It {'fits' if self.fits else 'does not fit'}: it takes {sizes}"

    @property
    def times(self) -> Times | None:
        """The bound and the estimate for one run. With a loop they are too low, as its body counts once."""
        return self.work and find_times([Part("program", 1, self.work, self.compile_seconds)], self.chip)

    @property
    def origin(self) -> str:
        """Who said this, and when, in a sentence."""
        used = f"libtpu {self.versions['libtpu']}, jax {self.versions['jax']}"
        return f"Compiled in {self.compile_seconds:.0f} s for {self.chip.name} on {self.date} by {used}."

    def __str__(self) -> str:
        blocks = [self.verdict, str(self.memory)] if self.memory else [self.verdict]
        if self.fits:
            work = self.work
            blocks.append(
                f"{work.flops / 1e9:,.4g} GFLOP, a loop's body counted once\n{work.least_bytes / 1e6:,.4g} MB to move "
                f"at least; {work.bytes_accessed / 1e6:,.4g} MB accessed, by the compiler's estimate\n{self.times}"
            )
        if self.collectives:
            kinds = Counter(collective.kind for collective in self.collectives)
            total = sum(collective.bytes for collective in self.collectives)
            counted = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
            blocks.append(f"Devices exchange {total:,} bytes: {counted}")
        return "\n\n".join([*blocks, self.origin])


def versions(*names: str) -> dict[str, str]:
    """The versions of packages that are there: by default those that compile programs, or that these are made of."""
    names = names or ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers")
    found = {name: next(importlib.metadata.distributions(name=name), None) for name in names}
    return {name: package.version for name, package in found.items() if package}


def ask_compiler(function: Callable, *arguments, chip: str = "v5e") -> Report:
    """Compile a function for a TPU that is not there, and say what the compiler finds.

    Builds on ``jax.jit(…).lower(…).compile()`` for compile-only devices, ``memory_analysis`` and ``cost_analysis``.

    Parameters
    ----------
    function : callable
        A function of arrays. One that is jitted or pmapped already is taken as it is.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays, of which only shapes and dtypes count; for static arguments
        their values. What has no sharding lies where JAX puts arrays that nobody has placed: on the first device, or
        with the others. For several devices, give shardings over ``tpu_devices(chip, chips)``, or a function that is
        pmapped over these.
    chip : str
        A key of ``CHIPS``.

    Raises
    ------
    ValueError
        If the chip is unknown, the function was lowered for other devices, or a Python number is among the arguments.
    RuntimeError
        If the compiler cannot be asked here; and JAX's own, if it refuses the program for anything but its size.

    Examples
    --------
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> report = ask_compiler(lambda x: x @ x, x)
    >>> report.fits, report.memory.arguments, report.work.flops
    (True, 33554432, 137438953472.0)
    """
    first, *_ = tpu_devices(chip)
    function = function if hasattr(function, "lower") else jax.jit(function)
    arguments = jax.tree.map(_shape_of, arguments)
    with jax.default_device(first):
        lowered = function.lower(*arguments)
    shapes = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
    if len(shapes) != len(jax.tree.leaves(lowered.args_info)):
        raise ValueError("A Python number is among the arguments: give jax.ShapeDtypeStruct((), dtype) in its place.")
    log.info("compiling %s …", getattr(function, "__name__", "a program"))
    start, memory, work, message = time.monotonic(), None, None, ""
    collectives = ()
    try:
        with tempfile.TemporaryDirectory() as dump:
            compiled = lowered.compile(compiler_options={"xla_dump_to": dump})
            _check_devices(compiled, chip)
            temporaries = temporary_bytes(dump)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) or "hbm" not in str(error).lower():
            raise
        message = str(error)[:2000]
    else:
        stats, cost = compiled.memory_analysis(), compiled.cost_analysis()
        read, written = stats.argument_size_in_bytes, stats.output_size_in_bytes
        unread = _unread_bytes(lowered, compiled, shapes, pmapped=not hasattr(function, "trace"))
        program, output = stats.generated_code_size_in_bytes, written - stats.alias_size_in_bytes
        memory = Memory(read + unread, temporaries, program, output)
        flops, accessed = cost.get("flops", 0.0), cost.get("bytes accessed", 0.0)  # absent if there are none
        least = min(read + written, int(accessed))  # of a table that is looked up, only some rows are accessed
        work = Work(flops, accessed, least)
        collectives = tuple(find_collectives(compiled))
    ctypes.CDLL(None).malloc_trim(0)  # the compiler leaves hundreds of MB to the C library, which keeps them otherwise
    seconds, date = round(time.monotonic() - start, 1), datetime.datetime.now(datetime.UTC).date().isoformat()
    return Report(find_chip(chip), memory, work, message, seconds, date, versions(), collectives)


def _shape_of(leaf):
    """Of an array its shape: where it lies does not matter here."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf


def _check_devices(compiled, chip: str) -> None:
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    found = {device.device_kind for sharding in shardings for device in sharding.device_set}
    if not found <= set(CHIPS[chip].device_kinds):
        raise ValueError(
            f"The function was lowered for devices of the kind {', '.join(sorted(found))}, and not for {chip}: give "
            f"its `pmap`, mesh or shardings the devices of tpu_devices({chip!r}, chips)."
        )


def _unread_bytes(lowered, compiled, shapes: list, pmapped: bool) -> int:
    """Bytes on each device of arguments that are not read. JAX leaves them out, and they lie there all the same."""

    def leaves(tree):  # None stands for an argument that is not read, and for a field that a state leaves empty
        return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)

    pairs = zip(leaves(lowered.args_info), leaves(compiled.input_shardings), strict=True)
    read = [sharding is not None for info, sharding in pairs if info is not None]
    unread = 0
    for shape in (shape for shape, is_read in zip(shapes, read, strict=True) if not is_read):
        sharding = getattr(shape, "sharding", None)
        on_device = sharding.shard_shape(shape.shape) if sharding else shape.shape[int(pmapped) :]
        unread += math.prod(on_device) * shape.dtype.itemsize
    return unread


def temporary_bytes(dump: str | Path) -> int:
    """Bytes of HBM for what comes and goes while a program runs, with gaps; by these the compiler decides if it fits.

    Read from the compiler's buffer assignment, which it writes into the folder that was given as ``xla_dump_to``. No
    figure of ``memory_analysis`` says it: of libtpu 0.0.42, ``temp_size_in_bytes`` counts gaps twice, or is 0, and
    ``peak_memory_in_bytes`` leaves gaps out, and counts memory on the chip. For Stable Diffusion XL in bfloat16 on v4
    with a batch of 16, the first says 28.17 GB, where the buffer assignment has 22.68.
    """
    texts = [file.read_text() for file in Path(dump).glob("*after_optimizations-buffer-assignment.txt")]
    # Other memories than HBM have a color: "size 176, color 2, preallocated-temp".
    allocations = re.findall(r"^allocation \d+: size (\d+), (.+)", texts[0], re.MULTILINE) if len(texts) == 1 else []
    if not allocations:
        raise RuntimeError(
            f"{dump} does not say how the compiler laid out one program's memory: this libtpu says it in another form, "
            "so install the version in the course's lock."
        )
    return sum(int(size) for size, kind in allocations if kind.startswith("preallocated-temp"))


def write_json(path: Path, content) -> None:
    """Write a file whole or not at all, so that an interruption leaves nothing half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)


def from_json(kind, content):
    """An object of a dataclass out of what ``dataclasses.asdict`` and JSON made of it."""
    inner = next((part for part in (kind, *get_args(kind)) if dataclasses.is_dataclass(part)), None)
    if isinstance(content, list):
        return tuple(from_json(inner, entry) for entry in content)
    if inner is None or content is None:
        return content
    hints = get_type_hints(inner)
    return inner(**{name: from_json(hints[name], value) for name, value in content.items()})
