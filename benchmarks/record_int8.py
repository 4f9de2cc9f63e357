"""Record what int8 changes: ``benchmarks/int8.json``.

"pictures" are those of ``benchmarks.record_steps``, drawn by a bundled checkpoint with and without
int8: how many the judge finds right, and how far the pixels are apart. "operations" are those of a
denoising step of Stable Diffusion 1.4 and XL by the dtype of what is multiplied, counted in what
JAX traces; "bounds" are what a call takes at least by its operations, with the text encoders and
the decoder, which stay in bfloat16. "programs" are pieces of XL as the TPU compiler writes them:
what their products multiply, and the cycles that it expects, which say how neighbours compare, and
not how long anything takes. What is recorded is left out, so an interrupted run goes on where it
stopped. All of it takes about an hour on 2 cores, most of it for the whole step; ``--only
pictures`` leaves it out.
"""

import functools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental.pallas import tpu
from jax.extend.core import JaxprEqn

from benchmarks import record_steps
from benchmarks.common import (
    FOLDER,
    make_parser,
    name_of,
    origin,
    read_json,
    work_through,
    write_json,
)
from course.model import layers
from course.model.parameters import declared_shapes
from course.model.quantize import quantize, quantize_weight
from course.sd import ATTENTION
from course.sd.unet import Block, Condition, transformer, transformer_parameters
from course.tpu import make_program, tpu_devices
from course.tpu.hlo import called_by, read_computations, rounds_of
from course.tpu.pieces import Piece, array, load_config, model_step, tree_bytes
from course.tpu.products import equations_of, read_product
from course.tpu.programs import DECODER, ENCODERS, STEP
from course.tpu.records import recorded_report

TARGET = FOLDER / "int8.json"
EVERY = "every weight"  # also those that `quantize` leaves wide
PICTURES = [
    ("shapes-sd", "ddim", 8, "all"),
    ("shapes-sd", "ddim", 30, "all"),
    ("shapes-sd", "dpm++", 10, "all"),
    ("shapes-sd", "ddim", 8, "linear layers"),
    ("shapes-sd", "ddim", 8, "convolutions"),
    ("shapes-sd", "ddim", 8, "gaining"),
    ("shapes-sd", "ddim", 8, EVERY),
    ("shapes-sd in bfloat16", "ddim", 30, "all"),
    ("shapes-sdxl", "euler", 15, "all"),
    ("shapes-sdxl", "euler", 30, "all"),
]
GAINING = "int8 where it gains"
WEIGHTS = {"bfloat16": None, "int8": "all", GAINING: "gaining"}
CHANNELS = (320, 640, 1280)  # of XL's three levels; the first has no transformer
STEPS = 20
XL = make_program("sdxl", steps=STEPS, attention="plain")


def quantize_some(p: dict, which: str) -> dict:
    """A UNet's parameters with some weights in int8."""
    groups = {"linear layers": [False], "convolutions": [True]}.get(which, [False, True])
    found = quantize(p, "gaining" if which == "gaining" else "all")
    for name, value in p.items():
        is_convolution = value.ndim == 4 and value.shape[0] > 1
        if is_convolution not in groups:
            found[name] = value
        elif which == EVERY and name.endswith(".weight") and "norm" not in name:
            found[name] = quantize_weight(value)
    return found


@functools.cache
def draw_wide(checkpoint: str, sampler: str, steps: int) -> np.ndarray:
    return record_steps.draw_pictures(*record_steps.load(checkpoint), sampler, steps)


def compare_pictures(checkpoint: str, sampler: str, steps: int, quantized: str) -> dict:
    """The judge's counts and the pixels' differences, of 255."""
    wide = draw_wide(checkpoint, sampler, steps)
    params, config, tokenize = record_steps.load(checkpoint)
    params = params | {"unet": quantize_some(params["unet"], quantized)}
    images = record_steps.draw_pictures(params, config, tokenize, sampler, steps)
    difference = 255 * np.abs(images - wide)
    return {
        "right": record_steps.count_right(images),
        "right_wide": record_steps.count_right(wide),
        "mean_difference": round(float(difference.mean()), 4),
        "largest_difference": round(float(difference.max()), 1),
    }


def with_weights(piece: Piece, weights: str) -> Piece:
    """A piece as it is, in bfloat16, or with its first argument, the parameters, in int8."""
    layers = WEIGHTS[weights]
    if layers is None:
        return piece
    p, *others = piece.arguments
    small = jax.eval_shape(functools.partial(quantize, layers=layers), p)
    return piece._replace(arguments=(small, *others))


def count_operations(model: str, weights: str) -> dict:
    """Operations of a step's products, two for a multiplication and its addition, and bytes.

    Attention is counted as ``plain`` computes it; a kernel multiplies the same numbers.
    """
    piece = with_weights(model_step(make_program(model, attention="plain")), weights)
    counts = Counter()
    for equation, runs in equations_of(piece.function, *piece.arguments):
        product = read_product(equation)
        if product:
            dtype = str(equation.invars[0].aval.dtype)
            counts[kind_of(equation), dtype] += runs * product.flops
    rows = [
        {"kind": kind, "dtype": dtype, "operations": count}
        for (kind, dtype), count in sorted(counts.items())
    ]
    return {"products": rows, "parameter_bytes": tree_bytes(piece.arguments[0])}


def find_bound(model: str, weights: str, chip: str) -> dict:
    """Seconds that a call takes at least, with every product at the peak of its dtype."""
    figures = tpu.get_tpu_info_for_chip(tpu.ChipVersion(chip), 1)
    wide = figures.bf16_ops_per_second
    step = 0.0
    for row in count_operations(model, weights)["products"]:
        is_small = row["dtype"] == "int8"
        step += row["operations"] / (figures.int8_ops_per_second if is_small else wide)
    # The other parts have the same operations on every chip.
    program = make_program(model, steps=STEPS, attention="plain")
    once = 0.0
    for part in (ENCODERS, DECODER):
        once += recorded_report(program, part).work.flops / wide
    return {
        "steps": STEPS,
        "step_seconds": round(step, 6),
        "other_seconds": round(once, 6),
        "seconds": round(STEPS * step + once, 4),
    }


def kind_of(equation: JaxprEqn) -> str:
    """The kind of product that an operation is."""
    if "convolution" in str(equation.source_info.name_stack):  # also one written as a product
        return "convolutions"
    _, (batch, _) = equation.params["dimension_numbers"]
    return "attention" if batch else "linear layers"


def take_transformer(channels: int) -> Piece:
    """A transformer of XL with one layer, and guidance: pixels look at pixels, then at the text."""
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
    """A residual block of XL, with two convolutions of 3 × 3 pixels."""
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


def compile_piece(name: str, weights: str) -> dict:
    """What the TPU compiler makes of a piece. It runs in this process, and may end it."""
    piece = with_weights(take_pieces()[name](), weights)
    with jax.default_device(tpu_devices(XL.chip)[0]):
        lowered = jax.jit(piece.function).lower(*piece.arguments)
    start = time.monotonic()
    compiled = lowered.compile()
    text = compiled.as_text()
    return {
        "products": count_dtypes(text),
        "cycles": count_cycles(text),
        "argument_bytes": compiled.memory_analysis().argument_size_in_bytes,
        "compile_seconds": round(time.monotonic() - start, 1),
    }


def count_dtypes(text: str) -> dict[str, int]:
    """How many products of a compiled program multiply which dtypes, such as "s8 s8".

    The compiler makes a convolution of every product. Those of a loop count once, and those inside
    of kernels not at all.
    """
    dtypes = dict(re.findall(r"%([\w.\-]+) = \(?([a-z]+\d+)\[", text))
    found = Counter()
    for operands in re.findall(r" (?:convolution|dot)\(([^)]*)\)", text):
        names = re.findall(r"%([\w.\-]+)", operands)
        found[" ".join(dtypes[name] for name in names)] += 1
    return dict(sorted(found.items()))


def count_cycles(text: str) -> dict[str, int]:
    """The cycles that the compiler expects, with loops as often as they run, but for kernels.

    They are those of instructions with "products", and of all "others".
    """
    computations = read_computations(text)
    *_, entry = computations

    @functools.cache
    def has_product(name: str) -> bool:
        lines = computations[name]
        return any(" convolution(" in line or multiplies(line) for line in lines)

    def multiplies(line: str) -> bool:
        """Whether what an instruction calls has a product in it."""
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


def find_questions() -> list[tuple[str, dict, Callable[..., dict]]]:
    """The list that an answer belongs to, what is asked, and who knows the answer."""
    found = []
    for checkpoint, sampler, steps, quantized in PICTURES:
        asked = {
            "checkpoint": checkpoint,
            "sampler": sampler,
            "steps": steps,
            "quantized": quantized,
        }
        found.append(("pictures", asked, compare_pictures))
    for model in ("sdxl", "sd"):
        for weights in WEIGHTS:
            found.append(("operations", {"model": model, "weights": weights}, count_operations))
            for chip in ("v5e", "v6e"):
                asked = {"model": model, "weights": weights, "chip": chip}
                found.append(("bounds", asked, find_bound))
    for name in take_pieces():
        for weights in WEIGHTS:
            if weights == GAINING and name.startswith("residual"):
                continue  # the same as int8
            found.append(("programs", {"name": name, "weights": weights}, compile_piece))
    return found


def record(kind: str, asked: dict, answer: Callable[..., dict]) -> None:
    row = asked | answer(**asked)
    print(row, flush=True)
    content = read_json(TARGET, default={})
    content |= origin("jax", "jaxlib", "libtpu", "numpy", "scipy")
    content[kind] = [*content.get(kind, []), row]
    write_json(TARGET, content)


def find_left() -> dict[str, Callable[[], None]]:
    content = read_json(TARGET, default={})
    left = {}
    for kind, asked, answer in find_questions():
        if not any(asked.items() <= row.items() for row in content.get(kind, [])):
            left[f"{kind}, {name_of(asked)}"] = functools.partial(record, kind, asked, answer)
    return left


def main() -> int:
    options = make_parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    return work_through(find_left, options)


if __name__ == "__main__":
    sys.exit(main())
