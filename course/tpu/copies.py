"""What a compiled program copies from one memory to another, read from its text."""

import re
from collections import Counter
from dataclasses import dataclass

import jax

from course.tpu.collectives import array_bytes


@dataclass(frozen=True)
class Copy:
    """Copies of arrays of one type, which run while the chip computes something else.

    Where an array lies, the text says behind its tiles: ``S(1)`` is memory space 1. Space 0, HBM,
    is left out there. Space 1 is VMEM, the memory on the chip; on v4 copies go to space 3.

    `Work.bytes_accessed` has four times a copy's bytes in it, besides the operation that reads the
    result: what ``copy-start`` reads, both places that its result names, and what ``copy-done``
    gives. Of slices nobody checked.
    """

    array: str  #: as the text writes it, such as ``bf16[1280,5120]``
    bytes: int  #: of one array
    origin: int  #: the memory space that it comes from
    target: int  #: the memory space that it goes to
    number: int  #: how many there are; those in a loop once

    def __str__(self) -> str:
        spaces = ["HBM" if space == 0 else f"S({space})" for space in (self.origin, self.target)]
        return f"{self.number} × {self.array}, from {spaces[0]} to {spaces[1]}"


def find_copies(compiled: jax.stages.Compiled) -> list[Copy]:
    """List what a program copies between memories, what is most bytes first.

    Builds on ``Compiled.as_text``. A slice that is fetched by itself is a copy, too.
    """
    return read_copies(compiled.as_text())


def read_copies(text: str) -> list[Copy]:
    """List the copies in the text of a compiled program, see `find_copies`."""
    array = r"(\w+\[[\d,]*\])(?:\{([^}]*)\})?"  # bf16[8,128]{1,0:T(8,128)(2,1)S(1)}
    counts = Counter()
    for line in text.splitlines():
        # The result names both places; the one of a copy the target first, of a slice the source.
        copy = re.search(rf" = \({array}, {array}, .* copy-start\(", line)
        cut = re.search(rf" = \(\(?{array}\)?, {array}, .* slice-start\(", line)
        if copy:
            name, target, _, origin = copy.groups()
        elif cut:
            _, origin, name, target = cut.groups()
        else:
            continue
        if memory_space(origin) != memory_space(target):
            counts[name, memory_space(origin), memory_space(target)] += 1
    found = []
    for (name, origin, target), number in counts.items():
        found.append(Copy(name, array_bytes(name), origin, target, number))
    return sorted(found, key=lambda copy: copy.number * copy.bytes, reverse=True)


def memory_space(layout: str | None) -> int:
    """The memory space in an array's layout, such as ``1,0:T(8,128)(2,1)S(1)``."""
    space = re.search(r"S\((\d+)\)", layout or "")
    return int(space[1]) if space else 0
