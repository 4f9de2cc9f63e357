"""What devices exchange in a compiled program, read from its text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import jax

from course.tpu.schedule import START, count_runs, read_computations

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices exchange data."""

    kind: str  #: such as ``all-reduce``
    bytes: int  #: of its result on one device
    #: where in the Python program it comes from, by the compiler; empty if it does not say
    origin: str
    runs: int = 1  #: how often it runs in a run of the program, where the compiler knows it
    is_async: bool = False  #: whether the device goes on computing in the meantime


def find_collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """List a program's collectives in the order of its text; one in a loop stands there once.

    Builds on ``Compiled.as_text``.
    """
    return read_collectives(compiled.as_text())


def read_collectives(text: str) -> list[Collective]:
    """List the collectives in the text of a compiled program, see `find_collectives`."""
    computations = read_computations(text) or {"": text.splitlines()}
    runs = count_runs(computations)
    starting = set()  # the computations that start a collective and go on
    channels = set()  # and the channels of these: the collective is in the next ones again
    for name, lines in computations.items():
        if any(START in line for line in lines):
            starting.add(name)
            channels.update(re.findall(r"channel_id=(\d+)", "\n".join(lines)))
    found = []
    for name, lines in computations.items():
        for line in lines:
            # An accelerator may start an instruction and go on: then the "done" has the result.
            instruction = re.search(rf" = (.*?) ({KINDS})(-done)?\(", line)
            if not instruction:
                continue
            result, kind, done = instruction.groups()
            channel = re.search(r"channel_id=(\d+)", line)
            if name not in starting and channel and channel[1] in channels:
                continue
            origin = re.search(r'op_name="([^"]*)"', line)
            found.append(
                Collective(
                    kind,
                    array_bytes(result),
                    origin[1] if origin else "",
                    runs=runs[name],
                    is_async=bool(done) or name in starting,
                )
            )
    return found


def array_bytes(text: str) -> int:
    """Bytes of all arrays in a piece of a program's text, which writes them as bf16[2,1024,1280].

    Examples
    --------
    >>> array_bytes("(bf16[2,1024]{1,0}, pred[])")
    4097
    """
    bits = 0
    for width, sizes in re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", text):
        numbers = math.prod(int(size) for size in sizes.split(",") if size)
        bits += int(width or 8) * numbers  # a pred is a byte
    return bits // 8


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many collectives of each kind a program has, see `find_collectives`."""
    counts = Counter(collective.kind for collective in find_collectives(compiled))
    return dict(sorted(counts.items()))
