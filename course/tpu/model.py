"""The model of ``stable_diffusion``, asked of the TPU compiler piece by piece, from its configuration alone."""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.tpu.chips import tpu_devices
from course.tpu.compiler import Part, Report, Times, ask_compiler, find_times, from_json
from helpers.places import find_data
from stable_diffusion import Config, encode_prompts, generate, parameter_shapes, read_config
from stable_diffusion.layers import Shapes
from stable_diffusion.pipeline import pair, unpair
from stable_diffusion.samplers import SAMPLERS
from stable_diffusion.unet import Block, Condition, blocks, read_text, transformer, unet
from stable_diffusion.vae import decode

CONFIGURATIONS = Path(__file__).with_name("configurations")
PIECES = ("text encoders", "denoising step", "decoder")
SHARED, WHOLE = "denoising step shared by two chips", "whole program"
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Drawing:
    """What is drawn, and how: all that the shapes of the model's programs depend on. They compute in bfloat16."""

    model: str = "sdxl"  #: ``sd``, ``sdxl``, or a bundled checkpoint
    attention: str = "auto"  #: a name from ``stable_diffusion.ATTENTION``
    chip: str = "v5e"  #: a key of ``course.tpu.CHIPS``
    batch: int = 1  #: images at a time; guidance doubles it
    height: int | None = None  #: of an image, in pixels; None for what the model was trained for
    width: int | None = None  #: likewise
    steps: int = 20  #: of denoising


class Piece(NamedTuple):
    """A part of ``generate`` as a function of its own, with shapes of its arguments."""

    name: str
    runs: int
    function: Callable
    arguments: tuple


@dataclass(frozen=True)
class Answer:
    """What the compiler says about a piece."""

    drawing: Drawing
    piece: str
    runs: int
    report: Report

    @property
    def part(self) -> Part:
        """For ``course.tpu.find_times``."""
        return Part(self.piece, self.runs, self.report.work, self.report.compile_seconds)


def load_config(model: str) -> Config:
    """The configuration of ``sd``, ``sdxl`` or a bundled checkpoint; a ``ValueError`` lists those that there are."""
    folders = [
        *CONFIGURATIONS.iterdir(),
        *(file.parent for file in find_data("checkpoints").glob("*/model_index.json")),
    ]
    named = {folder.name: folder for folder in folders}
    if model not in named:
        raise ValueError(f"There is no model {model!r} in this course: choose one of {', '.join(sorted(named))}.")
    return read_config(named[model])


def array(*shape: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def take_apart(drawing: Drawing, axis: str | None = None) -> dict[str, Piece]:
    """The text encoders, a denoising step and the decoder, as ``stable_diffusion.generate`` runs them.

    And `WHOLE`, all of it as one program. With an axis of two devices, for ``jax.shard_map``, the step is that of a
    device which does one half of guidance.
    """
    config, batch, attention = load_config(drawing.model), drawing.batch, drawing.attention
    params, number, integer = parameter_shapes(config, jnp.bfloat16), array(dtype=jnp.float32), array(dtype=jnp.int32)
    usual, scale = config.unet.sample_size * config.pixels_per_latent, config.pixels_per_latent
    height, width = (side or usual for side in (drawing.height, drawing.width))
    latents = array(batch, height // scale, width // scale, config.unet.in_channels, dtype=jnp.float32)
    sampler = SAMPLERS[config.schedule.sampler]

    def encode(params, ids, negative_ids):
        negative, positive = (encode_prompts(params, config, i) for i in (negative_ids, ids))
        return read_text(params["unet"], config.unet, *map(pair, negative, positive), jnp.zeros(6))

    def denoise(p, condition, guidance, i, latents, memory):
        point = sampler.point(config.schedule, drawing.steps, i)
        if axis:  # this device's half, and then both devices' answers
            mine = jax.tree.map(lambda part: unpair(part)[jax.lax.axis_index(axis)], condition)
            output = unet(p, config.unet, latents, point.timestep, mine, attention)
            without, with_prompt = jax.lax.all_gather(output.astype(jnp.float32), axis)
        else:
            output = unet(p, config.unet, pair(latents, latents), point.timestep, condition, attention)
            without, with_prompt = unpair(output.astype(jnp.float32))
        output = without + guidance * (with_prompt - without)
        return sampler.step(config.schedule, latents, output, point, i, drawing.steps - 1, memory)

    def draw(p, latents):
        return decode(p, config.vae, latents, attention)

    def draw_all(params, ids, negative_ids, latents, steps, guidance):
        size = {"height": height, "width": width}
        return generate(params, config, ids, None, negative_ids, steps, guidance, latents, attention=attention, **size)

    ids = array(batch, len(config.text), config.text[0].max_position_embeddings, dtype=jnp.int32)
    condition, memory = jax.eval_shape(encode, params, ids, ids), jax.eval_shape(sampler.memory, latents)
    step = params["unet"], condition, number, integer, latents, memory
    pieces = [
        Piece(PIECES[0], 1, encode, (params, ids, ids)),
        Piece(PIECES[1], drawing.steps, denoise, step),
        Piece(PIECES[2], 1, draw, (params["vae"], latents)),
        Piece(WHOLE, 1, draw_all, (params, ids, None if config.is_xl else ids, latents, integer, number)),
    ]
    return {piece.name: piece for piece in pieces}


def take_shared(drawing: Drawing) -> Piece:
    """A denoising step on two chips, each of which has all of its arguments, and does one half of guidance."""
    piece = take_apart(drawing, axis="half")[PIECES[1]]
    mesh = Mesh(np.array(tpu_devices(drawing.chip, 4)[:2]), ("half",))
    function = jax.shard_map(piece.function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    placed = NamedSharding(mesh, P())
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=placed), piece.arguments)
    return Piece(SHARED, piece.runs, function, arguments)


def take_transformer(drawing: Drawing, channels: int) -> Piece:
    """One transformer of the UNet, with a single layer: pixels look at pixels, then at the text."""
    config = load_config(drawing.model).unet
    heads = next(block.heads for block in blocks(config) if block.kind == "transformer" and block.channels == channels)
    block, halvings = Block("transformer", "it", channels, heads, depth=1), config.block_out_channels.index(channels)
    sides = (side // 8 if side else config.sample_size for side in (drawing.height, drawing.width))
    x = array(2 * drawing.batch, *(side // 2**halvings for side in sides), channels)
    words = {"it.transformer_blocks.0.attn2": (array(2 * drawing.batch, 77, heads, channels // heads),) * 2}

    def run(p, x, words):
        return transformer(p, config, block, x, Condition(words), drawing.attention)

    noted = Shapes()
    jax.eval_shape(lambda x, words: run(noted, x, words), x, words)
    params = {name: array(*shape) for name, shape in noted.items()}
    return Piece(f"transformer of {channels} channels", 1, run, (params, x, words))


def recorded_answers() -> tuple[Answer, ...]:
    """The answers in ``benchmarks/faster.json``."""
    return from_json(Answer, json.loads(find_data("benchmarks/faster.json").read_text()))


def find_recorded(drawing: Drawing) -> Times | None:
    """The bound and the estimate for a drawing, if all of its pieces are among the recorded answers.

    A step's size does not depend on the number of steps, so answers for a different number serve as well.
    """
    config = load_config(drawing.model)
    usual = config.unet.sample_size * config.pixels_per_latent

    def key(of: Drawing) -> Drawing:
        return dataclasses.replace(of, height=of.height or usual, width=of.width or usual, steps=0)

    answers = [answer for answer in recorded_answers() if key(answer.drawing) == key(drawing)]
    parts = {answer.piece: answer.part for answer in answers if answer.piece in PIECES}
    if set(parts) != set(PIECES):
        return None
    parts["denoising step"] = dataclasses.replace(parts["denoising step"], runs=drawing.steps)
    return find_times(parts.values(), answers[0].report.chip)


def ask(drawing: Drawing, piece: Piece) -> Answer:
    """Ask the compiler about a piece. A real model's denoising step takes it about ten minutes."""
    log.info("%s of %s", piece.name, dataclasses.asdict(drawing))
    report = ask_compiler(piece.function, *piece.arguments, chip=drawing.chip)
    return Answer(drawing, piece.name, piece.runs, report)
