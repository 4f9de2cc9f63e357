"""The UNet: from noisy latents, a timestep and a text it says what of the latents is noise. It is a list of blocks.

On the way down some results are kept, and on the way up each of them is appended to the input of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from stable_diffusion import layers
from stable_diffusion.attention import attend, keys_and_values
from stable_diffusion.configs import UNetConfig
from stable_diffusion.layers import conv, group_norm, layer_norm, linear, residual, upsample

TRANSFORMER_EPSILON = 1e-6  # of a transformer's group norm; the Flax pipelines of diffusers had 1e-5


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
    """The UNet as a list: the order of diffusers' ``UNet2DConditionModel``."""
    plan, channels, top = [], config.block_out_channels, len(config.block_out_channels) - 1

    def add(part: str, n: int, level: int, crosses: bool, join: bool = False, keep: bool = False) -> None:
        """Add a residual block and, if pixels look at the text here, a transformer."""
        plan.append(Block("residual", f"{part}.resnets.{n}", channels[level], join=join, keep=keep and not crosses))
        if crosses:
            numbers = (config.at_level(name, level) for name in ("attention_head_dim", "transformer_layers_per_block"))
            plan.append(Block("transformer", f"{part}.attentions.{n}", channels[level], *numbers, keep=keep))

    plan.append(Block("conv", "conv_in", channels[0], keep=True))
    for level, kind in enumerate(config.down_block_types):
        for n in range(config.layers_per_block):
            add(f"down_blocks.{level}", n, level, kind.startswith("CrossAttn"), keep=True)
        if level < top:
            name = f"down_blocks.{level}.downsamplers.0.conv"
            plan.append(Block("downsample", name, channels[level], keep=True))
    add("mid_block", 0, top, crosses=True)
    add("mid_block", 1, top, crosses=False)
    for up, kind in enumerate(config.up_block_types):
        for n in range(config.layers_per_block + 1):
            add(f"up_blocks.{up}", n, top - up, kind.startswith("CrossAttn"), join=True)
        if up < top:
            plan.append(Block("upsample", f"up_blocks.{up}.upsamplers.0.conv", channels[top - up]))
    return plan


class Condition(NamedTuple):
    """What the UNet reads of the text: the same at every step, so it is computed once, before the first."""

    words: dict  # by the name of an attention to the text: keys and values, each (batch, tokens, heads, size)
    whole: jax.Array | None = None  # what Stable Diffusion XL adds to the embedded timestep, (batch, channels)


def read_text(p: dict, config: UNetConfig, context: jax.Array, pooled=None, sizes=None) -> Condition:
    """Prepare the text for the UNet, from the text encoders' vectors, (batch, tokens, channels).

    Only Stable Diffusion XL has ``pooled``, (batch, channels), and ``sizes``, six numbers: height and width of the
    original, top and left of what was cut out of it, height and width of the image.
    """
    words = {}
    for block in blocks(config):
        for n in range(block.depth):
            name = f"{block.name}.transformer_blocks.{n}.attn2"
            words[name] = keys_and_values(p, name, context, block.channels, block.heads)
    if config.addition_embed_type is None:
        return Condition(words)
    sizes = jnp.tile(waves(sizes, config.addition_time_embed_dim).reshape(1, -1), (len(pooled), 1))
    return Condition(words, embed(p, "add_embedding", jnp.concatenate([pooled, sizes], axis=-1), config))


def unet(p: dict, config: UNetConfig, latents, timestep, condition: Condition, attention="auto", run=None) -> jax.Array:
    """diffusers' ``UNet2DConditionModel``: noise, or what else it was trained to predict, (batch, height, width, 4).

    ``latents``, (batch, height, width, 4), have as much variance as DDIM's at the timestep, which is one for all or
    (batch,). ``run`` runs a block, as ``run_block`` does. A side that cannot be halved raises ``ValueError``.
    """
    halvings = len(config.block_out_channels) - 1
    if any(side % 2**halvings for side in latents.shape[1:3]):
        sides = " × ".join(map(str, latents.shape[1:3]))
        raise ValueError(f"Latents of {sides} cannot be halved {halvings} times: choose multiples of {2**halvings}.")
    timesteps = jnp.broadcast_to(timestep, len(latents))
    time = embed(p, "time_embedding", waves(timesteps, config.block_out_channels[0]), config)
    if condition.whole is not None:
        time += condition.whole
    x, kept = latents, []
    for block in blocks(config):
        if block.join:
            x = jnp.concatenate([x, kept.pop()], axis=-1)
        x = (run or run_block)(p, config, block, x, time, condition, attention)
        if block.keep:
            kept.append(x)
    x = jax.nn.silu(group_norm(p, "conv_norm_out", x, config.norm_num_groups, config.norm_eps))
    return conv(p, "conv_out", x, config.out_channels)


def run_block(p: dict, config: UNetConfig, block: Block, x: jax.Array, time, condition, attention) -> jax.Array:
    """One block: (batch, height, width, any number) to (batch, height, width, ``block.channels``)."""
    match block.kind:
        case "residual":
            return residual(p, block.name, x, block.channels, config.norm_num_groups, config.norm_eps, time)
        case "transformer":
            return transformer(p, config, block, x, condition, attention)
        case "downsample":
            return conv(p, block.name, x, block.channels, stride=2)
        case "upsample":
            return conv(p, block.name, upsample(x), block.channels)
        case "conv":
            return conv(p, block.name, x, block.channels)


def transformer(p: dict, config: UNetConfig, block: Block, x: jax.Array, condition, attention) -> jax.Array:
    """diffusers' ``Transformer2DModel``: pixels look at pixels, then at the text; (batch, height, width, channels)."""
    project = linear if config.use_linear_projection else lambda *inputs: conv(*inputs, size=1)
    upcast, channels = config.upcast_attention, block.channels
    y = group_norm(p, f"{block.name}.norm", x, config.norm_num_groups, TRANSFORMER_EPSILON)
    y = project(p, f"{block.name}.proj_in", y, channels).reshape(len(x), -1, channels)  # (batch, pixels, channels)
    for n in range(block.depth):
        name = f"{block.name}.transformer_blocks.{n}"
        z = layer_norm(p, f"{name}.norm1", y)
        pixels = keys_and_values(p, f"{name}.attn1", z, channels, block.heads)
        y += attend(p, f"{name}.attn1", z, *pixels, attention, upcast=upcast)
        z = layer_norm(p, f"{name}.norm2", y)
        y += attend(p, f"{name}.attn2", z, *condition.words[f"{name}.attn2"], attention, upcast=upcast)
        z = linear(p, f"{name}.ff.net.0.proj", layer_norm(p, f"{name}.norm3", y), 8 * channels)
        z, gate = jnp.split(z, 2, axis=-1)  # diffusers' GEGLU
        y += linear(p, f"{name}.ff.net.2", z * layers.gelu(gate), channels)
    return x + project(p, f"{block.name}.proj_out", y.reshape(x.shape), channels)


def embed(p: dict, name: str, x: jax.Array, config: UNetConfig) -> jax.Array:
    """diffusers' ``TimestepEmbedding``: two linear layers, to 4 times the channels of the first level."""
    width = 4 * config.block_out_channels[0]
    return linear(p, f"{name}.linear_2", jax.nn.silu(linear(p, f"{name}.linear_1", x, width)), width)


def waves(numbers: jax.Array, width: int) -> jax.Array:
    """diffusers' ``get_timestep_embedding``: (n,) to cosines and sines at falling frequencies, float32, (n, width)."""
    frequencies = 10_000.0 ** -(jnp.arange(width // 2, dtype=jnp.float32) / (width // 2))
    angles = numbers.astype(jnp.float32)[:, None] * frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)
