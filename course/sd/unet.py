"""The UNet: it says what of noisy latents is noise, from a timestep and a text.

It is a list of blocks. On the way down some results are kept, and on the way up each of them is
appended to the input of a block.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from course.model import layers
from course.model.attention import attend, attention_parameters, keys_and_values
from course.model.layers import (
    Parameter,
    conv,
    conv_parameters,
    group_norm,
    layer_norm,
    linear,
    linear_parameters,
    norm_parameters,
    residual,
    residual_parameters,
    split_batch,
    stack_parameters,
    stacked_layers,
    upsample,
    within,
)
from course.sd.configs import UNetConfig

# Of a transformer's group norm. The Flax pipelines of diffusers have 1e-5.
TRANSFORMER_EPSILON = 1e-6


class Block(NamedTuple):
    """One block of the UNet."""

    kind: str  # "conv", "residual", "transformer", "downsample", "upsample"
    name: str  # of its parameters
    channels: int  # that come out
    heads: int = 0  # of a transformer's attention
    depth: int = 0  # how many layers a transformer has
    join: bool = False  # whether what was kept last is appended to its input
    keep: bool = False  # whether its result is kept


def blocks(config: UNetConfig) -> list[Block]:
    """List the blocks in the order of diffusers' ``UNet2DConditionModel``."""
    channels = config.block_out_channels
    deepest = len(channels) - 1
    all_blocks = [Block("conv", "conv_in", channels[0], keep=True)]

    def add_layer(
        part: str, n: int, level: int, attends: bool, join: bool = False, keep: bool = False
    ) -> None:
        """Add a residual block and, if pixels look at the text here, a transformer."""
        all_blocks.append(
            Block(
                kind="residual",
                name=f"{part}.resnets.{n}",
                channels=channels[level],
                join=join,
                keep=keep and not attends,
            )
        )
        if attends:
            all_blocks.append(
                Block(
                    kind="transformer",
                    name=f"{part}.attentions.{n}",
                    channels=channels[level],
                    heads=config.heads(level),
                    depth=config.depth(level),
                    keep=keep,
                )
            )

    for level, kind in enumerate(config.down_block_types):
        part = f"down_blocks.{level}"
        attends = kind.startswith("CrossAttn")
        for n in range(config.layers_per_block):
            add_layer(part, n, level, attends, keep=True)
        if level < deepest:
            name = f"{part}.downsamplers.0.conv"
            all_blocks.append(Block("downsample", name, channels[level], keep=True))
    add_layer("mid_block", 0, deepest, attends=True)
    add_layer("mid_block", 1, deepest, attends=False)
    for up, kind in enumerate(config.up_block_types):
        part = f"up_blocks.{up}"
        level = deepest - up
        attends = kind.startswith("CrossAttn")
        for n in range(config.layers_per_block + 1):
            add_layer(part, n, level, attends, join=True)
        if level > 0:
            all_blocks.append(Block("upsample", f"{part}.upsamplers.0.conv", channels[level]))
    return all_blocks


def unet_parameters(config: UNetConfig) -> dict[str, Parameter]:
    """Return shapes and logical axes of the UNet's parameters, by name."""
    first = config.block_out_channels[0]
    time = 4 * first  # channels of the embedded timestep
    parameters = within("time_embedding.linear_1", linear_parameters(first, time))
    parameters |= within("time_embedding.linear_2", linear_parameters(time, time))
    if config.addition_embed_type is not None:
        inputs = config.projection_class_embeddings_input_dim
        parameters |= within("add_embedding.linear_1", linear_parameters(inputs, time))
        parameters |= within("add_embedding.linear_2", linear_parameters(time, time))
    inputs = config.in_channels
    kept = []
    for block in blocks(config):
        if block.join:
            inputs += kept.pop()
        match block.kind:
            case "residual":
                of_block = residual_parameters(inputs, block.channels, time)
            case "transformer":
                of_block = transformer_parameters(config, block)
            case "conv":  # the first one, whose inputs are too few to be split
                of_block = conv_parameters(inputs, block.channels, axes=(None, "outputs"))
            case "downsample" | "upsample":
                of_block = conv_parameters(inputs, block.channels)
        parameters |= within(block.name, of_block)
        inputs = block.channels
        if block.keep:
            kept.append(inputs)
    parameters |= within("conv_norm_out", norm_parameters(first))
    return parameters | within(
        "conv_out", conv_parameters(first, config.out_channels, axes=(None, None))
    )


def transformer_parameters(config: UNetConfig, block: Block) -> dict[str, Parameter]:
    """Return those of one transformer, by their names in it."""
    channels = block.channels
    layer = within("norm1", norm_parameters(channels))
    layer |= within("attn1", attention_parameters(channels))
    layer |= within("norm2", norm_parameters(channels))
    layer |= within("attn2", attention_parameters(channels, config.cross_attention_dim))
    layer |= within("norm3", norm_parameters(channels))
    layer |= within("ff.net.0.proj", linear_parameters(channels, 8 * channels, ("embed", "mlp")))
    layer |= within("ff.net.2", linear_parameters(4 * channels, channels, ("mlp", "embed")))
    if config.use_linear_projection:
        projection = linear_parameters(channels, channels)
    else:
        projection = conv_parameters(channels, channels, size=1)
    return {
        **within("norm", norm_parameters(channels)),
        **within("proj_in", projection),
        **stack_parameters("transformer_blocks", block.depth, layer),
        **within("proj_out", projection),
    }


class Condition(NamedTuple):
    """What the UNet reads of the text: the same at every step, so it is computed once before."""

    # By the name of a transformer, keys and values of the text for each of its layers: both
    # (layers, batch, tokens, heads, size).
    words: dict[str, tuple[jax.Array, jax.Array]]
    # What Stable Diffusion XL adds to the embedded timestep, (batch, channels).
    whole: jax.Array | None = None


def project_text(
    p: dict,
    config: UNetConfig,
    context: jax.Array,
    pooled: jax.Array | None = None,
    sizes: jax.Array | None = None,
) -> Condition:
    """Prepare a text for all steps: the keys and values of its vectors.

    Parameters
    ----------
    p : dict
        The UNet's parameters.
    config : UNetConfig
    context : jax.Array
        The text encoders' vectors, (batch, tokens, channels).
    pooled : jax.Array, optional
        A vector of the whole prompt, (batch, channels). Only Stable Diffusion XL has it.
    sizes : jax.Array, optional
        Six numbers, (6,), which only Stable Diffusion XL has: the height and width of the original
        image, the top and left edge of what was cut out of it, and the height and width of that.
    """
    words = {}
    for block in blocks(config):
        if block.kind == "transformer":
            layers_of_block = stacked_layers(p, f"{block.name}.transformer_blocks")
            project = functools.partial(keys_and_values, name="attn2", x=context, heads=block.heads)
            words[block.name] = jax.vmap(project)(layers_of_block)
    if config.addition_embed_type is None:
        return Condition(words)
    embedded = timestep_embedding(sizes, config.addition_time_embed_dim)  # (6, width)
    embedded = jnp.tile(embedded.reshape(1, -1), (len(pooled), 1))  # (batch, 6 width)
    embedded = jnp.concatenate([pooled, embedded], axis=-1)
    return Condition(words, embedding_layers(p, "add_embedding", embedded))


def unet(
    p: dict,
    config: UNetConfig,
    latents: jax.Array,
    timestep: jax.Array,
    condition: Condition,
    attention: str | Callable = "automatic",
    remat: bool = False,
) -> jax.Array:
    """diffusers' ``UNet2DConditionModel``.

    Parameters
    ----------
    p : dict
        The UNet's parameters.
    config : UNetConfig
    latents : jax.Array
        With as much variance as DDIM's at the timestep, (batch, height, width, 4).
    timestep : jax.Array
        One for each image, (batch,), or one for all, ().
    condition : Condition
        From ``project_text``.
    attention : str or callable
        See ``course.model.attention``.
    remat : bool
        Rematerialisation, for training: gradients need the activations inside of each block, and
        with this they are computed again in place of being kept.

    Returns
    -------
    jax.Array
        The noise, or what else the model was trained to predict, (batch, height, width, 4).

    Raises
    ------
    ValueError
        If a side of the latents cannot be halved as often as the UNet does it.
    """
    _, height, width, _ = latents.shape
    halvings = len(config.block_out_channels) - 1
    if height % 2**halvings or width % 2**halvings:
        raise ValueError(
            f"Latents of {height} × {width} cannot be halved {halvings} times: "
            f"choose multiples of {2**halvings}."
        )
    run = run_block
    if remat:
        run = jax.checkpoint(run_block, static_argnums=(1, 2, 6))
    timesteps = jnp.broadcast_to(timestep, len(latents))
    time = timestep_embedding(timesteps, config.block_out_channels[0])
    time = embedding_layers(p, "time_embedding", time)  # (batch, channels)
    if condition.whole is not None:
        time += condition.whole
    x = latents
    kept = []
    for block in blocks(config):
        if block.join:
            x = jnp.concatenate([x, kept.pop()], axis=-1)
        x = split_batch(run(p, config, block, x, time, condition, attention))
        if block.keep:
            kept.append(x)
    x = group_norm(p, "conv_norm_out", x, config.norm_num_groups, config.norm_eps)
    return conv(p, "conv_out", jax.nn.silu(x))


def run_block(
    p: dict,
    config: UNetConfig,
    block: Block,
    x: jax.Array,
    time: jax.Array | None,
    condition: Condition,
    attention: str | Callable,
) -> jax.Array:
    """Run one block.

    From (batch, height, width, any number) to (batch, height, width, ``block.channels``); height
    and width are halved by a "downsample", and doubled by an "upsample". ``time`` is the embedded
    timestep, (batch or 1, channels), which only a residual block reads.
    """
    match block.kind:
        case "conv":
            return conv(p, block.name, x)
        case "residual":
            return residual(p, block.name, x, config.norm_num_groups, config.norm_eps, time)
        case "transformer":
            return transformer(p, config, block, x, condition, attention)
        case "downsample":
            return conv(p, block.name, x, stride=2)
        case "upsample":
            return conv(p, block.name, upsample(x))


def transformer(
    p: dict,
    config: UNetConfig,
    block: Block,
    x: jax.Array,
    condition: Condition,
    attention: str | Callable,
) -> jax.Array:
    """diffusers' ``Transformer2DModel``: pixels look at pixels, then at the text.

    From (batch, height, width, channels) to the same shape. Its layers are equal but for their
    parameters, so ``jax.lax.scan`` runs one program for all of them, which is compiled once.
    """
    project = linear if config.use_linear_projection else conv
    upcast = config.upcast_attention

    def layer(y: jax.Array, inputs: tuple) -> tuple[jax.Array, None]:
        p, (text_key, text_value) = inputs
        # Pixels look at pixels.
        z = layer_norm(p, "norm1", y)
        key, value = keys_and_values(p, "attn1", z, block.heads)
        y += attend(p, "attn1", z, key, value, attention, upcast)
        # Pixels look at the text.
        z = layer_norm(p, "norm2", y)
        y += attend(p, "attn2", z, text_key, text_value, attention, upcast)
        # Each pixel by itself: diffusers' GEGLU.
        z = layer_norm(p, "norm3", y)
        z, gate = jnp.split(linear(p, "ff.net.0.proj", z), 2, axis=-1)
        y += linear(p, "ff.net.2", z * layers.gelu(gate))
        return split_batch(y), None

    y = group_norm(p, f"{block.name}.norm", x, config.norm_num_groups, TRANSFORMER_EPSILON)
    y = project(p, f"{block.name}.proj_in", y)
    y = split_batch(y.reshape(len(x), -1, block.channels))  # (batch, pixels, channels)
    parameters = stacked_layers(p, f"{block.name}.transformer_blocks")
    y, _ = jax.lax.scan(layer, y, (parameters, condition.words[block.name]))
    return x + project(p, f"{block.name}.proj_out", y.reshape(x.shape))


def timestep_embedding(numbers: jax.Array, width: int) -> jax.Array:
    """diffusers' ``get_timestep_embedding``: cosines and sines of numbers at falling frequencies.

    From (n,) to (n, width), float32.
    """
    half = width // 2
    frequencies = 10_000.0 ** -(jnp.arange(half, dtype=jnp.float32) / half)
    angles = numbers.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def embedding_layers(p: dict, name: str, x: jax.Array) -> jax.Array:
    """diffusers' ``TimestepEmbedding``: two linear layers.

    From (batch, any number) to (batch, 4 times the channels of the first level).
    """
    return linear(p, f"{name}.linear_2", jax.nn.silu(linear(p, f"{name}.linear_1", x)))
