"""A step of published runs, instruction by instruction, for ``course.tpu.roofline``.

Over eight chips it is split by Ulysses, as those runs were. Of Stable Diffusion XL on a v4 there is
the decoder as well, as an image takes twenty steps and one decoder. An answer about FLUX.2-klein
takes minutes, and one about XL up to an hour.
"""

import dataclasses

import jax

from course.tpu import splits
from course.tpu.chips import find_chip
from course.tpu.exchange import least_seconds
from course.tpu.hlo import read_collectives
from course.tpu.pieces import take_piece
from course.tpu.programs import DECODER, STEP, make_program
from course.tpu.records import add_up
from course.tpu.roofline import (
    count_instructions,
    read_roofline,
    seconds_by_kind,
    waiting_seconds,
)
from lab.ask.int8 import count_cycles
from lab.ask.schedules import compile_with_bundles, count_all, count_kernels, lower_on_one

RUNS = (
    ("flux2", "v6e", 8, 1, STEP),
    ("flux2", "v6e", 1, 4, STEP),
    ("flux2-9b", "v6e", 8, 1, STEP),
    ("flux2-9b", "tpu7x", 1, 4, STEP),
    ("sdxl", "v5e", 1, 1, STEP),
    ("sdxl", "v6e", 1, 1, STEP),
    ("sdxl", "v4", 1, 1, STEP),
    ("sdxl", "v4", 1, 1, DECODER),
)
ASKED = ("model", "chip", "chips", "batch", "part")


def questions(rows: list[dict]) -> list[dict]:
    return [dict(zip(ASKED, run, strict=True)) for run in RUNS]


def answer(model: str, chip: str, chips: int, batch: int, part: str) -> dict:
    lowered = lower_run(model, chip, chips, batch, part)
    return schedule_of(*compile_with_bundles(lowered, chip), chip, chips)


def lower_run(
    model: str, chip: str, chips: int, batch: int, part: str, options: dict | None = None
) -> jax.stages.Lowered:
    """Return a part of a run, lowered for the chips, with options for the compiler."""
    program = make_program(model, chip, batch=batch, attention="automatic")
    if chips == 1:
        return lower_on_one(take_piece(program, part), chip, options)
    way = splits.Way("Ulysses", share=chips)
    mesh = splits.make_mesh(chip, way.mesh)
    step = splits.place_step(program, False, way, mesh)
    function = jax.jit(step.function, out_shardings=step.output, compiler_options=options)
    with jax.set_mesh(mesh):
        return function.lower(*step.arguments)


def schedule_of(said: dict, bundles: dict[str, str], chip: str, chips: int) -> dict:
    """Return a program's roofline with bundles, and what else says how long it takes.

    Raises
    ------
    RuntimeError
        If the compiler refused the program: what it said.
    """
    if "refused" in said:
        raise RuntimeError(said["refused"])
    text, figures = said["text"], find_chip(chip)
    counted = count_all(text, bundles)
    found = read_roofline(text, figures, counted)

    def seconds_of(lines: str) -> float:
        return least_seconds(add_up(read_collectives(lines)), chip, chips)

    return dataclasses.asdict(found) | {
        "chip": dataclasses.asdict(figures),
        "exchanging": waiting_seconds(text, figures, counted, seconds_of),
        "without bundles": dataclasses.asdict(read_roofline(text, figures)),
        "expected cycles": count_cycles(text) | {"kernels": count_kernels(text, figures, counted)},
        "instructions": count_instructions(text, figures),
        "seconds": seconds_by_kind(text, figures, counted),
        "compile_seconds": round(said["seconds"], 1),
    }
