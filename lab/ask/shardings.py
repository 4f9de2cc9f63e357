"""A step of Stable Diffusion XL over the eight chips of a v5e-8, split in different ways.

It has 1024 × 1024 pixels and bfloat16. Each answer takes two to five minutes on two cores.
"""

from course.tpu.programs import make_program
from course.tpu.splits import CONTEXT, DATA, FULLY_SHARDED, TENSOR, Way, ask_way

# By what chapter 9 calls them, each with the images that all chips draw at a time.
WAYS = {
    "data": (Way(DATA, images=8), 8),
    # XL has 10 and 20 heads, which neither 4 nor 8 divide: so two chips share an image.
    "tensor": (Way(TENSOR, images=4, share=2), 4),
    "fully sharded": (Way(FULLY_SHARDED, images=8), 8),
    "sequence": (Way(CONTEXT, share=8), 1),
}


def questions(rows: list[dict]) -> list[dict]:
    return [{"way": way} for way in WAYS]


def answer(way: str) -> dict:
    split, images = WAYS[way]
    program = make_program("sdxl", "v5e", batch=images, attention="plain")
    return ask_way(program, guided=True, way=split)
