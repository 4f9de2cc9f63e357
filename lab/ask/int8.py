"""What int8 changes in Stable Diffusion XL: pieces of it as the TPU compiler writes them.

Of each are the cycles that the compiler expects, which say how neighbours compare, and not how long
anything takes, and of all but the whole step the bound by its schedule. A call's least time is that
of its operations, which are counted in what JAX traces. All of it takes about an hour on 2 cores,
most of it for the whole step.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable

import jax
from jax.experimental.pallas import tpu
from jax.extend.core import JaxprEqn

from course.model import layers
from course.model.parameters import declared_shapes
from course.model.quantize import quantize
from course.sd import ATTENTION
from course.sd.unet import Block, Condition, transformer, transformer_parameters
from course.tpu import make_program
from course.tpu.chips import find_chip
from course.tpu.compiler import compile_apart
from course.tpu.hlo import called_by, read_computations, rounds_of
from course.tpu.jaxpr import equations_of, read_product
from course.tpu.pieces import Piece, array, load_config, model_step
from course.tpu.programs import DECODER, ENCODERS, STEP
from course.tpu.records import recorded_report
from course.tpu.roofline import read_roofline
from lab.ask.schedules import compile_with_bundles, count_all, lower_on_one

CALL = "a call of 20 steps"
GAINING = "int8 where it gains"
WEIGHTS = {"bfloat16": None, "int8": "all", GAINING: "gaining"}
CHANNELS = (320, 640, 1280)  # of XL's three levels; the first has no transformer
STEPS = 20
XL = make_program("sdxl", steps=STEPS, attention="plain")


def with_weights(piece: Piece, weights: str) -> Piece:
    """Return a piece as it is, in bfloat16, or with its first argument, the parameters, in int8."""
    layers = WEIGHTS[weights]
    if layers is None:
        return piece
    p, *others = piece.arguments
    small = jax.eval_shape(functools.partial(quantize, layers=layers), p)
    return piece._replace(arguments=(small, *others))


def count_operations(model: str, weights: str) -> Counter:
    """Count a step's operations by kind of product and dtype, a multiplication as one of two.

    Attention is counted as ``plain`` computes it; a kernel multiplies the same numbers.
    """
    piece = with_weights(model_step(make_program(model, attention="plain")), weights)
    counts = Counter()
    for equation, runs in equations_of(piece.function, *piece.arguments):
        product = read_product(equation)
        if product:
            dtype = str(equation.invars[0].aval.dtype)
            counts[kind_of(equation), dtype] += runs * product.flops
    return counts


def find_bound(weights: str) -> dict:
    """Return the seconds that a call takes at least, with every product at its dtype's peak."""
    figures = tpu.get_tpu_info_for_chip(tpu.ChipVersion(XL.chip), 1)
    wide = figures.bf16_ops_per_second
    step = 0.0
    for (_, dtype), operations in count_operations(XL.model, weights).items():
        step += operations / (figures.int8_ops_per_second if dtype == "int8" else wide)
    # The text encoders and the decoder stay in bfloat16.
    once = sum(recorded_report(XL, part).work.flops / wide for part in (ENCODERS, DECODER))
    return {
        "step_seconds": round(step, 6),
        "other_seconds": round(once, 6),
        "seconds": round(STEPS * step + once, 4),
    }


def kind_of(equation: JaxprEqn) -> str:
    """Return the kind of product that an operation is."""
    if "convolution" in str(equation.source_info.name_stack):  # also one written as a product
        return "convolutions"
    _, (batch, _) = equation.params["dimension_numbers"]
    return "attention" if batch else "linear layers"


def take_transformer(channels: int) -> Piece:
    """Return a transformer of XL with one layer, and guidance.

    Pixels look at pixels, then at the text.
    """
    config = load_config("sdxl")
    level = config.unet.block_out_channels.index(channels)
    heads = config.unet.heads(level)
    block = Block("transformer", "it", channels, heads, depth=1)
    side = config.unet.sample_size // 2**level
    x = array(2, side, side, channels, dtype="bfloat16")
    # Keys and values of the text, (layers, texts, tokens, heads, channels of a head).
    tokens = config.text[0].max_position_embeddings
    word = array(1, 2, tokens, heads, channels // heads, dtype="bfloat16")

    def run(p, x, words):
        return transformer(p, config.unet, block, x, Condition(words), ATTENTION["plain"])

    declared = layers.within("it", transformer_parameters(config.unet, block))
    return Piece(run, (declared_shapes(declared, "bfloat16"), x, {"it": (word, word)}))


def take_residual(channels: int) -> Piece:
    """Return a residual block of XL, with two convolutions of 3 × 3 pixels."""
    config = load_config("sdxl").unet
    side = config.sample_size // 2 ** config.block_out_channels.index(channels)
    time = 4 * config.block_out_channels[0]

    def run(p, x, time):
        groups = config.norm_num_groups
        return layers.residual(p, "it", x, groups, config.norm_eps, time)

    declared = layers.within("it", layers.residual_parameters(channels, channels, time))
    p = declared_shapes(declared, "bfloat16")
    x = array(2, side, side, channels, dtype="bfloat16")
    return Piece(run, (p, x, array(1, time, dtype="bfloat16")))


def take_pieces() -> dict[str, Callable[[], Piece]]:
    found = {}
    for channels in CHANNELS[1:]:
        name = f"transformer of {channels} channels"
        found[name] = functools.partial(take_transformer, channels)
    for channels in CHANNELS:
        found[f"residual block of {channels} channels"] = functools.partial(take_residual, channels)
    found[STEP] = functools.partial(model_step, XL)
    return found


def lower_piece(name: str, weights: str) -> jax.stages.Lowered:
    """Return a piece, lowered for the chip."""
    return lower_on_one(with_weights(take_pieces()[name](), weights), XL.chip)


def count_cycles(text: str) -> dict[str, int]:
    """Count the cycles that the compiler expects, with loops as often as they run, but for kernels.

    They are those of instructions with "products", and of all "others".
    """
    computations = read_computations(text)
    *_, entry = computations

    @functools.cache
    def has_product(name: str) -> bool:
        lines = computations[name]
        return any(" convolution(" in line or multiplies(line) for line in lines)

    def multiplies(line: str) -> bool:
        """Return whether what an instruction calls has a product in it."""
        return any(map(has_product, called_by(line)))

    def count(name: str) -> Counter:
        total = Counter(products=0, others=0)
        for line in computations[name]:
            cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
            if cycles:
                is_product = " convolution(" in line or multiplies(line)
                total["products" if is_product else "others"] += int(cycles[1])
            loop = re.search(r" while\(.*body=%([\w.-]+)", line)
            if loop:
                for kind, number in count(loop[1]).items():
                    total[kind] += rounds_of(line, computations) * number
        return total

    return dict(count(entry))


def questions(rows: list[dict]) -> list[dict]:
    asked = [{"piece": CALL, "weights": weights} for weights in ("bfloat16", "int8")]
    for piece in take_pieces():
        for weights in WEIGHTS:
            if weights == GAINING and piece.startswith("residual"):
                continue  # the same as int8
            asked.append({"piece": piece, "weights": weights})
    return asked


def answer(piece: str, weights: str) -> dict:
    if piece == CALL:
        return find_bound(weights)
    lowered = lower_piece(piece, weights)
    if piece == STEP:  # to write its bundles takes an hour
        return {"cycles": count_cycles(compile_apart(lowered, XL.chip)["text"])}
    said, bundles = compile_with_bundles(lowered, XL.chip)
    text, chip = said["text"], find_chip(XL.chip)
    found = read_roofline(text, chip, count_all(text, bundles))
    return {"cycles": count_cycles(text), "schedule": dataclasses.asdict(found)}
