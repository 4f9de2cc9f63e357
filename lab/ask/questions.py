"""The questions of chapters 8 and 12, whose answers they show where nobody can ask the compiler.

It takes two minutes. A test runs the chapters without the compiler, and so finds a question that is
missing here.
"""

import jax
import jax.numpy as jnp

from course.sd import ATTENTION
from course.tpu import ask_compiler
from course.tpu.records import answer_of, question_of


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


def calls() -> dict[str, tuple]:
    """Return functions, each with its arguments, by what they are called in the record."""
    found = [
        (jnp.matmul, shape(4096, 4096), shape(4096, 4096)),
        (ten_times, shape(4096, 4096)),
        (add_one, shape(2**17, 2**17, dtype=jnp.float32)),
    ]
    for rows in (1024, 16, 244, 260):
        found.append((feed_forward, shape(rows, 1280), shape(1280, 5120), shape(5120, 1280)))
    heads = shape(2, 4096, 10, 64)
    of_the_model = (ATTENTION[name] for name in ("plain", "dot_product", "flash"))
    for attention in (*of_the_model, wide_softmax, scale_later, other_axes):
        found.append((attention, heads, heads, heads))
    return {question_of(*call): call for call in found}


def questions(rows: list[dict]) -> list[dict]:
    return [{"call": name} for name in calls()]


def answer(call: str) -> dict:
    return answer_of(ask_compiler(*calls()[call], keep_text=True))
