"""The model of ``stable_diffusion`` as programs to ask about, from its configuration alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

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
from stable_diffusion import Config, encode_prompts, generate, parameter_shapes, read_config
from stable_diffusion.layers import ShapeRecorder
from stable_diffusion.pipeline import pair, unpair
from stable_diffusion.samplers import SAMPLERS
from stable_diffusion.unet import Block, Condition, project_text, transformer, unet
from stable_diffusion.vae import decode


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
    """``stable_diffusion.generate``, from token ids to images."""
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
            attention=program.attention,
            height=program.height,
            width=program.width,
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
    params = parameter_shapes(config, program.dtype)
    ids = token_ids(program, config)
    return Piece(functools.partial(encode, config), (params, ids, ids))


def encode(config: Config, params: dict, ids, negative_ids):
    """What the UNet reads of prompts and negative prompts, as ``generate`` computes it."""
    context, pooled = encode_prompts(params, config, ids)
    negative_context, negative_pooled = encode_prompts(params, config, negative_ids)
    sizes = jnp.zeros(6)
    return project_text(
        params["unet"],
        config.unet,
        pair(negative_context, context),
        pair(negative_pooled, pooled),
        sizes,
    )


def take_step(program: Program, axis: str | None = None) -> Piece:
    """A step of denoising: the UNet, guidance, and the sampler.

    With an axis of two devices, for ``jax.shard_map``, it is the step of a device that does one
    half of guidance.
    """
    config = load_config(program.model)
    sampler = SAMPLERS[config.schedule.sampler]

    def denoise(p, condition, guidance, i, latents, memory):
        point = sampler.point(config.schedule, program.steps, i)
        if axis:  # this device's half, and then both devices' answers
            half = jax.lax.axis_index(axis)
            mine = jax.tree.map(lambda part: unpair(part)[half], condition)
            noise = unet(p, config.unet, latents, point.timestep, mine, program.attention)
            without, with_prompt = jax.lax.all_gather(noise.astype(jnp.float32), axis)
        else:
            twice = pair(latents, latents)
            noise = unet(p, config.unet, twice, point.timestep, condition, program.attention)
            without, with_prompt = unpair(noise.astype(jnp.float32))
        noise = without + guidance * (with_prompt - without)
        last = program.steps - 1
        return sampler.step(config.schedule, latents, noise, point, i, last, memory)

    params = parameter_shapes(config, program.dtype)
    ids = token_ids(program, config)
    condition = jax.eval_shape(functools.partial(encode, config), params, ids, ids)
    latents = latents_of(program, config)
    memory = jax.eval_shape(sampler.memory, latents)
    guidance = array(dtype=jnp.float32)
    i = array(dtype=jnp.int32)
    return Piece(denoise, (params["unet"], condition, guidance, i, latents, memory))


def take_decoder(program: Program) -> Piece:
    """The half of the VAE that makes images from latents."""
    config = load_config(program.model)

    def draw(p, latents):
        return decode(p, config.vae, latents, program.attention)

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
    return Piece(function, arguments)


def take_transformer(program: Program, channels: int) -> Piece:
    """A transformer of the UNet, with one layer: pixels look at pixels, then at the text."""
    config = load_config(program.model)
    level = config.unet.block_out_channels.index(channels)
    heads = config.unet.heads(level)
    block = Block("transformer", "it", channels, heads, depth=1)
    texts = 2 * program.batch  # without the prompts, and with them
    scale = config.pixels_per_latent * 2**level
    x = array(texts, program.height // scale, program.width // scale, channels, dtype=program.dtype)
    # Keys and values of the text, (texts, tokens, heads, channels of a head).
    tokens = config.text[0].max_position_embeddings
    word = array(texts, tokens, heads, channels // heads, dtype=program.dtype)
    words = {"it.transformer_blocks.0.attn2": (word, word)}

    def run(p, x, words):
        return transformer(p, config.unet, block, x, Condition(words), program.attention)

    noted = ShapeRecorder()
    jax.eval_shape(lambda x, words: run(noted, x, words), x, words)
    params = {name: array(*shape, dtype=program.dtype) for name, shape in noted.items()}
    return Piece(run, (params, x, words))


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
