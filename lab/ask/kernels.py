"""Attention on one chip by three kernels: the compiler's own, and JAX's, flash and splash.

The compiler expects no cycles of a kernel, as it does of its other instructions. But it writes down
the bundles of instructions that a chip takes, one in a cycle, if it never waits for memory. Here
they are counted as often as they run. It takes some minutes.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import jax

from course.model.attention import block_sizes, flash_kernel, plain
from course.tpu.chips import tpu_devices
from course.tpu.compiler import compile_apart
from course.tpu.roofline import KERNEL
from lab.ask.int8 import count_cycles

BLOCK = 512  # queries, which all three have on the chip at a time
SHAPES = {  # of queries, keys and values
    "flux2": (1, 4608, 24, 128),
    "sdxl": (2, 4096, 10, 64),  # with guidance, where pixels are most
}


def splash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Run JAX's splash attention, with a mask that hides nothing."""
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # slow to import

    _, tokens, heads, size = query.shape
    mask = pallas.MultiHeadMask([pallas.FullMask((tokens, tokens))] * heads)
    blocks = pallas.BlockSizes(block_q=BLOCK, block_kv=BLOCK)
    kernel = pallas.make_splash_mha_single_device(mask, block_sizes=blocks)
    query = (query * size**-0.5).swapaxes(1, 2)
    return jax.vmap(kernel)(query, key.swapaxes(1, 2), value.swapaxes(1, 2)).swapaxes(1, 2)


class Kernel(NamedTuple):
    """A function with a kernel, and how many keys that has on the chip at a time."""

    function: Callable
    keys: Callable[[int], int]


KERNELS = {
    "compiler": Kernel(plain, lambda tokens: BLOCK),
    "flash": Kernel(flash_kernel, lambda tokens: block_sizes(tokens, limit=BLOCK)[1]),
    "splash": Kernel(splash, lambda tokens: BLOCK),
}


def questions(rows: list[dict]) -> list[dict]:
    return [
        {"model": model, "chip": chip, "kernel": kernel}
        for model in SHAPES
        for chip in ("v5e", "v6e")
        for kernel in KERNELS
    ]


def answer(model: str, chip: str, kernel: str) -> dict:
    function, keys = KERNELS[kernel]
    shape = jax.ShapeDtypeStruct(SHAPES[model], "bfloat16")
    with jax.default_device(tpu_devices(chip)[0]):
        lowered = jax.jit(function).lower(shape, shape, shape)
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "xla_jf_dump_to": folder,
            "xla_jf_dump_hlo_text": "true",
            "xla_jf_dump_llo_text": "true",
            "xla_jf_dump_llo_pass_label_regex": "final_bundles",
        }
        asked = os.environ.get("LIBTPU_INIT_ARGS", "").split()
        asked += [f"--{name}={value}" for name, value in flags.items()]
        with mock.patch.dict(os.environ, {"LIBTPU_INIT_ARGS": " ".join(asked)}):
            said = compile_apart(lowered, chip)
        (line,) = (line for line in said["text"].splitlines() if KERNEL in line)
        name = re.search(r"%([\w.-]+) = ", line)[1]
        (file,) = Path(folder).glob(f"*-{name}-[0-9][0-9]-final_bundles.txt")
        bundles = file.read_text(encoding="utf-8")
    tokens = shape.shape[1]
    return {
        "cycles": count_bundles(bundles, math.ceil(tokens / keys(tokens))),
        "others": sum(count_cycles(said["text"]).values()),
    }


def count_bundles(text: str, blocks: int) -> int:
    """Count the bundles that a kernel runs.

    Those of its loop, which goes round once for each block of queries with each block of keys. What
    a round may skip, and has no product in it, runs with one of the blocks of keys: it begins or
    ends the sums.

    Parameters
    ----------
    text : str
        The kernel's bundles, as the compiler writes them.
    blocks : int
        Of keys, for each block of queries.
    """
    bundles = re.split(r"^(?=[ ]*0x[0-9a-f]+ )", text, flags=re.M)[1:]
    (begin,) = (n for n, each in enumerate(bundles) if re.match(r" *0x[0-9a-f]+ +LB:", each))
    (test,) = (n for n, each in enumerate(bundles) if "loop exit test" in each)
    end = next(n for n in range(test, len(bundles)) if "sbr.rel" in bundles[n])
    # Two more, in which blocks are only read or written.
    rounds = int(re.search(r", (\d+) /\* loop exit test", bundles[test])[1]) - 2
    once = 0
    for start in range(begin, end):
        for region in re.findall(r"sbr\.rel \(.*?\) target = \$region(\d+)", bundles[start]):
            goal = re.compile(rf"Start(?:/End empty)? region {region}\b")
            stop = next(n for n in range(start + 1, end + 1) if goal.search(bundles[n]))
            if not any("vmatmul" in each for each in bundles[start + 1 : stop]):
                once += stop - start - 1
    always = end + 1 - begin - once
    return rounds * always + rounds // blocks * once
