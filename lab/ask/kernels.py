"""Attention on one chip by three kernels: the compiler's own, and JAX's, flash and splash.

The compiler expects no cycles of a kernel, as it does of its other instructions, so its bundles are
counted, see ``lab/ask/schedules.py``. Asked is attention by itself, and a step of FLUX.2-klein-4B
with the compiler's kernel and with splash, which comes first there. An answer about attention takes
some seconds, and one about a step some minutes on quiet cores.
"""

import functools
import itertools

import jax

from course import flux2
from course.model.attention import flash_kernel, plain, splash
from course.tpu.chips import find_chip
from course.tpu.pieces import Piece, flux2_step
from course.tpu.programs import STEP, make_program
from lab.ask.int8 import count_cycles
from lab.ask.rooflines import schedule_of
from lab.ask.schedules import compile_with_bundles, count_all, count_kernels, lower_on_one

SHAPES = {  # of queries, keys and values
    "flux2": (1, 4608, 24, 128),
    "sdxl": (2, 4096, 10, 64),  # with guidance, where pixels are most
}
KERNELS = {"compiler": plain, "flash": flash_kernel, "splash": splash}
CHIPS = ("v5e", "v6e")
ATTENTION = "attention"


def questions(rows: list[dict]) -> list[dict]:
    asked = list(itertools.product(SHAPES, CHIPS, KERNELS, [ATTENTION]))
    asked += itertools.product(["flux2"], CHIPS, ["compiler", "splash"], [STEP])
    return [dict(zip(("model", "chip", "kernel", "part"), each, strict=True)) for each in asked]


def answer(model: str, chip: str, kernel: str, part: str) -> dict:
    function = KERNELS[kernel]
    if part == STEP:
        velocity = functools.partial(flux2.velocity, attend=function)
        program = make_program(model, chip, attention="automatic")
        lowered = lower_on_one(flux2_step(program, velocity), chip)
        return schedule_of(*compile_with_bundles(lowered, chip), chip, chips=1)
    shape = jax.ShapeDtypeStruct(SHAPES[model], "bfloat16")
    lowered = lower_on_one(Piece(function, (shape, shape, shape)), chip)
    said, bundles = compile_with_bundles(lowered, chip)
    text = said["text"]
    return {
        "cycles": count_kernels(text, find_chip(chip), count_all(text, bundles)),
        "others": sum(count_cycles(text).values()),
    }
