"""FLUX.2-klein-4B, on one chip and split over eight: chapter 16 shows the answers.

They are about the whole program from token ids to images, and about its parts, in bfloat16 and at
1024 × 1024 pixels in four steps. An answer takes from ten seconds to twelve minutes on two cores.
About a step over eight chips a plan asks, see ``lab/ask/plans.py``. The answer about a step of
Z-Image-Turbo was asked when the course had that model's code, too.
"""

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from course import flux2
from course.flux2 import transformer
from course.flux2.offload import HOST, Waiting, is_block_matrix
from course.tpu.chips import tpu_devices
from course.tpu.pieces import Piece, array, tree_bytes
from course.tpu.records import answer_of
from course.tpu.splits import ask_split, bytes_on_chip, make_mesh, place

CONFIG = flux2.Config()
SIDE = 1024  # of an image, in pixels
TOKENS = (SIDE // CONFIG.vae.pixels_per_token) ** 2
TEXT_TOKENS = 512
STEPS = 4
GUIDANCE = 4.0  # of the model before distillation


class Way(NamedTuple):
    """How the work is split over chips."""

    mesh: dict[str, int]  # the sizes of its axes; empty for one chip
    rules: dict[str, str]  # for the parameters
    spec: P  # of inputs and outputs, whose axes are the images and then tokens
    images: int  # drawn at a time by all chips together
    by_shard_map: bool = False  # each chip has the program of one chip alone


WAYS = {
    "one chip": Way({}, flux2.DATA_PARALLEL, P(), images=1),
    "data": Way({"data": 8}, flux2.DATA_PARALLEL, P("data"), images=8, by_shard_map=True),
    "data by the partitioner": Way({"data": 8}, flux2.DATA_PARALLEL, P("data"), images=8),
    "tensor": Way({"model": 8}, flux2.TENSOR_PARALLEL, P(), images=1),
    "context": Way({"tokens": 8}, flux2.DATA_PARALLEL, P(None, "tokens"), images=1),
}

QUESTIONS = [
    ("draw", "v5e", "one chip"),
    ("draw guided", "v5e", "one chip"),
    ("step", "v5e", "one chip"),
    ("step", "v5e", "one chip", "flash"),
    ("encode", "v5e", "one chip"),
    ("decode", "v5e", "one chip"),
    ("step", "v5e", "one chip", "from the host"),
    ("encode", "v5e", "one chip", "from the host"),
    ("edit", "v5e", "one chip"),
    ("draw", "v5e", "data by the partitioner"),
    ("draw", "v5e", "data"),
    ("draw", "v5e", "tensor"),
    ("draw", "v5e", "context"),
    ("draw", "v6e", "tensor"),
    ("draw", "v6e", "context"),
    ("draw", "v6e", "one chip"),
    ("draw", "v6e", "data"),
]


# The parts, as functions of parameters and of arrays.


def draw(params: dict, ids: jax.Array, mask: jax.Array, noise: jax.Array) -> jax.Array:
    return flux2.generate(params, CONFIG, ids, mask, noise, SIDE, SIDE, STEPS)


def draw_guided(
    params: dict,
    ids: jax.Array,
    mask: jax.Array,
    noise: jax.Array,
    empty_ids: jax.Array,
    empty_mask: jax.Array,
) -> jax.Array:
    empty = empty_ids, empty_mask
    return flux2.generate(params, CONFIG, ids, mask, noise, SIDE, SIDE, STEPS, GUIDANCE, empty)


def edit(
    params: dict, ids: jax.Array, mask: jax.Array, noise: jax.Array, images: jax.Array
) -> jax.Array:
    return flux2.generate(params, CONFIG, ids, mask, noise, SIDE, SIDE, STEPS, images=images)


def encode(params: dict, ids: jax.Array, mask: jax.Array) -> jax.Array:
    return flux2.encode_prompts(params, CONFIG, ids, mask)


def step(params: dict, noisy: jax.Array, prompt: jax.Array, time: jax.Array) -> jax.Array:
    rows = math.isqrt(TOKENS)
    # The time is that of all images: alone it is on every chip, whatever is split.
    times = jnp.full(len(noisy), time)
    places = flux2.positions(rows, rows), flux2.text_positions(TEXT_TOKENS)
    p, config = params["transformer"], CONFIG.transformer
    return flux2.velocity(p, config, noisy, prompt, times, *places)


def edit_step(
    params: dict, noisy: jax.Array, reference: jax.Array, prompt: jax.Array, time: jax.Array
) -> jax.Array:
    rows = math.isqrt(TOKENS)
    places = np.concatenate([flux2.positions(rows, rows), flux2.positions(rows, rows, 1)])
    return flux2.velocity(
        params["transformer"],
        CONFIG.transformer,
        jnp.concatenate([noisy, reference], axis=1),
        prompt,
        jnp.full(len(noisy), time),
        places,
        flux2.text_positions(TEXT_TOKENS),
    )


def decode(params: dict, tokens: jax.Array) -> jax.Array:
    return flux2.decode(params["vae"], CONFIG.vae, tokens, SIDE, SIDE)


def encode_images(params: dict, images: jax.Array) -> jax.Array:
    return flux2.encode_images(params, CONFIG, images)


class Part(NamedTuple):
    function: Callable
    models: tuple[str, ...]  # whose parameters it takes
    inputs: tuple[str, ...]


ALL = ("transformer", "text_encoder", "vae")
PARTS = {
    "draw": Part(draw, ALL, ("ids", "mask", "tokens")),
    # The model before distillation has the same shapes.
    "draw guided": Part(draw_guided, ALL, ("ids", "mask", "tokens", "ids", "mask")),
    "edit": Part(edit, ALL, ("ids", "mask", "tokens", "images")),
    "encode": Part(encode, ("text_encoder",), ("ids", "mask")),
    "step": Part(step, ("transformer",), ("tokens", "prompt", "time")),
    "edit step": Part(edit_step, ("transformer",), ("tokens", "tokens", "prompt", "time")),
    "decode": Part(decode, ("vae",), ("tokens",)),
    "encode image": Part(encode_images, ("vae",), ("images",)),
}


def input_shapes(images: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a part's inputs by their names, for so many images."""
    config = CONFIG.transformer
    return {
        "ids": array(images, TEXT_TOKENS, dtype=jnp.int32),
        "mask": array(images, TEXT_TOKENS, dtype=jnp.bool_),
        "tokens": array(images, TOKENS, config.in_channels),
        "prompt": array(images, TEXT_TOKENS, config.joint_attention_dim, dtype=jnp.bfloat16),
        "images": array(images, SIDE, SIDE, 3),
        "time": array(),
    }


# The variants: each changes the model, or its parameters' shapes, while it is traced.


def flash(query: jax.Array, key: jax.Array, value: jax.Array, attend: Callable) -> jax.Array:
    """Run JAX's Pallas kernel in the place of ``course.flux2.transformer.attention``."""
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas  # slow to import

    batch, tokens, heads, channels = query.shape
    size = 768  # text and image have 4608 tokens together: six whole blocks
    blocks = pallas.BlockSizes(block_b=1, block_q=size, block_k_major=size, block_k=size)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    y = pallas.flash_attention(query, key, value, sm_scale=channels**-0.5, block_sizes=blocks)
    return y.swapaxes(1, 2).reshape(batch, tokens, heads * channels)


def wait_on_host(p: dict) -> dict:
    """Return a part's shapes, those of its blocks' matrices in the memory of a v5e's host."""
    on_host = SingleDeviceSharding(tpu_devices("v5e")[0], memory_kind=HOST)
    found = {}
    for name, shape in p.items():
        if is_block_matrix(name, shape.shape):
            shape = Waiting(shape.update(sharding=on_host))
        found[name] = shape
    return found


class Variant(NamedTuple):
    changed: dict[str, Callable]  # functions of course.flux2.transformer
    parameters: Callable[[dict], dict] = lambda p: p


VARIANTS = {
    "": Variant({}),
    # The Pallas kernel, where the compiler would make one of its own.
    "flash": Variant({"attention": flash}),
    # The weights of blocks come to the device one block at a time.
    "from the host": Variant({}, wait_on_host),
}


# Asking


def questions(rows: list[dict]) -> list[dict]:
    names = ("part", "chip", "way", "variant")
    return [dict(zip(names, (*asked, "")[:4], strict=True)) for asked in QUESTIONS]


def answer(part: str, chip: str, way: str, variant: str) -> dict:
    split = WAYS[way]
    with contextlib.ExitStack() as stack:
        for name, function in VARIANTS[variant].changed.items():
            stack.enter_context(mock.patch.object(transformer, name, function))
        if split.mesh:
            mesh = make_mesh(chip, split.mesh)
            piece = take_part(part, split, variant, mesh)
            function = piece.function
            if split.by_shard_map:
                specs = (P(), *(split.spec for _ in piece.arguments[1:]))
                function = jax.shard_map(
                    function, mesh=mesh, in_specs=specs, out_specs=split.spec, check_vma=False
                )
            return ask_split(
                function,
                piece.arguments,
                mesh,
                chip,
                output=NamedSharding(mesh, split.spec),
                sizes=split.mesh,
                images=split.images,
            )
        piece = take_part(part, split, variant)
        held = bytes_on_chip(piece.arguments[0])
        more = {"mesh": {}, "images": split.images, "parameters": held}
        waiting = tree_bytes(piece.arguments[0]) - held
        return answer_of(piece.ask(chip), **more | ({"on_host": waiting} if waiting else {}))


def take_part(
    name: str, way: Way = WAYS["one chip"], variant: str = "", mesh: Mesh | None = None
) -> Piece:
    """Return a part, and shapes of its arguments, which say where they lie on a mesh."""
    part = PARTS[name]
    params = flux2.parameter_shapes(CONFIG)
    inputs = input_shapes(way.images)
    if mesh:
        params = place(params, flux2.shardings(CONFIG, mesh, way.rules))
        for key, shape in inputs.items():
            inputs[key] = place(shape, NamedSharding(mesh, way.spec if shape.shape else P()))
    chosen = {model: VARIANTS[variant].parameters(params[model]) for model in part.models}

    # JAX has not traced this function before: of a part itself, a variant would get the trace.
    def function(*arguments):
        return part.function(*arguments)

    # With all rounds of the loops in its operations: see `Piece`.
    return Piece(function, (chosen, *(inputs[key] for key in part.inputs)), is_scanned=True)
