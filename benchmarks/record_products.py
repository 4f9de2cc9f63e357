"""Record the matrix products of the pipelines: ``python -m benchmarks.record_products``.

It traces each part of Stable Diffusion 1.4's and XL's pipelines, compiles nothing, and writes what
it finds to ``benchmarks/products.json``, in half a minute. Then it prints what the products would
take on the chips with published times, if each filled the tiles of the matrix unit.
"""

import dataclasses
import sys

import jax

from benchmarks.common import FOLDER, origin, write_json
from course.tpu.pieces import take_piece
from course.tpu.products import find_products
from course.tpu.programs import PARTS, Program, make_program
from course.tpu.records import table_of_published
from helpers import quiet_warnings


def find_rows(program: Program) -> dict[str, list[dict]]:
    """Return the products of each part of a pipeline, as they stand in the record."""
    found = {}
    for part in PARTS:
        piece = take_piece(program, part)
        rows = []
        for product, count in find_products(piece.function, *piece.arguments).items():
            rows.append(dataclasses.asdict(product) | {"count": count})
        found[part] = rows
    return found


def main() -> int:
    quiet_warnings()
    jax.config.update("jax_platforms", "cpu")
    models = {model: find_rows(make_program(model)) for model in ("sd", "sdxl")}
    content = origin("jax", "flax", "diffusers", "transformers") | {"models": models}
    write_json(FOLDER / "products.json", content)
    print(table_of_published())
    return 0


if __name__ == "__main__":
    sys.exit(main())
