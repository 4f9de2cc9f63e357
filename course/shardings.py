"""What was recorded about a step of Stable Diffusion XL on several chips; chapter 9 shows it."""

import functools
import json
from dataclasses import dataclass

from course.tpu.compiler import Report
from course.tpu.records import read_report
from helpers.places import find_data

# Bytes in a second that a link of a v5e chip to its neighbour carries each way: 400 GB/s for both
# ways of a chip's four links together (docs.cloud.google.com/tpu/docs/v5e), and 5e10 in the table
# of jax-ml.github.io/scaling-book/tpus.
ICI_LINK = 400e9 / 4 / 2


@dataclass(frozen=True)
class Exchange:
    """All collectives of one kind in a program, on each device."""

    kind: str  #: such as ``all-gather``
    is_async: bool  #: whether the chip goes on computing in the meantime
    number: int  #: of instructions
    runs: int  #: in one run of the program
    bytes: int  #: of all their results in one run


@dataclass(frozen=True)
class Split:
    """One way to split the work of a step, and what the TPU compiler says of it on each chip."""

    mesh: dict[str, int]  #: the axes of the mesh, and how many chips each has
    images: int  #: drawn at a time by all chips together
    parameters: int  #: bytes of the UNet's on each chip
    report: Report
    exchanges: tuple[Exchange, ...]

    @property
    def exchanged(self) -> int:
        """Bytes of the results of all collectives on each chip."""
        return sum(exchange.bytes for exchange in self.exchanges)

    @property
    def asynchronous(self) -> float:
        """The share of the exchanged bytes that asynchronous instructions move, from 0 to 1.

        Only what is computed between their start and their done hides them.
        """
        if not self.exchanged:
            return 1.0
        return sum(each.bytes for each in self.exchanges if each.is_async) / self.exchanged

    @property
    def kinds(self) -> str:
        """How often each kind of collective runs, such as ``3 all-reduce``."""
        runs = {}
        for exchange in self.exchanges:
            runs[exchange.kind] = runs.get(exchange.kind, 0) + exchange.runs
        return ", ".join(f"{number} {kind}" for kind, number in runs.items()) or "none"


@functools.cache
def recorded_splits() -> dict[str, Split]:
    """The recorded ways to split XL, by name; ``benchmarks.record_shardings`` asked."""
    found = {}
    content = json.loads(find_data("benchmarks/shardings.json").read_text(encoding="utf-8"))
    for name, split in content.items():
        found[name] = read_split(split)
    return found


def read_split(content: dict) -> Split:
    """What a recorder has written about a program on several chips."""
    return Split(
        mesh=content["mesh"],
        images=content["images"],
        parameters=content["parameters"],
        report=read_report(content["report"]),
        exchanges=tuple(Exchange(**exchange) for exchange in content["exchanges"]),
    )
