"""What devices exchange in a compiled program, read from its text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices exchange data."""

    kind: str  #: such as ``all-reduce``
    bytes: int  #: of its result on one device
    origin: str  #: where in the Python program it comes from, by the compiler; empty if it does not say


def find_collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """List a program's collectives, in the order of its text. One in the body of a loop stands there once.

    Builds on ``Compiled.as_text``.
    """
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for line in compiled.as_text().splitlines():
        # An accelerator may start an instruction and go on: then the "done" has the result.
        if match := re.search(rf" = (.*?) ({kinds})(?:-done)?\(", line):
            arrays = re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", match[1])  # such as bf16[2,1024,1280]; bits, sizes
            bits = [int(width or 8) * math.prod(map(int, filter(None, sizes.split(",")))) for width, sizes in arrays]
            origin = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(match[2], sum(bits) // 8, origin[1] if origin else ""))
    return found


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many collectives of each kind a program has, see `find_collectives`."""
    return dict(sorted(Counter(collective.kind for collective in find_collectives(compiled)).items()))
