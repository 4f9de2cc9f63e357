"""What the TPU compiler says: does a program fit, what does it do, how long does it take at least.

A `Report` is about one function, and an `Answer` has the reports on the pieces of a program.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tabulate import tabulate

from course.tpu.chips import Chip
from course.tpu.hlo import Collective, Copy, Overlap
from course.tpu.programs import PARTS, STEP, WHOLE, Program


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
        """Return the share of the peak that a measured time reaches: model FLOPs utilization (MFU).

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
    """Return the least time for programs that run one after another.

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
    schedule: Overlap | None = None
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


@dataclass(frozen=True)
class Answer:
    """What the compiler says about a program's pieces. ``print`` makes a page of it."""

    program: Program
    pieces: dict[str, Report]  #: by their names
    #: bytes of the parameters of all models, with those that the program does not read; None if
    #: nobody counted
    parameters: int | None = None

    @property
    def whole(self) -> Report:
        """On the whole program, where the body of the loop over the steps counts once."""
        return self.pieces[WHOLE]

    @property
    def parts(self) -> dict[str, Report]:
        """On what one device does in a call, see `PARTS`; empty if the program does not fit."""
        return {name: self.pieces[name] for name in PARTS if name in self.pieces}

    @property
    def flops(self) -> float:
        """Floating-point operations of a call, on each device."""
        return sum(self.program.runs(name) * part.work.flops for name, part in self.parts.items())

    @property
    def times(self) -> Times | None:
        """The least time for a call; None unless every part was asked about."""
        if len(self.parts) < len(PARTS):
            return None
        return self.times_on(self.parts[STEP].chip)

    def times_on(self, chip: Chip) -> Times:
        """Return those times for a chip with other figures, which does the same."""
        runs = [(self.program.runs(name), part.work) for name, part in self.parts.items()]
        return find_times(runs, chip)

    def __str__(self) -> str:
        blocks = [f"{self.program}\n{self.whole.verdict}"]
        if self.whole.memory:
            blocks.append(str(self.whole.memory))
        if self.times:
            rows = []
            for name, part in self.parts.items():
                work = part.work
                figures = [work.flops / 1e9, work.least_bytes / 1e6, work.bytes_accessed / 1e6]
                rows.append([name, self.program.runs(name), *figures])
            header = ["part", "runs", "GFLOP of a run", "MB to move", "MB, as the compiler counts"]
            table = tabulate(rows, header, tablefmt="plain", floatfmt=",.4g")
            blocks.append(f"{table}\nA call: {self.times}")
        return "\n\n".join([*blocks, self.whole.origin])
