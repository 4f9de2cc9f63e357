"""The schedule of a compiled program: how many bundles a chip takes for each of its instructions.

A TPU takes one bundle in a cycle, each with operations for its units, and the compiler has decided
all of it beforehand. It writes the bundles of each instruction into a file. An instruction goes
round a loop over its blocks, in which the next block is on its way while one is computed. Here
bundles are counted as often as they run, as if a chip never waited: neither for memory, nor for the
MXU, which may still have work from before.
"""

import base64
import os
import re
import tempfile
from collections import defaultdict
from pathlib import Path
from unittest import mock

import jax
from jaxlib.mlir import ir
from jaxlib.mosaic.python import tpu

from course.tpu.chips import Chip, tpu_devices
from course.tpu.compiler import compile_apart
from course.tpu.hlo import CALLS, called_by, read_computations
from course.tpu.pieces import Piece
from course.tpu.roofline import INSTRUCTION, KERNEL, walk_instructions

FILE = re.compile(r"\d+-(.+)-\d+-final_bundles\.txt")
PASS = "final_bundles"
NAME = re.compile(r"%[\w.-]+")


def lower_on_one(piece: Piece, chip: str, options: dict | None = None) -> jax.stages.Lowered:
    """Return a piece, lowered for one chip, with options for the compiler."""
    function = jax.jit(piece.function, compiler_options=options)
    with jax.default_device(tpu_devices(chip)[0]):
        return function.lower(*piece.arguments)


def compile_with_bundles(lowered: jax.stages.Lowered, chip: str) -> tuple[dict, dict[str, str]]:
    """Compile a lowered program, and return also the bundles of its instructions by their names.

    Returns
    -------
    tuple[dict, dict[str, str]]
        What `course.tpu.compiler.compile_apart` returns, and the texts, as the compiler writes
        them.
    """
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "xla_jf_dump_to": folder,
            "xla_jf_dump_hlo_text": "true",
            "xla_jf_dump_llo_text": "true",
            "xla_jf_dump_llo_pass_label_regex": PASS,
        }
        asked = os.environ.get("LIBTPU_INIT_ARGS", "").split()
        asked += [f"--{name}={value}" for name, value in flags.items()]
        with mock.patch.dict(os.environ, {"LIBTPU_INIT_ARGS": " ".join(asked)}):
            said = compile_apart(lowered, chip)
        texts = {}
        for path in sorted(Path(folder).iterdir()):
            name = FILE.fullmatch(path.name)
            if name:
                texts[name[1]] = path.read_text(encoding="utf-8")
    return said, texts


def count_bundles(text: str, blocks: int = 0) -> int:
    """Count the bundles that an instruction runs.

    Those of a loop count as often as it goes round, and once if the text does not say how often. A
    loop over blocks goes round once for each, and some more times, in which the first blocks only
    arrive, and the last ones leave.

    Parameters
    ----------
    text : str
        The instruction's bundles, as the compiler writes them.
    blocks : int
        If it is a kernel for attention: how many of keys there are for each block of queries. What
        a round may skip there, and has no product in it, runs with one of these blocks: it begins
        or ends the sums. Elsewhere a round skips nothing, but for those that compute nothing.
    """
    bundles = re.split(r"^(?=[ ]*(?:0x[0-9a-f]+|0) )", text, flags=re.M)[1:]
    starts = {}
    for number, bundle in enumerate(bundles):
        for region in re.findall(r"Start(?:/End empty)? region (\d+)\b", bundle):
            starts.setdefault(region, number)
    runs = [1.0] * len(bundles)
    for end, bundle in enumerate(bundles):
        back = re.search(r"sbr\.rel \(!(%\w+)\) target = \$region(\d+)", bundle)
        if not back or starts.get(back[2], end + 1) > end:
            continue
        start = starts[back[2]]
        loop = "".join(bundles[start : end + 1])
        test = re.findall(rf"{back[1]} = scmp\.ge\.s32\.totalorder %\w+, (\d+)\b", loop)
        if not test:
            continue
        # Of those that count blocks, the text says in which stage they are, out of how many.
        own = "".join(bundles[n] for n in range(start, end + 1) if runs[n] == 1)
        stages = [int(stage) for stage in re.findall(r"iteration index, stage = (\d+)", own)]
        rounds = int(test[-1]) - (2 * max(1, *stages) if stages else 0)
        once = skipped(bundles, start, end) if blocks else set()
        for inside in range(start, end + 1):
            runs[inside] *= rounds / blocks if inside in once else rounds
    return round(sum(runs))


def skipped(bundles: list[str], start: int, end: int) -> set[int]:
    """Return the bundles of a loop that a round may skip, and that have no product."""
    found = set()
    for number in range(start, end):
        for region in re.findall(r"sbr\.rel \(%.*?\) target = \$region(\d+)", bundles[number]):
            goal = re.compile(rf"Start(?:/End empty)? region {region}\b")
            stop = next(n for n in range(number + 1, end + 1) if goal.search(bundles[n]))
            if not any("vmatmul" in each for each in bundles[number + 1 : stop]):
                found.update(range(number + 1, stop))
    return found


def blocks_of_keys(line: str) -> int:
    """Return how many blocks of keys a kernel for attention has; 0 if it is no kernel.

    Parameters
    ----------
    line : str
        The kernel's instruction, with its ``backend_config``.
    """
    body = re.search(r'"body":"([A-Za-z0-9+/=]+)"', line)
    if not body:
        return 0
    code = base64.b64decode(body[1])
    if code.startswith(b"ML\xefR"):  # MLIR's bytecode: JAX's kernels
        with ir.Context() as context:
            tpu.register_dialect(context)
            context.allow_unregistered_dialects = True
            code = str(ir.Module.parse(code)).encode()
    bounds = re.search(rb"iteration_bounds = array<i64: ([\d, ]+)>", code)
    return int(bounds[1].split(b",")[-1]) if bounds else 0


def count_all(text: str, bundles: dict[str, str]) -> dict[str, int]:
    """Count the bundles of all instructions of a program, by their names.

    The compiler schedules what is the same once, and writes it for one of the instructions.

    Parameters
    ----------
    text : str
        Of the compiled program, with every ``backend_config``.
    bundles : dict[str, str]
        From `compile_with_bundles`.
    """
    computations = read_computations(text)
    alike = defaultdict(list)
    for lines in computations.values():
        types = {}
        for line in lines:
            found = INSTRUCTION.match(line)
            if found:
                name, result, _, rest = found.groups()
                types[name] = result
                operands = NAME.findall(rest.split(")", 1)[0])
                operand_types = [types.get(each[1:], "") for each in operands]
                alike[form_of([line], computations), *operand_types].append((name, line))
    counted = {}
    for group in alike.values():
        for name, line in group:
            if name in bundles:
                number = count_bundles(bundles[name], blocks_of_keys(line))
                counted |= {each: number for each, _ in group}
                break
    return counted


def count_kernels(text: str, chip: Chip, counted: dict[str, int]) -> int:
    """Count the bundles of all kernels in a run, of which the compiler expects no cycles.

    Parameters
    ----------
    text : str
        Of the compiled program.
    chip : course.tpu.Chip
        For which it was compiled.
    counted : dict[str, int]
        From `count_all`.

    Raises
    ------
    RuntimeError
        If the compiler wrote no bundles of a kernel.
    """
    total = 0
    for each, runs in walk_instructions(text, chip):
        if KERNEL in each.line:
            if each.name not in counted:
                raise RuntimeError(f"The compiler wrote no bundles of the kernel {each.name}.")
            total += runs * counted[each.name]
    return total


def form_of(lines: list[str], computations: dict[str, list[str]]) -> str:
    """Return instructions with what they call, and without their names and the compiler's notes."""
    form = []
    numbers = {}
    for line in lines:
        line = re.sub(r", (?:metadata|backend_config|frontend_attributes)=.*", "", line.strip())
        called = [form_of(computations[each], computations) for each in called_by(line)]
        line = re.sub(CALLS, "", line)
        line = NAME.sub(lambda name: f"%{numbers.setdefault(name[0], len(numbers))}", line)
        form += [line, *called]
    return "\n".join(form)
