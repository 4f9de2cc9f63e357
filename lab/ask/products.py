"""The matrix products and convolutions of each part of the models, one image at a time.

They are counted in JAX's trace, where it is known how often a loop goes round. Nothing is compiled.
"""

import dataclasses

from course.tpu.jaxpr import find_products
from course.tpu.pieces import take_piece
from course.tpu.programs import PARTS, STEP, make_program
from lab.ask import flux2


def questions(rows: list[dict]) -> list[dict]:
    asked = [{"model": model, "part": part} for model in ("sd", "sdxl") for part in PARTS]
    asked += [{"model": "flux2", "part": part} for part in flux2.PARTS]
    return [*asked, {"model": "flux2-9b", "part": "step"}]


def answer(model: str, part: str) -> dict:
    if model == "flux2":
        piece = flux2.take_part(part)
    else:
        piece = take_piece(make_program(model), STEP if part == "step" else part)
    found = find_products(piece.function, *piece.arguments)
    rows = [dataclasses.asdict(product) | {"count": count} for product, count in found.items()]
    return {"products": rows}
