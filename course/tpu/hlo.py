"""What stands in the text of a compiled program, in HLO, the compiler's language.

Each computation is a block of lines, and a line is an instruction. Instructions stand in the order
in which the chip takes them. Read here are what devices exchange, what is copied from one memory to
another, and what a chip computes while data is under way.
"""

import math
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import jax

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
CALLS = r"(?:calls|to_apply|condition|body|true_computation|false_computation)=%([\w.-]+)"
START = 'custom_call_target="AsyncCollectiveStart"'
DONE = 'custom_call_target="AsyncCollectiveDone"'


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices exchange data."""

    kind: str  #: such as ``all-reduce``
    bytes: int  #: of its result on one device
    #: where in the Python program it comes from, by the compiler; empty if it does not say
    origin: str
    runs: int = 1  #: how often it runs in a run of the program, where the compiler knows it
    is_async: bool = False  #: whether the device goes on computing in the meantime
    chips: int | None = None  #: how many exchange with one another; None if the text does not say
    direction: int = 0  #: of a collective-permute, see `direction_of`


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


@dataclass(frozen=True)
class Overlap:
    """Floating-point operations of one run on each device, those of products of matrices only.

    Convolutions are such products, too. A loop's body counts as often as the loop goes round, where
    the compiler knows it.
    """

    flops: float  #: all of them
    #: those between the start and the end of an exchange that the chip need not wait for
    beside_exchange: float


# What every reader needs: computations, how often each runs, and the bytes of arrays


def read_computations(text: str) -> dict[str, list[str]]:
    """Read the lines of each computation by its name; the last one is the whole program's."""
    computations = {}
    # What JAX notes of a kernel has line breaks.
    text = re.sub(r"(?<=kernel_metadata=\{)\n(.*)\n(?=\}\})", r"\1", text)
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            lines = computations.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return computations


def called_by(line: str) -> list[str]:
    """List the computations that an instruction calls."""
    called = re.findall(CALLS, line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    if branches:
        called += re.findall(r"%([\w.-]+)", branches[1])
    return called


def rounds_of(line: str, computations: dict[str, list[str]]) -> int:
    """Return how often an instruction runs what it calls: more than once if it is a loop.

    The loops of ``jax.lax.scan``, and those that the compiler makes, count up from 0 to a constant.
    Where a loop is none of these, it counts as if it went round once.
    """
    loop = re.search(r" while\(.*condition=%([\w.-]+), body=%([\w.-]+)", line)
    if not loop:
        return 1
    condition = "\n".join(computations.get(loop[1], ()))
    body = "\n".join(computations.get(loop[2], ()))
    compared = re.search(r" compare\(%([\w.-]+), %([\w.-]+)\), direction=LT", condition)
    if not compared:
        return 1
    end = constant_of(compared[2], condition)
    place = re.search(rf"%{re.escape(compared[1])} = .* index=(\d+)", condition)
    if end is None or not place:
        return 1
    # By how much the body counts up: by 1, or by 2 where the compiler unrolled the loop.
    result = re.search(r"ROOT .* tuple\((.*?)\)", body)
    counter = re.findall(r"%([\w.-]+)", result[1])[int(place[1])]
    added = re.search(rf"%{re.escape(counter)} = .* add\(%[\w.-]+, %([\w.-]+)\)", body)
    step = constant_of(added[1], body) if added else None
    return end // (step or 1)


def constant_of(name: str, lines: str) -> int | None:
    """Return the whole number that a constant is; None if it is none."""
    constant = re.search(rf"%{re.escape(name)} = .* constant\((\d+)\)", lines)
    return int(constant[1]) if constant else None


def count_runs(computations: dict[str, list[str]]) -> dict[str, int]:
    """Count how often each computation runs in one run of the program."""
    runs = defaultdict(int)
    runs[list(computations)[-1]] = 1
    for name in reversed(computations):  # a computation stands before those that call it
        for line in computations[name]:
            for called in called_by(line):
                runs[called] += runs[name] * rounds_of(line, computations)
    return runs


def array_bytes(text: str) -> int:
    """Count the bytes of all arrays in a piece of a program's text, such as bf16[2,1024,1280].

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


# What devices exchange


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
    collectives = []
    started = {}  # lines that start one, which say what their ends do not, by their names
    for name, lines in computations.items():
        for line in lines:
            start = re.match(r" *(?:ROOT )?%([\w.-]+) = .*-start\(", line)
            if start:
                started[start[1]] = line
            # An accelerator may start an instruction and go on: then the "done" has the result.
            instruction = re.search(rf" = (.*?) ({KINDS})(-done)?\(", line)
            if not instruction:
                continue
            result, kind, done = instruction.groups()
            channel = re.search(r"channel_id=(\d+)", line)
            if name not in starting and channel and channel[1] in channels:
                continue
            origin = re.search(r'op_name="([^"]*)"', line)
            start = re.search(r"-done\(%([\w.-]+)", line)
            details = started.get(start[1], line) if start else line
            collectives.append(
                Collective(
                    kind,
                    array_bytes(result),
                    origin[1] if origin else "",
                    runs=runs[name],
                    is_async=bool(done) or name in starting,
                    chips=group_size(details),
                    direction=direction_of(details),
                )
            )
    return collectives


def group_size(line: str) -> int | None:
    """Read how many devices exchange with one another by a collective; None if it does not say.

    Its groups are written out, or as how many there are, and of how many devices.

    Examples
    --------
    >>> group_size("all-gather(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}")
    4
    >>> group_size("all-reduce(%x), replica_groups=[4,2]<=[8], to_apply=%add")
    2
    """
    written = re.search(r"replica_groups=\{\{([\d,]+)\}", line)
    if written:
        return len(written[1].split(","))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", line)
    return int(counted[1]) if counted else None


def direction_of(line: str) -> int:
    """Read which way round devices pass pieces on by a collective-permute.

    It is 1 if most pass to the next one, -1 if most pass to the one before, and 0 if neither is so,
    or the line does not say.

    Examples
    --------
    >>> direction_of("collective-permute(%x), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}")
    1
    """
    listed = re.search(r"source_target_pairs=\{(\{.*?\})\}", line)
    if not listed:
        return 0
    steps = Counter()
    for source, target in re.findall(r"\{(\d+),(\d+)\}", listed[1]):
        steps[int(target) - int(source)] += 1
    for direction in (1, -1):
        if 2 * steps[direction] > steps.total():
            return direction
    return 0


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Count how many collectives of each kind a program has, see `find_collectives`."""
    counts = Counter(collective.kind for collective in find_collectives(compiled))
    return dict(sorted(counts.items()))


# What is copied


def read_copies(text: str) -> list[Copy]:
    """List what a compiled program copies between memories, what is most bytes first.

    A slice that is fetched by itself is a copy, too.
    """
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
    copies = []
    for (name, origin, target), number in counts.items():
        copies.append(Copy(name, array_bytes(name), origin, target, number))
    return sorted(copies, key=lambda copy: copy.number * copy.bytes, reverse=True)


def memory_space(layout: str | None) -> int:
    """Read the memory space in an array's layout, such as ``1,0:T(8,128)(2,1)S(1)``."""
    space = re.search(r"S\((\d+)\)", layout or "")
    return int(space[1]) if space else 0


# What is computed while devices exchange


def read_overlap(text: str) -> Overlap:
    """Count what a program for a TPU computes, and how much of it while devices exchange data."""
    computations = read_computations(text)
    name = None
    flops = {}  # of a computation, with all that it calls
    beside = {}  # of these, those beside an exchange
    for name, lines in computations.items():
        shapes = {}
        under_way = set()  # exchanges that have started
        flops[name] = 0.0
        beside[name] = 0.0
        for line in lines:
            instruction = re.match(r" +(?:ROOT )?%([\w.-]+) = \(?\w+\[([\d,]*)\]", line)
            if instruction:
                shapes[instruction[1]] = [int(size) for size in instruction[2].split(",") if size]
            started, ended = exchanges_of(line, computations)
            under_way |= started
            under_way -= ended
            called = called_by(line)
            rounds = rounds_of(line, computations)
            here = rounds * sum(flops.get(each, 0) for each in called)
            if " convolution(" in line:
                here += product_flops(line, shapes)
            flops[name] += here
            if under_way:
                beside[name] += here
            else:
                beside[name] += rounds * sum(beside.get(each, 0) for each in called)
    return Overlap(flops.get(name, 0.0), beside.get(name, 0.0))


def exchanges_of(line: str, computations: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    """Return the exchanges that an instruction starts, and those that it ends, by their names."""
    started = set()
    ended = set()
    pair = re.match(r" +(?:ROOT )?%([\w.-]+) = .* [\w-]+-(start|done)\(%([\w.-]+)", line)
    if pair and is_exchange(line):
        if pair[2] == "start":
            started.add(pair[1])
        else:
            ended.add(pair[3])
    # Most are fused with what the chip computes in the meantime: the first, some, and the last of
    # these fusions have the exchange in them, always on the same channel.
    if " fusion(" in line:
        for called in called_by(line):
            lines = "\n".join(computations.get(called, ()))
            channels = set(re.findall(r"channel_id=(\d+)", lines))
            if START in lines:
                started |= channels
            if DONE in lines:
                ended |= channels
    return started, ended


def is_exchange(line: str) -> bool:
    """Say whether a pair of start and done is a collective's, and not a copy between memories."""
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|async"
    return bool(re.search(rf" (?:{kinds})-(?:start|done)\(", line))


def product_flops(line: str, shapes: dict[str, list[int]]) -> float:
    """Count two for each pair of numbers that a convolution multiplies and adds.

    The TPU compiler writes products of matrices as convolutions. What would be multiplied by the
    padding is not counted.
    """
    output = shapes[re.match(r" +(?:ROOT )?%([\w.-]+) =", line)[1]]
    left, right = re.search(r" convolution\(%([\w.-]+), %([\w.-]+)\)", line).groups()
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line).groups()
    inputs = dict(zip(labels[0], shapes[left], strict=True))
    kernel = dict(zip(labels[1], shapes[right], strict=True))
    result = dict(zip(labels[2], output, strict=True))
    axes = sorted(set(labels[2]) - {"b", "f"})  # those along which the kernel slides
    count = result["b"] * result["f"] * kernel["i"]
    for axis, window in zip(axes, read_windows(line, len(axes)), strict=True):
        count *= count_pairs(inputs[axis], kernel[axis], result[axis], window)
    return 2.0 * count


class Window(NamedTuple):
    """How a convolution's kernel slides along one axis, as a program's text says it."""

    padding: int = 0  # before the first number
    stride: int = 1
    input_dilation: int = 1  # how far the input's numbers are apart, with zeros between them
    kernel_dilation: int = 1  # how far the numbers are apart that the kernel reads


def read_windows(line: str, axes: int) -> list[Window]:
    """Read how a convolution slides along each of so many axes.

    Examples
    --------
    >>> read_windows("window={size=3x3 stride=2x2 pad=1_1x0_1}", 2)[1]
    Window(padding=0, stride=2, input_dilation=1, kernel_dilation=1)
    """
    window = re.search(r"window=\{([^}]*)\}", line)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    windows = []
    for axis in range(axes):
        along = {name: text.split("x")[axis] for name, text in settings.items()}
        windows.append(
            Window(
                padding=int(along.get("pad", "0_0").split("_")[0]),
                stride=int(along.get("stride", 1)),
                input_dilation=int(along.get("lhs_dilate", 1)),
                kernel_dilation=int(along.get("rhs_dilate", 1)),
            )
        )
    return windows


def count_pairs(inputs: int, kernel: int, result: int, window: Window) -> int:
    """Count the numbers of an input that a kernel meets along one axis, in all of its places."""
    end = (inputs - 1) * window.input_dilation
    pairs = 0
    for place in range(result):
        for step in range(kernel):
            at = place * window.stride - window.padding + step * window.kernel_dilation
            pairs += 0 <= at <= end and at % window.input_dilation == 0
    return pairs
