"""Record what the TPU compiler says about FLUX.2-klein-4B, on one chip and split over eight.

It answers from shapes alone, in bfloat16 and at 1024 × 1024 pixels in four steps, about the whole
program from token ids to images, and about its parts. It goes into ``benchmarks/flux2.json``, which
chapter 16 shows. An answer takes from ten seconds to twelve minutes on two cores and is written at
once, and what is recorded is left out: delete an answer to ask anew. What the file says of a step
of Z-Image-Turbo is kept as it is: it was asked when the course had that model's code, too.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import FOLDER, machine, make_parser, read_json, work_through, write_json
from benchmarks.record_shardings import add_up, place
from course import flux2
from course.flux2 import transformer
from course.tpu import ask_compiler, tpu_devices
from course.tpu.pieces import Piece
from course.tpu.products import find_products

TARGET = FOLDER / "flux2.json"
CONFIG = flux2.Config()
SIDE = 1024  # of an image, in pixels
TOKENS = (SIDE // CONFIG.vae.pixels_per_token) ** 2
TEXT_TOKENS = 512
STEPS = 4


class Way(NamedTuple):
    """How the work is split over chips."""

    mesh: dict[str, int]  # the sizes of its axes
    rules: dict[str, str]  # for the parameters
    spec: P  # of inputs and outputs, whose axes are the images and the tokens, or rows of pixels
    images: int  # drawn at a time by all chips together
    by_shard_map: bool = False  # instead of letting the compiler split the program


WAYS = {
    "one chip": Way({}, flux2.DATA_PARALLEL, P(), images=1),
    "data": Way({"data": 8}, flux2.DATA_PARALLEL, P("data"), images=8, by_shard_map=True),
    "data by the partitioner": Way({"data": 8}, flux2.DATA_PARALLEL, P("data"), images=8),
    "tensor": Way({"model": 8}, flux2.TENSOR_PARALLEL, P(), images=1),
    "sequence": Way({"tokens": 8}, flux2.DATA_PARALLEL, P(None, "tokens"), images=1),
}


class Question(NamedTuple):
    """What the compiler is asked about."""

    part: str  # a key of PARTS
    chip: str
    way: str  # a key of WAYS
    variant: str = ""  # a key of VARIANTS; empty for the model as it is

    def __str__(self) -> str:
        return ", ".join(each for each in self if each)


QUESTIONS = [
    Question("draw", "v5e", "one chip"),
    Question("step", "v5e", "one chip"),
    Question("step", "v5e", "one chip", "flash"),
    Question("step", "v5e", "tensor"),
    Question("step", "v5e", "tensor", "parts apart"),
    Question("step", "v5e", "sequence"),
    Question("encode", "v5e", "one chip"),
    Question("decode", "v5e", "one chip"),
    Question("edit", "v5e", "one chip"),
    Question("draw", "v5e", "data by the partitioner"),
    Question("draw", "v5e", "data"),
    Question("step", "v6e", "tensor"),
    Question("step", "v6e", "tensor", "parts apart"),
    Question("step", "v6e", "sequence"),
    Question("draw", "v5e", "tensor"),
    Question("draw", "v5e", "sequence"),
    Question("draw", "v6e", "tensor"),
    Question("draw", "v6e", "sequence"),
    Question("draw", "v6e", "one chip"),
    Question("draw", "v6e", "data"),
]
KEPT = "Z-Image step, v5e, one chip"  # a recorded answer that is no longer asked for

PULL_REQUEST = "https://github.com/AI-Hypercomputer/maxdiffusion/pull"
# What others measured with this model, at 1024 × 1024 pixels in four steps and bfloat16.
PUBLISHED = [
    {
        "system": "MaxDiffusion, v6e-8, one image over eight chips",
        "chip": "v6e",
        "chips": 8,
        "images": 1,
        "seconds": 0.394,
        "step_seconds": 0.06392,
        "source": f"{PULL_REQUEST}/457",
    },
    {
        "system": "MaxDiffusion, v6e, four images on one chip",
        "chip": "v6e",
        "chips": 1,
        "images": 4,
        "seconds": 3.65,
        "step_seconds": 0.7953,
        "source": f"{PULL_REQUEST}/434",
    },
]


# The parts, as functions of parameters and of arrays.


def draw(params: dict, ids: jax.Array, mask: jax.Array, noise: jax.Array) -> jax.Array:
    return flux2.generate(params, CONFIG, ids, mask, noise, SIDE, SIDE, STEPS)


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
    "edit": Part(edit, ALL, ("ids", "mask", "tokens", "images")),
    "encode": Part(encode, ("text_encoder",), ("ids", "mask")),
    "step": Part(step, ("transformer",), ("tokens", "prompt", "time")),
    "edit step": Part(edit_step, ("transformer",), ("tokens", "tokens", "prompt", "time")),
    "decode": Part(decode, ("vae",), ("tokens",)),
    "encode image": Part(encode_images, ("vae",), ("images",)),
}


def input_shapes(images: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of a part's inputs by their names, for so many images."""
    channels = CONFIG.transformer.in_channels
    return {
        "ids": jax.ShapeDtypeStruct((images, TEXT_TOKENS), jnp.int32),
        "mask": jax.ShapeDtypeStruct((images, TEXT_TOKENS), jnp.bool_),
        "tokens": jax.ShapeDtypeStruct((images, TOKENS, channels), jnp.float32),
        "prompt": jax.ShapeDtypeStruct(
            (images, TEXT_TOKENS, CONFIG.transformer.joint_attention_dim), jnp.bfloat16
        ),
        "images": jax.ShapeDtypeStruct((images, SIDE, SIDE, 3), jnp.float32),
        "time": jax.ShapeDtypeStruct((), jnp.float32),
    }


# The variants: each changes the model, or its parameters' shapes, while it is traced.


def flash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's Pallas kernel in the place of ``course.flux2.transformer.attention``."""
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas  # slow to import

    batch, tokens, heads, channels = query.shape
    size = 768  # text and image have 4608 tokens together: six whole blocks
    blocks = pallas.BlockSizes(block_b=1, block_q=size, block_k_major=size, block_k=size)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    y = pallas.flash_attention(query, key, value, sm_scale=channels**-0.5, block_sizes=blocks)
    return y.swapaxes(1, 2).reshape(batch, tokens, heads * channels)


FUSED = "attn.to_qkv_mlp_proj"
JOINED = "attn.to_out"


def cut(name: str) -> list[int]:
    """How many columns, or rows, each part of a single-stream block's fused matrix has."""
    width = CONFIG.transformer.width
    hidden = int(width * CONFIG.transformer.mlp_ratio)
    if name == FUSED:
        return [width, width, width, hidden, hidden]
    return [width, hidden]


def linear_by_parts(p: dict, name: str, x: jax.Array) -> jax.Array:
    """``course.model.layers.linear`` where each part of a fused matrix is a matrix of its own."""
    if f"{name}.0.weight" not in p:
        return plain_linear(p, name, x)
    parts = [p[f"{name}.{n}.weight"] for n in range(len(cut(name)))]
    if name == FUSED:
        return jnp.concatenate([x @ weight for weight in parts], axis=-1)
    inputs = jnp.split(x, np.cumsum(cut(name))[:-1], axis=-1)
    return sum(each @ weight for each, weight in zip(inputs, parts, strict=True))


plain_linear = transformer.linear


def cut_parameters(p: dict) -> dict:
    """Shapes with shardings of the transformer, with the fused matrices cut into their parts."""
    found = {}
    for key, shape in p.items():
        layer = key.removesuffix(".weight")
        name = layer.removeprefix(f"{transformer.SINGLE}.*.")
        if layer == name or name not in (FUSED, JOINED):
            found[key] = shape
            continue
        axis = 2 if name == FUSED else 1
        for n, size in enumerate(cut(name)):
            sides = list(shape.shape)
            sides[axis] = size
            found[f"{layer}.{n}.weight"] = shape.update(shape=tuple(sides))
    return found


class Variant(NamedTuple):
    changed: dict[str, Callable]  # functions of course.flux2.transformer
    parameters: Callable[[dict], dict] = lambda p: p


VARIANTS = {
    "": Variant({}),
    # The Pallas kernel, where the compiler would make one of its own.
    "flash": Variant({"attention": flash}),
    # Split over chips, each part of a fused matrix by itself, so that heads stay whole.
    "parts apart": Variant({"linear": linear_by_parts}, cut_parameters),
}


@contextlib.contextmanager
def changed_model(variant: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name, function in VARIANTS[variant].changed.items():
            stack.enter_context(mock.patch.object(transformer, name, function))
        yield


# Asking


def make_mesh(chip: str, way: Way) -> Mesh | None:
    """A mesh of chips that are not there; none for one chip."""
    if not way.mesh:
        return None
    devices = tpu_devices(chip, math.prod(way.mesh.values()))
    return Mesh(np.array(devices).reshape(*way.mesh.values()), tuple(way.mesh))


def make_arguments(question: Question, mesh: Mesh | None) -> tuple:
    """Shapes of a part's arguments, which say where they lie."""
    part, way = PARTS[question.part], WAYS[question.way]
    params = flux2.parameter_shapes(CONFIG)
    inputs = input_shapes(way.images)
    if mesh:
        params = place(params, flux2.shardings(CONFIG, mesh, way.rules))
        for name, shape in inputs.items():
            spec = way.spec if shape.shape else P()
            inputs[name] = place(shape, NamedSharding(mesh, spec))
    chosen = {model: params[model] for model in part.models}
    if "transformer" in chosen:
        chosen["transformer"] = VARIANTS[question.variant].parameters(chosen["transformer"])
    return chosen, *(inputs[name] for name in part.inputs)


def new_function(question: Question) -> Callable:
    """A part as a function that JAX has not traced before, or a variant would get its trace."""

    def function(*arguments):
        return PARTS[question.part].function(*arguments)

    return function


def count_parameters(params: dict) -> int:
    """Bytes of the parameters on each chip."""
    total = 0
    for shape in jax.tree.leaves(params):
        sides = shape.shape
        if shape.sharding:
            sides = shape.sharding.shard_shape(sides)
        total += math.prod(sides) * shape.dtype.itemsize
    return total


def count_flops(question: Question) -> int:
    """Operations of all matrix products and convolutions in a run, on all chips together.

    They are counted in JAX's trace, where it is known how often a loop goes round.
    """
    arguments = make_arguments(question, None)
    with changed_model(question.variant):
        found = find_products(new_function(question), *arguments)
    return sum(count * product.flops for product, count in found.items())


def record(question: Question) -> None:
    """Ask about a part, split in one way, and write down the answer."""
    way = WAYS[question.way]
    mesh = make_mesh(question.chip, way)
    arguments = make_arguments(question, mesh)
    function = new_function(question)
    with changed_model(question.variant):
        if mesh:
            if way.by_shard_map:
                # Each chip has the program of one chip alone.
                specs = (P(), *(way.spec for _ in arguments[1:]))
                function = jax.shard_map(
                    function, mesh=mesh, in_specs=specs, out_specs=way.spec, check_vma=False
                )
            function = jax.jit(function, out_shardings=NamedSharding(mesh, way.spec))
            with jax.set_mesh(mesh):
                report = ask_compiler(function, *arguments, chip=question.chip)
        else:
            # With all rounds of the loops in its operations: see `Piece`.
            report = Piece(function, arguments, is_scanned=True).ask(question.chip)
    print(report.verdict, flush=True)
    found = read_json(TARGET, {})  # read again: another recorder may have written to it
    found.setdefault("programs", {})[str(question)] = {
        "part": question.part,
        "way": question.way,
        "variant": question.variant,
        "mesh": way.mesh,
        "images": way.images,
        "parameters": count_parameters(arguments[0]),
        "flops": count_flops(question),
        "report": dataclasses.asdict(dataclasses.replace(report, copies=None, text="")),
        "exchanges": add_up(report.collectives),
        "machine": machine(),
    }
    write_json(TARGET, found)


def record_flops() -> None:
    """Write down the operations of each part for one image, and what others published."""
    found = read_json(TARGET, {})
    flops = {part: count_flops(Question(part, "", "one chip")) for part in PARTS}
    found["flops"] = found.get("flops", {}) | flops
    found["steps"] = STEPS
    found["published"] = PUBLISHED
    write_json(TARGET, found)


def find_left() -> dict[str, Callable[[], None]]:
    """The questions that are not recorded yet, and what records each."""
    found = read_json(TARGET, {})
    left = {} if PARTS.keys() <= found.get("flops", {}).keys() else {"flops": record_flops}
    for question in QUESTIONS:
        if str(question) not in found.get("programs", {}):
            left[str(question)] = functools.partial(record, question)
    return left


def main() -> int:
    options = make_parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    return work_through(find_left, options)


if __name__ == "__main__":
    sys.exit(main())
