"""What the TPU compiler says about a function: does it fit, what does it do, how long at least."""

import dataclasses
import datetime
import importlib.metadata
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax
from tabulate import tabulate

from course.tpu.apart import compile_apart, read_arguments
from course.tpu.chips import Chip, find_chip, tpu_devices
from course.tpu.collectives import Collective
from course.tpu.copies import Copy
from course.tpu.schedule import Schedule

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
        return self.arguments + self.temporaries + self.program + self.output

    def __str__(self) -> str:
        rows = [[kind, size / 2**20] for kind, size in dataclasses.asdict(self).items()]
        header = ["HBM on each device", "MiB"]
        return tabulate(rows, header, tablefmt="plain", floatfmt=",.1f")


@dataclass(frozen=True)
class Work:
    """What a program does in one run on each device. The compiler counts a loop's body once."""

    flops: float  #: floating-point operations
    #: what each operation reads and writes by the compiler's count, in whatever memory, and some
    #: bytes several times, see `Report.copies`; it says nothing about time
    bytes_accessed: float
    #: of the arguments that are read, and of the output, which have to be moved at least
    least_bytes: int


@dataclass(frozen=True)
class Times:
    """Seconds that a chip takes at least, by its figures: for its FLOPs, and for its bytes."""

    operations: float  #: for all operations, at the chip's peak
    transfers: float  #: for the bytes that have to be moved, at the full bandwidth of HBM

    @property
    def bound(self) -> float:
        """What no program beats that does these operations and moves these bytes."""
        return max(self.operations, self.transfers)

    @property
    def bound_by(self) -> str:
        if self.operations >= self.transfers:
            return "FLOPs"
        return "bytes"

    def utilization(self, seconds: float) -> float:
        """Model FLOPs utilization (MFU): the share of the peak that a measured time reaches.

        Examples
        --------
        >>> Times(operations=1.5, transfers=0.5).utilization(2.0)
        0.75
        """
        return self.operations / seconds

    def __str__(self) -> str:
        if self.bound_by == "FLOPs":
            other = f"its bytes take {self.transfers:.3g} s"
        else:
            other = f"its FLOPs take {self.operations:.3g} s"
        return f"At least {self.bound:.3g} s, by its {self.bound_by}; {other}."


def find_times(runs: Iterable[tuple[int, Work]], chip: Chip) -> Times:
    """The least time for programs that run one after another.

    What fits into the memory on the chip has to be read only once in all runs of a program.

    Parameters
    ----------
    runs : list of tuple
        How often each program runs, and what it does in one run.
    chip : Chip
        See `find_chip`.

    Examples
    --------
    >>> chip = Chip("small", peak=100.0, bandwidth=10.0, on_chip=0, usable_hbm=1000)
    >>> product = Work(flops=50, bytes_accessed=20, least_bytes=8)
    >>> find_times([(2, product)], chip)
    Times(operations=1.0, transfers=1.6)
    """
    operations = 0.0
    transfers = 0.0
    for count, work in runs:
        operations += count * work.flops / chip.peak
        read_again = max(0, work.least_bytes - chip.on_chip)
        transfers += (work.least_bytes + (count - 1) * read_again) / chip.bandwidth
    return Times(operations, transfers)


@dataclass(frozen=True)
class Report:
    """What the compiler says about a program, on one device. ``print`` makes a page of it.

    A recorded report can lack the memory or the work, if nobody wrote it down.
    """

    chip: Chip
    memory: Memory | None  #: None if the compiler refuses the program
    work: Work | None  #: None if the compiler refuses the program
    message: str  #: what the compiler says when it refuses; else empty
    compile_seconds: float  #: on the clock, whatever else the machine did
    date: str
    versions: dict[str, str]  #: see `versions`
    collectives: tuple[Collective, ...] = ()  #: what devices exchange; in the body of a loop, once
    note: str = ""  #: what should be known about the figures
    #: what it copies between memories, which `Work.bytes_accessed` counts several times; None if
    #: nobody wrote it down
    copies: tuple[Copy, ...] | None = None
    #: what it computes while devices exchange data; None if nobody wrote it down
    schedule: Schedule | None = None
    #: the compiled program in HLO, the compiler's language, but for the notes that it makes for
    #: itself (``backend_config``); empty unless somebody asked for it
    text: str = ""

    @property
    def fits(self) -> bool:
        if self.message:
            return False
        return self.memory is None or self.memory.total <= self.chip.usable_hbm

    @property
    def verdict(self) -> str:
        """Whether the program fits, in a sentence."""
        if self.message:
            return f"It does not fit. The compiler: {self.message.splitlines()[0]}"
        if self.memory is None:
            return "It fits; how much memory it takes was not recorded."
        needed = f"{self.memory.total / 2**30:.2f} GiB on each device"
        usable = f"{self.chip.usable_hbm / 2**30:.2f} GiB"
        answer = "It fits" if self.fits else "It does not fit"
        return f"{answer}: it takes {needed}, of {usable}."

    @property
    def times(self) -> Times | None:
        """The least time for one run; too low with a loop, as its body counts once."""
        if self.work is None:
            return None
        return find_times([(1, self.work)], self.chip)

    @property
    def origin(self) -> str:
        """Who said this, and when, in a sentence."""
        used = f"libtpu {self.versions['libtpu']}, jax {self.versions['jax']}"
        return (
            f"Compiled in {self.compile_seconds:.0f} s for {self.chip.name} "
            f"on {self.date} by {used}."
        )

    @property
    def _accessed(self) -> str:
        """What the compiler counts as accessed, and the copies that are a part of it."""
        text = f"The compiler counts {self.work.bytes_accessed / 1e6:,.4g} MB accessed."
        if self.copies:
            number = sum(copy.number for copy in self.copies)
            total = sum(copy.number * copy.bytes for copy in self.copies)
            copies = "1 copy" if number == 1 else f"{number} copies"
            text += (
                f"\nIn that are, several times, {copies} from memory to memory, "
                f"{total / 1e6:,.4g} MB; the largest: {self.copies[0]}"
            )
        return text

    def __str__(self) -> str:
        blocks = [self.verdict]
        if self.memory:
            blocks.append(str(self.memory))
        if self.fits and self.work:
            blocks.append(
                f"{self.work.flops / 1e9:,.4g} GFLOP, a loop's body counted once\n"
                f"{self.work.least_bytes / 1e6:,.4g} MB to move at least\n"
                f"{self.times}"
            )
            blocks.append(self._accessed)
        if self.collectives:
            kinds = Counter(collective.kind for collective in self.collectives)
            total = sum(collective.bytes for collective in self.collectives)
            counted = ", ".join(f"{number} × {kind}" for kind, number in kinds.items())
            blocks.append(f"Devices exchange {total:,} bytes: {counted}")
        if self.note:
            blocks.append(self.note)
        blocks.append(self.origin)
        return "\n\n".join(blocks)


def versions(*names: str) -> dict[str, str]:
    """The versions of packages that are there, by default of those that make up a program."""
    if not names:
        names = ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def ask_compiler(
    function: Callable,
    *arguments,
    chip: str = "v5e",
    timeout: float | None = None,
    keep_text: bool = False,
) -> Report:
    """Compile a function for a TPU that is not there, and say what the compiler finds.

    Builds on ``jax.jit(…).lower(…)`` for compile-only devices. The compiler runs in a process of
    its own: if it crashes, this one goes on.

    Parameters
    ----------
    function : callable
        A function of arrays. One that is jitted or pmapped already is taken as it is.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays, of which only shapes and dtypes count; for
        static arguments their values. What has no sharding lies where JAX puts arrays that nobody
        has placed: on the first device, or with the others. For several devices, give shardings
        over ``tpu_devices(chip, chips)``, or a function that is pmapped over these.
    chip : str
        A key of ``CHIPS``.
    timeout : float, optional
        Seconds after which the compiler is stopped. By default it takes as long as it takes.
    keep_text : bool
        Whether the report has the text of the compiled program. That of a real model is long.

    Raises
    ------
    ValueError
        If the chip is unknown, the function was lowered for other devices, or a Python number is
        among the arguments.
    RuntimeError
        If the compiler cannot be asked here, crashes or takes too long; and a
        ``jax.errors.JaxRuntimeError`` if it refuses the program for anything but its size.

    Examples
    --------
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> report = ask_compiler(lambda x: x @ x, x)
    >>> report.fits, report.memory.arguments, report.work.flops
    (True, 33554432, 137438953472.0)
    """
    first = tpu_devices(chip)[0]
    if not hasattr(function, "lower"):
        function = jax.jit(function)
    arguments = jax.tree.map(_shape_of, arguments)
    with jax.default_device(first):
        lowered = function.lower(*arguments)
    shapes = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
    if len(shapes) != len(jax.tree.leaves(lowered.args_info)):
        raise ValueError(
            "A Python number is among the arguments: "
            "give jax.ShapeDtypeStruct((), dtype) in its place."
        )
    log.info("compiling %s …", getattr(function, "__name__", "a program"))
    said = compile_apart(lowered, chip, timeout)
    report = Report(
        chip=find_chip(chip),
        memory=None,
        work=None,
        message="",
        compile_seconds=round(said["seconds"], 1),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        versions=versions(),
    )
    if "refused" in said:
        if "RESOURCE_EXHAUSTED" not in said["refused"] or "hbm" not in said["refused"].lower():
            raise jax.errors.JaxRuntimeError(said["refused"])
        return dataclasses.replace(report, message=said["refused"][:2000])

    # `pmap` splits the first axis of every argument; its functions have no `trace`.
    unread = _unread_bytes(shapes, read_arguments(lowered), pmapped=not hasattr(function, "trace"))
    moved = said["arguments"] + said["output"]
    if " while(" not in said["text"]:
        # Of a table that is looked up, only some rows are accessed. With a loop, whose body counts
        # once, the count of accessed bytes says nothing about that.
        moved = min(moved, int(said["bytes_accessed"]))
    return dataclasses.replace(
        report,
        memory=Memory(
            arguments=said["arguments"] + unread,
            temporaries=said["temporaries"],
            program=said["program"],
            output=said["output"] - said["donated"],
        ),
        work=Work(
            flops=said["flops"],
            bytes_accessed=said["bytes_accessed"],
            least_bytes=moved,
        ),
        collectives=tuple(Collective(**collective) for collective in said["collectives"]),
        note=said["note"],
        copies=tuple(Copy(**copy) for copy in said["copies"]),
        schedule=Schedule(**said["schedule"]),
        text=said["text"] if keep_text else "",
    )


def _shape_of(leaf):
    """Of an array its shape: where it lies does not matter here."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _unread_bytes(shapes: list, read: set[int], pmapped: bool) -> int:
    """Bytes on each device of arguments that are not read: they lie there all the same."""
    unread = 0
    for number, shape in enumerate(shapes):
        if number in read:
            continue
        on_device = shape.shape
        if getattr(shape, "sharding", None):
            on_device = shape.sharding.shard_shape(shape.shape)
        elif pmapped:
            on_device = shape.shape[1:]
        unread += math.prod(on_device) * shape.dtype.itemsize
    return unread
