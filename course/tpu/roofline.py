"""How long a compiled program takes by its own text: a roofline for each of its instructions.

An instruction takes as long as its products at the chip's peak, once the tiles of the MXU are
filled, as long as the bytes that it reads from HBM and writes there, or, where that is known, as
long as a chip needs for the bundles that the compiler scheduled for it, whichever takes longest.
Instructions of one chip run one after another, so these times are added up. What lies in the memory
on the chip costs no bytes, and copies that run in the background cost nothing, unless all bytes
together take longer. This is a bound for the program as it was compiled, and nothing in it was
measured: what a chip waits for besides is not in it.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from course.tpu.chips import CHIPS, Chip
from course.tpu.hlo import (
    KINDS,
    START,
    called_by,
    count_pairs,
    memory_space,
    read_computations,
    read_windows,
    rounds_of,
)
from course.tpu.jaxpr import Product

INSTRUCTION = re.compile(r" +(?:ROOT )?%([\w.-]+) = (.*?) ([\w-]+)\((.*)")
ARRAY = re.compile(r"([a-z]+\d*)\w*\[([\d,]*)\](?:\{([\d,]*)(:[^}]*)?\})?")
# What gives a name to something that is there, and what is only waited for.
FREE = (
    "after-all|bitcast|constant|get-tuple-element|iota|opt-barrier|parameter|partition-id|"
    r"replica-id|tuple|[\w-]+-(?:start|done|update)"
)
KERNEL = 'custom_call_target="tpu_custom_call"'
MXUS = 4  # of a core; from v6e on they are two, and each takes two rows of numbers in a cycle


class Array(NamedTuple):
    """An array, as a program's text writes its type."""

    sides: tuple[int, ...]
    bytes: int  #: with what fills up its tiles
    space: int  #: the memory space that it lies in: 0 is HBM
    dtype: str = ""  #: as the compiler calls it, such as ``bf16``


class Instruction(NamedTuple):
    """A line of a program."""

    name: str
    kind: str  #: such as ``fusion``
    result: tuple[Array, ...]
    operands: tuple[str, ...]  #: the names of the instructions that it reads
    line: str


@dataclass(frozen=True)
class Roofline:
    """Seconds of one run on a chip, by what bounds each instruction."""

    multiplying: float = 0.0  #: of those that products bound
    moving: float = 0.0  #: of those that bytes bound
    issuing: float = 0.0  #: of those that bundles bound, one in a cycle
    bytes: float = 0.0  #: read from HBM and written there

    def __add__(self, other: "Roofline") -> "Roofline":
        return Roofline(
            self.multiplying + other.multiplying,
            self.moving + other.moving,
            self.issuing + other.issuing,
            self.bytes + other.bytes,
        )

    def __mul__(self, runs: int) -> "Roofline":
        return Roofline(
            runs * self.multiplying, runs * self.moving, runs * self.issuing, runs * self.bytes
        )

    @property
    def seconds(self) -> float:
        return self.multiplying + self.moving + self.issuing


def clock_of(chip: Chip) -> float:
    """Return the cycles of a chip in a second, by its peak.

    Examples
    --------
    >>> from course.tpu.chips import find_chip
    >>> f"{clock_of(find_chip('v5e')):.2g}"
    '1.5e+09'
    """
    kind = CHIPS[chip.name]
    return chip.peak / kind.cores / (2 * MXUS * kind.mxu**2)


def read_roofline(
    text: str, chip: Chip, bundles: Mapping[str, int] = MappingProxyType({})
) -> Roofline:
    """Return the time of a program on a chip, but for what it exchanges with others.

    Parameters
    ----------
    text : str
        Of a compiled program, such as `Report.text`.
    chip : course.tpu.Chip
        Its figures; how wide its MXU is, `CHIPS` says.
    bundles : dict[str, int]
        How many a run of an instruction takes, by its name. Without them, or where one is missing,
        only products and bytes count.
    """
    reader = _Reader(text, chip, bundles)
    return reader.run(reader.entry)


def seconds_by_kind(
    text: str, chip: Chip, bundles: Mapping[str, int] = MappingProxyType({})
) -> dict[str, float]:
    """Return the seconds of a program's roofline by kind of instruction.

    They are those of Pallas "kernels" and of what the compiler makes one of, those of instructions
    with "products", and those of all "others". Arguments are those of `read_roofline`.
    """
    reader = _Reader(text, chip, bundles)
    seconds = Counter(products=0.0, kernels=0.0, others=0.0)
    for each, computation, runs in reader.walk(reader.entry):
        instructions = reader.program[computation]
        multiplies = reader.flops(each, instructions)
        kind = "kernels" if KERNEL in each.line else "products" if multiplies else "others"
        seconds[kind] += runs * reader.cost(each, instructions).seconds
    return dict(seconds)


def count_instructions(text: str, chip: Chip) -> dict[str, int]:
    """Count the instructions of each kind that a run takes one after another."""
    counts = Counter()
    for each, runs in walk_instructions(text, chip):
        counts[each.kind] += runs
    return dict(counts)


def walk_instructions(text: str, chip: Chip) -> Iterator[tuple[Instruction, int]]:
    """Yield what a run takes one after another, and how often; of branches, the longest."""
    reader = _Reader(text, chip)
    for each, _, runs in reader.walk(reader.entry):
        if not re.fullmatch(FREE, each.kind):
            yield each, runs


def waiting_seconds(
    text: str,
    chip: Chip,
    bundles: Mapping[str, int],
    seconds_of: Callable[[str], float],
) -> float:
    """Return how long a chip waits in a run for what it exchanges with others.

    It may start an exchange and go on computing, until it needs what arrives. One exchange after
    another takes the links.

    Parameters
    ----------
    text, chip, bundles
        Those of `read_roofline`.
    seconds_of : callable
        From the lines of the program that start and end an exchange to the seconds that it takes.

    Raises
    ------
    NotImplementedError
        If an exchange goes on inside of a fusion, which is not followed here.
    """
    if START in text:
        raise NotImplementedError("An exchange goes on inside of a fusion: it is not counted here.")
    reader = _Reader(text, chip, bundles)
    ends = {}  # the lines that end an exchange, by the names of those that start it
    for instructions in reader.program.values():
        for each in instructions.values():
            if re.fullmatch(f"(?:{KINDS})-done", each.kind):
                ends[each.operands[0]] = each.line.strip()
    now = links_free = waiting = 0.0
    under_way = {}  # when an exchange has arrived, and how often it runs, by the name of its start
    for each, computation, runs in reader.walk(reader.entry):
        if re.fullmatch(f"(?:{KINDS})(?:-start)?", each.kind):
            lines = f"{each.line.strip()}\n{ends.get(each.name, '')}"
            links_free = max(now, links_free) + seconds_of(lines)
            under_way[each.name] = links_free, runs
        # What has no start of its own is waited for at once.
        name = each.operands[0] if each.kind.endswith("-done") else each.name
        if name in under_way and not each.kind.endswith("-start"):
            arrived, _ = under_way.pop(name)
            waits = max(0.0, arrived - now)
            waiting += runs * waits
            now += waits
        # A loop beside an exchange goes round more often than that runs.
        _, first = next(iter(under_way.values()), (0, runs))
        now += runs / first * reader.cost(each, reader.program[computation]).seconds
    return waiting


def read_instructions(lines: list[str]) -> dict[str, Instruction]:
    """Read a computation's instructions by their names."""
    found = {}
    for line in lines:
        match = INSTRUCTION.match(line)
        if match:
            name, result, kind, rest = match.groups()
            operands = tuple(re.findall(r"%([\w.-]+)", rest.split(")", 1)[0]))
            found[name] = Instruction(name, kind, read_arrays(result), operands, line)
    return found


def read_arrays(text: str) -> tuple[Array, ...]:
    """Read the arrays in a type.

    Examples
    --------
    >>> read_arrays("bf16[4096,64]{1,0:T(8,128)(2,1)}")[0].bytes == 4096 * 128 * 2
    True
    """
    found = []
    for dtype, sides, order, layout in ARRAY.findall(text):
        sides = tuple(int(side) for side in sides.split(",") if side)
        # From the slowest axis to the fastest: a tile fills up the last ones.
        physical = [sides[int(axis)] for axis in reversed(order.split(",")) if axis]
        physical = physical or list(sides)
        tile = re.search(r"T\(([\d,]+)\)", layout)
        if tile:
            size = [int(side) for side in tile[1].split(",")][-len(physical) or None :]
            for place, side in enumerate(reversed(size), 1):
                if place <= len(physical):
                    physical[-place] = side * math.ceil(physical[-place] / side)
        bits = int(re.sub(r"\D", "", dtype) or 8)
        size = bits * math.prod(physical) // 8
        found.append(Array(sides, size, memory_space(layout), dtype))
    return tuple(found)


class _Reader:
    def __init__(self, text: str, chip: Chip, bundles: Mapping[str, int] = MappingProxyType({})):
        self.chip = chip
        self.bundles = bundles
        self.tile = CHIPS[chip.name].mxu
        self.computations = read_computations(text)
        self.program = {name: read_instructions(lines) for name, lines in self.computations.items()}

    @property
    def entry(self) -> str:
        """The name of the whole program's computation, which is the last."""
        return list(self.program)[-1]

    def run(self, name: str) -> Roofline:
        """Return the time of a computation whose instructions run one after another."""
        total = Roofline()
        for each, computation, runs in self.walk(name):
            total += self.cost(each, self.program[computation]) * runs
        return total

    def walk(self, name: str, runs: int = 1) -> Iterator[tuple[Instruction, str, int]]:
        """Yield a run's instructions, in which computation they stand, and how often they run."""
        for each in self.program[name].values():
            if each.kind == "while":  # its condition compares two numbers
                body = re.search(r"body=%([\w.-]+)", each.line)[1]
                yield from self.walk(body, runs * rounds_of(each.line, self.computations))
            elif each.kind == "call":
                yield from self.walk(called_by(each.line)[0], runs)
            elif each.kind == "conditional":
                longest = max(called_by(each.line), key=lambda branch: self.run(branch).seconds)
                yield from self.walk(longest, runs)
            else:
                yield each, name, runs

    def cost(self, each: Instruction, instructions: dict[str, Instruction]) -> Roofline:
        """Return the time of one instruction, which is none if data are exchanged."""
        if re.fullmatch(f"{FREE}|{KINDS}", each.kind):
            return Roofline()
        multiplying = self.flops(each, instructions) / self.chip.peak
        size = self.bytes(each, instructions)
        moving = size / self.chip.bandwidth
        issuing = self.bundles.get(each.name, 0) / clock_of(self.chip)
        if issuing > max(multiplying, moving):
            return Roofline(issuing=issuing, bytes=size)
        if multiplying >= moving:
            return Roofline(multiplying=multiplying, bytes=size)
        return Roofline(moving=moving, bytes=size)

    def flops(self, each: Instruction, instructions: dict[str, Instruction]) -> float:
        """Count the operations of an instruction's products, once tiles are filled.

        Those of int8 count by the time that they take.
        """
        if each.kind == "convolution":
            # Of products of int8, sums are int32.
            rate = CHIPS[self.chip.name].int8_rate if each.result[0].dtype == "s32" else 1
            return filled_flops(each, instructions, self.tile) / rate
        if KERNEL in each.line:
            return attention_flops(each, instructions, self.tile)
        total = 0.0
        if each.kind == "fusion":
            for called in called_by(each.line):
                inner = self.program[called]
                total += sum(self.flops(inside, inner) for inside in inner.values())
        return total

    def bytes(self, each: Instruction, instructions: dict[str, Instruction]) -> int:
        """Count the bytes that an instruction reads from HBM, and those that it writes there."""
        total = 0
        inner = self.program[called_by(each.line)[0]] if each.kind == "fusion" else {}
        for number, operand in enumerate(each.operands):
            if operand not in instructions:
                continue
            result = instructions[operand].result
            size = sum(array.bytes for array in result if array.space == 0)
            if size and inner:
                size = min(size, self.read_by(inner, number))
            elif size and each.kind in ("dynamic-slice", "slice", "gather") and number == 0:
                size = min(size, sum(array.bytes for array in each.result))
            elif size and each.kind == "dynamic-update-slice" and number == 0:
                size = 0
            total += size
        return total + self.written(each, instructions, inner)

    def read_by(self, inner: dict[str, Instruction], number: int) -> float:
        """Count the bytes that a fused computation reads of one of its parameters."""
        for each in inner.values():
            if each.kind == "parameter" and f" parameter({number})" in each.line:
                return self.read_of(inner, each.name)
        return 0

    def read_of(self, inner: dict[str, Instruction], name: str) -> float:
        """Count the bytes that a fused computation reads of one of its values."""
        total = 0
        for each in inner.values():
            if name not in each.operands:
                continue
            place = each.operands.index(name)
            if each.kind in ("dynamic-slice", "slice", "gather") and place == 0:
                total += sum(array.bytes for array in each.result)
            elif each.kind == "bitcast":
                total += self.read_of(inner, each.name)
            elif each.kind == "fusion":
                total += self.read_by(self.program[called_by(each.line)[0]], place)
            elif each.kind == "dynamic-update-slice" and place == 0:
                continue  # what is not replaced stays where it is
            else:
                return math.inf
        return total

    def written(self, each, instructions, inner) -> int:
        """Count the bytes that an instruction writes to HBM."""
        size = sum(array.bytes for array in each.result if array.space == 0)
        if not size:
            return 0
        within = inner or {**instructions}
        updates = [each] if each.kind == "dynamic-update-slice" else []
        updates += [line for line in inner.values() if line.kind == "dynamic-update-slice"]
        for update in updates:
            if update.operands[1] in within:
                whole = sum(array.bytes for array in update.result)
                part = sum(array.bytes for array in within[update.operands[1]].result)
                size -= max(0, whole - part)
        return max(size, 0)


def filled_flops(each: Instruction, instructions: dict[str, Instruction], tile: int) -> float:
    """Count the operations of a convolution, see `Product.padded_flops`.

    The TPU compiler writes products of matrices as convolutions, also those of a batch: then each
    result along an axis has a place of the kernel of its own.
    """
    left, right = (instructions[name].result[0].sides for name in each.operands[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.line).groups()
    inputs = dict(zip(labels[0], left, strict=True))
    kernel = dict(zip(labels[1], right, strict=True))
    result = dict(zip(labels[2], each.result[0].sides, strict=True))
    axes = sorted(set(labels[2]) - {"b", "f"})
    number, rows = 1.0, result["b"]
    for axis, window in zip(axes, read_windows(each.line, len(axes)), strict=True):
        pairs = count_pairs(inputs[axis], kernel[axis], result[axis], window)
        if pairs == kernel[axis] == result[axis]:
            number *= pairs
        else:
            rows *= result[axis]
            number *= pairs / result[axis]
    product = Product(1, rows, kernel["i"], result["f"])
    return number * product.padded_flops(tile)


def attention_flops(each: Instruction, instructions: dict[str, Instruction], tile: int) -> float:
    """Count the operations of a kernel's two products: with keys, and with values.

    The text does not say what a kernel does. Those whose first three operands are queries, keys and
    values, each (heads, tokens, size), are for attention; others count nothing.
    """
    sides = [instructions[name].result[0].sides for name in each.operands[:3]]
    if len(sides) < 3 or len({len(each) for each in sides}) > 1 or len(sides[0]) < 3:
        return 0.0
    (*heads, queries, size), (*_, keys, _), (*_, width) = sides
    number = math.prod(heads)
    scores = Product(number, queries, size, keys)
    sums = Product(number, queries, keys, width)
    return scores.padded_flops(tile) + sums.padded_flops(tile)
