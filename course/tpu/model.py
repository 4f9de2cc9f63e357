"""The model of ``course.sd`` as programs to ask about, from its configuration alone."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.model.layers import within
from course.model.parameters import declared_shapes
from course.sd import (
    ATTENTION,
    Config,
    denoise_step,
    encode_condition,
    generate,
    parameter_shapes,
    read_config,
)
from course.sd.samplers import SAMPLERS
from course.sd.unet import Block, Condition, transformer, transformer_parameters
from course.sd.vae import decode
from course.tpu.chips import tpu_devices
from course.tpu.programs import (
    DECODER,
    ENCODERS,
    STEP,
    WHOLE,
    Answer,
    Piece,
    Program,
    ask_pieces,
    find_folder,
)


def load_config(model: str) -> Config:
    """The configuration of a model, see ``Program.model``."""
    return read_config(find_folder(model))


def ask_about(program: Program, timeout: float | None = None) -> Answer:
    """Ask the compiler about a program and its parts. A step of a real model takes ten minutes."""
    params = parameter_shapes(load_config(program.model), program.dtype)
    return ask_pieces(program, take_apart(program), params, timeout)


def take_apart(program: Program) -> dict[str, Piece]:
    """The pieces of a program: all of it, and its parts as ``generate`` runs them."""
    return {
        WHOLE: take_whole(program),
        ENCODERS: take_encoders(program),
        STEP: take_step(program),
        DECODER: take_decoder(program),
    }


def take_whole(program: Program) -> Piece:
    """``course.sd.generate``, from token ids to images."""
    config = load_config(program.model)

    def draw(params, ids, negative_ids, latents, steps, guidance):
        return generate(
            params,
            config,
            ids,
            key=None,
            negative_ids=negative_ids,
            steps=steps,
            guidance=guidance,
            latents=latents,
            attention=ATTENTION[program.attention],
            height=program.height,
            width=program.width,
            decode_batch=program.decode_batch,
        )

    params = parameter_shapes(config, program.dtype)
    ids = token_ids(program, config)
    negative_ids = None if config.is_xl else ids
    steps = array(dtype=jnp.int32)
    guidance = array(dtype=jnp.float32)
    arguments = (params, ids, negative_ids, latents_of(program, config), steps, guidance)
    return Piece(draw, arguments)


def take_encoders(program: Program) -> Piece:
    """The text encoders, and what the UNet makes of their results once for all steps."""
    config = load_config(program.model)

    def encode(params, ids, negative_ids):
        return encode_condition(
            params, config, ids, negative_ids, height=program.height, width=program.width
        )

    params = parameter_shapes(config, program.dtype)
    ids = token_ids(program, config)
    return Piece(encode, (params, ids, ids), is_scanned=True)


def take_step(program: Program, axis: str | None = None) -> Piece:
    """A step of denoising: the model's prediction with guidance, and the sampler.

    With an axis of two devices, for ``jax.shard_map``, it is the step of a device that does one
    half of guidance.
    """
    config = load_config(program.model)
    sampler = SAMPLERS[config.schedule.sampler]

    def denoise(p, condition, guidance, i, latents, memory):
        point = sampler.point(config.schedule, program.steps, i)
        predicted = denoise_step(
            {"unet": p},
            config,
            latents,
            point.timestep,
            condition,
            guidance,
            attention=ATTENTION[program.attention],
            guidance_axis=axis,
        )
        last = program.steps - 1
        return sampler.step(config.schedule, latents, predicted, point, i, last, memory)

    encoders = take_encoders(program)
    condition = jax.eval_shape(encoders.function, *encoders.arguments)
    params = parameter_shapes(config, program.dtype)
    latents = latents_of(program, config)
    memory = jax.eval_shape(sampler.memory, latents)
    guidance = array(dtype=jnp.float32)
    i = array(dtype=jnp.int32)
    arguments = (params["unet"], condition, guidance, i, latents, memory)
    return Piece(denoise, arguments, is_scanned=True)


def take_decoder(program: Program) -> Piece:
    """The half of the VAE that makes images from latents."""
    config = load_config(program.model)

    def draw(p, latents):
        return decode(p, config.vae, latents, ATTENTION[program.attention])

    params = parameter_shapes(config, program.dtype)
    return Piece(draw, (params["vae"], latents_of(program, config)))


def take_shared_step(program: Program) -> Piece:
    """A step on two chips, each of which has all of the arguments, and does half of guidance."""
    step = take_step(program, axis="half")
    mesh = Mesh(np.array(tpu_devices(program.chip, 4)[:2]), ("half",))
    function = jax.shard_map(step.function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    whole = NamedSharding(mesh, P())
    arguments = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=whole), step.arguments
    )
    return Piece(function, arguments, is_scanned=True)


def take_transformer(program: Program, channels: int) -> Piece:
    """A transformer of the UNet, with one layer: pixels look at pixels, then at the text."""
    config = load_config(program.model)
    level = config.unet.block_out_channels.index(channels)
    heads = config.unet.heads(level)
    block = Block("transformer", "it", channels, heads, depth=1)
    texts = 2 * program.batch  # without the prompts, and with them
    scale = config.pixels_per_latent * 2**level
    x = array(texts, program.height // scale, program.width // scale, channels, dtype=program.dtype)
    # Keys and values of the text, (layers, texts, tokens, heads, channels of a head).
    tokens = config.text[0].max_position_embeddings
    word = array(1, texts, tokens, heads, channels // heads, dtype=program.dtype)
    words = {"it": (word, word)}

    attention = ATTENTION[program.attention]

    def run(p, x, words):
        return transformer(p, config.unet, block, x, Condition(words), attention)

    declared = within("it", transformer_parameters(config.unet, block))
    return Piece(run, (declared_shapes(declared, program.dtype), x, words))


def transformer_name(channels: int) -> str:
    """What the piece is called that `take_transformer` gives."""
    return f"transformer of {channels} channels"


def array(*shape: int, dtype) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def token_ids(program: Program, config: Config) -> jax.ShapeDtypeStruct:
    """(batch, text encoders, tokens)."""
    tokens = config.text[0].max_position_embeddings
    return array(program.batch, len(config.text), tokens, dtype=jnp.int32)


def latents_of(program: Program, config: Config) -> jax.ShapeDtypeStruct:
    """(batch, height, width, channels)."""
    scale = config.pixels_per_latent
    return array(
        program.batch,
        program.height // scale,
        program.width // scale,
        config.unet.in_channels,
        dtype=jnp.float32,
    )
