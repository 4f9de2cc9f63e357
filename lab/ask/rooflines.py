"""A step of published runs, instruction by instruction, for ``course.tpu.roofline``.

Over eight chips it is split by Ulysses, as that run was. An answer takes minutes.
"""

import dataclasses

import jax

from course.tpu import splits
from course.tpu.compiler import ask_compiler
from course.tpu.exchange import least_seconds
from course.tpu.pieces import take_piece
from course.tpu.programs import STEP, make_program
from course.tpu.records import add_up
from course.tpu.roofline import count_instructions, read_roofline

RUNS = (("flux2", "v6e", 8, 1), ("flux2", "v6e", 1, 4))


def questions(rows: list[dict]) -> list[dict]:
    return [dict(zip(("model", "chip", "chips", "batch"), run, strict=True)) for run in RUNS]


def answer(model: str, chip: str, chips: int, batch: int) -> dict:
    program = make_program(model, chip, batch=batch)
    if chips == 1:
        piece = take_piece(program, STEP)
        report = ask_compiler(piece.function, *piece.arguments, chip=chip, keep_text=True)
    else:
        way = splits.Way("Ulysses", share=chips)
        mesh = splits.make_mesh(chip, way.mesh)
        step = splits.place_step(program, False, way, mesh)
        function = jax.jit(step.function, out_shardings=step.output)
        with jax.set_mesh(mesh):
            report = ask_compiler(function, *step.arguments, chip=chip, keep_text=True)
    found = read_roofline(report.text, report.chip)
    # What a chip waits for: nothing else is computed beside these exchanges.
    waits = add_up(each for each in report.collectives if not each.is_async)
    exchanging = least_seconds(waits, chip, chips) if waits else 0.0
    counts = count_instructions(report.text, report.chip)
    return dataclasses.asdict(found) | {"exchanging": exchanging, "instructions": counts}
