"""The VAE: from images to tokens and back.

Latents have an eighth of an image's height and width. Of each 2 x 2 of them the transformer gets
one token, whose channels the batch norm's statistics bring to the mean 0 and the variance 1.
"""

import jax
import jax.numpy as jnp

from course.flux2.configs import VAEConfig
from course.flux2.layers import (
    Parameter,
    attention,
    conv,
    conv_parameters,
    group_norm,
    group_norm_parameters,
    linear,
    within,
)


def vae_parameters(config: VAEConfig) -> dict[str, Parameter]:
    """Shapes and logical axes of the VAE's parameters, by name."""
    latents = config.latent_channels
    channels = config.block_out_channels
    found = within("encoder.conv_in", conv_parameters(config.in_channels, channels[0]))
    inputs = channels[0]
    for level, outputs in enumerate(channels):
        name = f"encoder.down_blocks.{level}"
        for n in range(config.layers_per_block):
            found |= within(f"{name}.resnets.{n}", _residual_parameters(inputs, outputs))
            inputs = outputs
        if level < len(channels) - 1:
            found |= within(f"{name}.downsamplers.0.conv", conv_parameters(inputs, inputs))
    found |= within("encoder.mid_block", _middle_parameters(inputs))
    found |= within("encoder.conv_norm_out", group_norm_parameters(inputs))
    found |= within("encoder.conv_out", conv_parameters(inputs, 2 * latents))
    found |= within("quant_conv", conv_parameters(2 * latents, 2 * latents, size=1))

    found |= within("post_quant_conv", conv_parameters(latents, latents, size=1))
    channels = (config.decoder_block_out_channels or config.block_out_channels)[::-1]
    inputs = channels[0]
    found |= within("decoder.conv_in", conv_parameters(latents, inputs))
    found |= within("decoder.mid_block", _middle_parameters(inputs))
    for level, outputs in enumerate(channels):
        name = f"decoder.up_blocks.{level}"
        for n in range(config.layers_per_block + 1):
            found |= within(f"{name}.resnets.{n}", _residual_parameters(inputs, outputs))
            inputs = outputs
        if level < len(channels) - 1:
            found |= within(f"{name}.upsamplers.0.conv", conv_parameters(inputs, inputs))
    found |= within("decoder.conv_norm_out", group_norm_parameters(inputs))
    found |= within("decoder.conv_out", conv_parameters(inputs, config.out_channels))

    statistics = Parameter((latents * config.patch_size[0] * config.patch_size[1],), (None,))
    return found | within("bn", {"running_mean": statistics, "running_var": statistics})


def _residual_parameters(inputs: int, outputs: int) -> dict[str, Parameter]:
    found = within("norm1", group_norm_parameters(inputs))
    found |= within("conv1", conv_parameters(inputs, outputs))
    found |= within("norm2", group_norm_parameters(outputs))
    found |= within("conv2", conv_parameters(outputs, outputs))
    if inputs != outputs:
        found |= within("conv_shortcut", conv_parameters(inputs, outputs, size=1))
    return found


def _middle_parameters(channels: int) -> dict[str, Parameter]:
    found = within("resnets.0", _residual_parameters(channels, channels))
    found |= within("resnets.1", _residual_parameters(channels, channels))
    found |= within("attentions.0.group_norm", group_norm_parameters(channels))
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        layer = {
            "weight": Parameter((channels, channels), (None, None)),
            "bias": Parameter((channels,), (None,)),
        }
        found |= within(f"attentions.0.{name}", layer)
    return found


def encode(p: dict, config: VAEConfig, images: jax.Array) -> jax.Array:
    """diffusers' ``AutoencoderKLFlux2.encode`` and what its pipelines do then: images to tokens.

    Images are from 0 to 1, float, (batch, height, width, 3). The tokens are (batch, tokens,
    channels), float32, row by row.

    Raises
    ------
    ValueError
        If images are whole numbers.
    """
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"Images are numbers from 0 to 1, and these are {images.dtype}: divide them by 255."
        )
    groups = config.norm_num_groups
    levels = len(config.block_out_channels)
    with jax.named_scope("encoder"):
        x = conv(p, "encoder.conv_in", 2 * images - 1)
        for level in range(levels):
            name = f"encoder.down_blocks.{level}"
            for n in range(config.layers_per_block):
                x = _residual(p, f"{name}.resnets.{n}", x, groups)
            if level < levels - 1:
                # Zeros come below and on the right only.
                x = conv(p, f"{name}.downsamplers.0.conv", x, stride=2, padding=(0, 1))
        x = _middle(p, "encoder.mid_block", x, groups)
        x = jax.nn.silu(group_norm(p, "encoder.conv_norm_out", x, groups))
        x = conv(p, "quant_conv", conv(p, "encoder.conv_out", x)).astype(jnp.float32)
        mean, _ = jnp.split(x, 2, axis=-1)  # the other half is the logarithm of the variance
        mean_of_all, deviation = _statistics(p, config)
        return (pack(mean, config) - mean_of_all) / deviation


def decode(p: dict, config: VAEConfig, tokens: jax.Array, height: int, width: int) -> jax.Array:
    """Tokens to images, and ``AutoencoderKLFlux2.decode`` on the way.

    Tokens are (batch, tokens, channels), and height and width the image's in pixels. Images are
    from 0 to 1, (batch, height, width, 3), float32.
    """
    groups = config.norm_num_groups
    levels = len(config.block_out_channels)
    with jax.named_scope("decoder"):
        mean_of_all, deviation = _statistics(p, config)
        x = unpack(tokens * deviation + mean_of_all, config, height, width)
        x = conv(p, "decoder.conv_in", conv(p, "post_quant_conv", x))
        x = _middle(p, "decoder.mid_block", x, groups)
        for level in range(levels):
            name = f"decoder.up_blocks.{level}"
            for n in range(config.layers_per_block + 1):
                x = _residual(p, f"{name}.resnets.{n}", x, groups)
            if level < levels - 1:
                x = x.repeat(2, axis=1).repeat(2, axis=2)
                x = conv(p, f"{name}.upsamplers.0.conv", x)
        x = jax.nn.silu(group_norm(p, "decoder.conv_norm_out", x, groups))
        x = conv(p, "decoder.conv_out", x)
        return (x.astype(jnp.float32) / 2 + 0.5).clip(0, 1)


def pack(latents: jax.Array, config: VAEConfig) -> jax.Array:
    """One token of each 2 x 2 latents.

    From (batch, height, width, channels) to (batch, height / 2 * width / 2, 4 * channels); first
    come the four values of the first channel.
    """
    batch, height, width, channels = latents.shape
    rows, columns = config.patch_size
    x = latents.reshape(batch, height // rows, rows, width // columns, columns, channels)
    x = x.transpose(0, 1, 3, 5, 2, 4)  # (batch, height / 2, width / 2, channels, 2, 2)
    return x.reshape(batch, -1, channels * rows * columns)


def unpack(tokens: jax.Array, config: VAEConfig, height: int, width: int) -> jax.Array:
    """The reverse of ``pack``, for an image of so many pixels."""
    batch, _, channels = tokens.shape
    rows, columns = config.patch_size
    down = config.pixels_per_token // rows  # pixels to a latent
    high, wide = height // (down * rows), width // (down * columns)
    x = tokens.reshape(batch, high, wide, channels // (rows * columns), rows, columns)
    x = x.transpose(0, 1, 4, 2, 5, 3)  # (batch, height / 2, 2, width / 2, 2, channels)
    return x.reshape(batch, high * rows, wide * columns, -1)


def _statistics(p: dict, config: VAEConfig) -> tuple[jax.Array, jax.Array]:
    """Mean and standard deviation of each of a token's channels, over many images."""
    variance = p["bn.running_var"].astype(jnp.float32)
    deviation = jnp.sqrt(variance + config.batch_norm_eps)
    return p["bn.running_mean"].astype(jnp.float32), deviation


def _residual(p: dict, name: str, x: jax.Array, groups: int) -> jax.Array:
    """diffusers' ``ResnetBlock2D``: two convolutions, whose result is added to the input."""
    y = conv(p, f"{name}.conv1", jax.nn.silu(group_norm(p, f"{name}.norm1", x, groups)))
    y = conv(p, f"{name}.conv2", jax.nn.silu(group_norm(p, f"{name}.norm2", y, groups)))
    if f"{name}.conv_shortcut.weight" in p:
        x = conv(p, f"{name}.conv_shortcut", x)
    return x + y


def _middle(p: dict, name: str, x: jax.Array, groups: int) -> jax.Array:
    """diffusers' ``UNetMidBlock2D``: each pixel looks at all others, with one head."""
    x = _residual(p, f"{name}.resnets.0", x, groups)
    layer = f"{name}.attentions.0"
    y = group_norm(p, f"{layer}.group_norm", x, groups)
    y = y.reshape(len(x), -1, 1, x.shape[-1])  # (batch, pixels, heads, channels)
    query, key, value = (linear(p, f"{layer}.{part}", y) for part in ("to_q", "to_k", "to_v"))
    seen = linear(p, f"{layer}.to_out.0", attention(query, key, value))
    return _residual(p, f"{name}.resnets.1", x + seen.reshape(x.shape), groups)
