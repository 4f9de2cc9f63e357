"""Record the chapters' questions to the TPU compiler: ``python -m benchmarks.record_questions``.

Where the compiler cannot be asked, chapters 8 and 12 show these answers. It takes two minutes. A
test runs the chapters without the compiler, and so finds a question that is missing here.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp

from benchmarks.common import FOLDER, write_json
from course.sd import ATTENTION
from course.tpu.compiler import ask_compiler
from course.tpu.records import question_of


def feed_forward(x, up, down):
    """What each transformer block has, here with SDXL's 1280 channels."""
    hidden = jax.nn.gelu(x @ up)
    return hidden @ down


def add_one(x):
    return x + 1


def ten_times(x):
    return jax.lax.fori_loop(0, 10, lambda i, power: power @ x, x)


def wide_softmax(query, key, value):
    """Plain attention with a softmax in float32."""
    query = (query * query.shape[-1] ** -0.5).swapaxes(1, 2)
    scores = query @ key.swapaxes(1, 2).swapaxes(2, 3)
    weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(value.dtype)
    return (weights @ value.swapaxes(1, 2)).swapaxes(1, 2)


def scale_later(query, key, value):
    """Plain attention that scales the scores in place of the queries."""
    scores = query.swapaxes(1, 2) @ key.swapaxes(1, 2).swapaxes(2, 3)
    weights = jax.nn.softmax(scores * query.shape[-1] ** -0.5).astype(value.dtype)
    return (weights @ value.swapaxes(1, 2)).swapaxes(1, 2)


def other_axes(query, key, value):
    """Plain attention with the order of axes that ``einsum`` makes."""
    query = query * query.shape[-1] ** -0.5
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value)


def shape(*sides: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, dtype)


def questions() -> list[tuple]:
    """Functions, each with its arguments."""
    found = [
        (jnp.matmul, shape(4096, 4096), shape(4096, 4096)),
        (ten_times, shape(4096, 4096)),
        (add_one, shape(2**17, 2**17, dtype=jnp.float32)),
    ]
    for rows in (1024, 16, 244, 260):
        found.append((feed_forward, shape(rows, 1280), shape(1280, 5120), shape(5120, 1280)))
    heads = shape(2, 4096, 10, 64)
    for attention in (*ATTENTION.values(), wide_softmax, scale_later, other_axes):
        found.append((attention, heads, heads, heads))
    return found


def main() -> int:
    jax.config.update("jax_platforms", "cpu")
    content = {}
    for function, *arguments in questions():
        report = ask_compiler(function, *arguments, keep_text=True)
        content[question_of(function, *arguments)] = dataclasses.asdict(report)
    write_json(FOLDER / "questions.json", content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
