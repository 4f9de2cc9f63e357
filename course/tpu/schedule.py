"""In which order a compiled program works, and what it computes while devices exchange data.

It is read from the program's text, in which each computation is a block of lines, and a line is an
instruction. Instructions stand in the order in which the chip takes them.
"""

import re
from collections import defaultdict
from dataclasses import dataclass

CALLS = r"(?:calls|to_apply|condition|body|true_computation|false_computation)=%([\w.-]+)"
START = 'custom_call_target="AsyncCollectiveStart"'
DONE = 'custom_call_target="AsyncCollectiveDone"'


@dataclass(frozen=True)
class Schedule:
    """Floating-point operations of one run on each device, those of products of matrices only.

    Convolutions are such products, too. A loop's body counts as often as the loop goes round, where
    the compiler knows it.
    """

    flops: float  #: all of them
    #: those between the start and the end of an exchange that the chip need not wait for
    beside_exchange: float


def read_computations(text: str) -> dict[str, list[str]]:
    """The lines of each computation by its name; the last one is the whole program's."""
    found = {}
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            lines = found.setdefault(header[1], [])
        elif line.startswith("  "):
            lines.append(line)
    return found


def called_by(line: str) -> list[str]:
    """The computations that an instruction calls."""
    called = re.findall(CALLS, line)
    branches = re.search(r"branch_computations=\{([^}]*)\}", line)
    if branches:
        called += re.findall(r"%([\w.-]+)", branches[1])
    return called


def rounds_of(line: str, computations: dict[str, list[str]]) -> int:
    """How often an instruction runs what it calls: more than once if it is a loop.

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
    """The whole number that a constant is; None if it is none."""
    constant = re.search(rf"%{re.escape(name)} = .* constant\((\d+)\)", lines)
    return int(constant[1]) if constant else None


def count_runs(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs in one run of the program."""
    runs = defaultdict(int)
    runs[list(computations)[-1]] = 1
    for name in reversed(computations):  # a computation stands before those that call it
        for line in computations[name]:
            for called in called_by(line):
                runs[called] += runs[name] * rounds_of(line, computations)
    return runs


def read_schedule(text: str) -> Schedule:
    """How much a program for a TPU computes, and how much of it while devices exchange data."""
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
    return Schedule(flops.get(name, 0.0), beside.get(name, 0.0))


def exchanges_of(line: str, computations: dict[str, list[str]]) -> tuple[set[str], set[str]]:
    """The exchanges that an instruction starts, and those that it ends, by their names."""
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
    """Whether a pair of start and done is a collective's, and not a copy between memories."""
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|async"
    return bool(re.search(rf" (?:{kinds})-(?:start|done)\(", line))


def product_flops(line: str, shapes: dict[str, list[int]]) -> float:
    """Two for each pair of numbers that a convolution multiplies and adds.

    The TPU compiler writes products of matrices as convolutions. What would be multiplied by the
    padding is not counted.
    """
    output = shapes[re.match(r" +(?:ROOT )?%([\w.-]+) =", line)[1]]
    left, right = re.search(r" convolution\(%([\w.-]+), %([\w.-]+)\)", line).groups()
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line).groups()
    inputs = dict(zip(labels[0], shapes[left], strict=True))
    kernel = dict(zip(labels[1], shapes[right], strict=True))
    result = dict(zip(labels[2], output, strict=True))
    window = re.search(r"window=\{([^}]*)\}", line)
    settings = dict(part.split("=") for part in window[1].split()) if window else {}
    count = result["b"] * result["f"] * kernel["i"]
    for n, axis in enumerate(sorted(set(labels[2]) - {"b", "f"})):

        def setting(name: str, default: str, n: int = n) -> str:
            return settings[name].split("x")[n] if name in settings else default

        low = int(setting("pad", "0_0").split("_")[0])
        stride = int(setting("stride", "1"))
        dilate = int(setting("lhs_dilate", "1"))
        spread = int(setting("rhs_dilate", "1"))
        last = (inputs[axis] - 1) * dilate
        pairs = 0
        for place in range(result[axis]):
            for step in range(kernel[axis]):
                at = place * stride - low + step * spread
                pairs += 0 <= at <= last and at % dilate == 0
        count *= pairs
    return 2.0 * count
