"""Attention on one chip by three kernels: the compiler's own, and JAX's, flash and splash.

The compiler expects no cycles of a kernel, as it does of its other instructions, so its bundles are
counted, see ``lab/ask/schedules.py``. It takes some minutes.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax

from course.model.attention import block_sizes, flash_kernel, plain
from course.tpu.pieces import Piece
from course.tpu.roofline import KERNEL
from lab.ask.int8 import count_cycles
from lab.ask.schedules import compile_with_bundles, count_bundles, lower_on_one

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
    lowered = lower_on_one(Piece(function, (shape, shape, shape)), chip)
    said, bundles = compile_with_bundles(lowered, chip)
    (line,) = (line for line in said["text"].splitlines() if KERNEL in line)
    name = re.search(r"%([\w.-]+) = ", line)[1]
    tokens = shape.shape[1]
    return {
        "cycles": count_bundles(bundles[name], math.ceil(tokens / keys(tokens))),
        "others": sum(count_cycles(said["text"]).values()),
    }
