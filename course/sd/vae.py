"""The VAE: from images to latents and back.

Latents have an eighth of an image's height and width, and 4 channels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from course.sd.attention import attend, attention_parameters, keys_and_values
from course.sd.configs import VAEConfig
from course.sd.layers import (
    Parameter,
    conv,
    conv_parameters,
    group_norm,
    norm_parameters,
    residual,
    residual_parameters,
    upsample,
    within,
)

EPSILON = 1e-6


def vae_parameters(config: VAEConfig) -> dict[str, Parameter]:
    """Shapes and logical axes of the VAE's parameters, by name."""
    channels = config.block_out_channels
    latents = config.latent_channels
    few = (None, None)  # too few channels to be split
    found = within(
        "encoder.conv_in", conv_parameters(config.in_channels, channels[0], axes=(None, "outputs"))
    )
    inputs = channels[0]
    for level, features in enumerate(channels):
        name = f"encoder.down_blocks.{level}"
        for n in range(config.layers_per_block):
            found |= within(f"{name}.resnets.{n}", residual_parameters(inputs, features))
            inputs = features
        if level < len(channels) - 1:
            found |= within(f"{name}.downsamplers.0.conv", conv_parameters(features, features))
    found |= within("encoder.mid_block", _middle_parameters(inputs))
    found |= within("encoder.conv_norm_out", norm_parameters(inputs))
    found |= within("encoder.conv_out", conv_parameters(inputs, 2 * latents, axes=few))
    found |= within("quant_conv", conv_parameters(2 * latents, 2 * latents, size=1, axes=few))

    found |= within("post_quant_conv", conv_parameters(latents, latents, size=1, axes=few))
    inputs = channels[-1]
    found |= within("decoder.conv_in", conv_parameters(latents, inputs, axes=(None, "outputs")))
    found |= within("decoder.mid_block", _middle_parameters(inputs))
    for level, features in enumerate(channels[::-1]):
        name = f"decoder.up_blocks.{level}"
        for n in range(config.layers_per_block + 1):
            found |= within(f"{name}.resnets.{n}", residual_parameters(inputs, features))
            inputs = features
        if level < len(channels) - 1:
            found |= within(f"{name}.upsamplers.0.conv", conv_parameters(features, features))
    found |= within("decoder.conv_norm_out", norm_parameters(inputs))
    return found | within(
        "decoder.conv_out", conv_parameters(inputs, config.out_channels, axes=few)
    )


def _middle_parameters(channels: int) -> dict[str, Parameter]:
    return {
        **within("resnets.0", residual_parameters(channels, channels)),
        **within("attentions.0.group_norm", norm_parameters(channels)),
        **within("attentions.0", attention_parameters(channels, bias=True)),
        **within("resnets.1", residual_parameters(channels, channels)),
    }


def encode(
    p: dict, config: VAEConfig, images: jax.Array, attention: str | Callable = "plain"
) -> tuple[jax.Array, jax.Array]:
    """diffusers' ``AutoencoderKL.encode``: images to latents.

    Images are from 0 to 1, (batch, height, width, 3). It returns the mean and the standard
    deviation of the latents, as the UNet has them, both (batch, height / 8, width / 8, 4), float32.
    """
    levels = len(config.block_out_channels)
    groups = config.norm_num_groups
    x = conv(p, "encoder.conv_in", 2 * images - 1)
    for level in range(levels):
        name = f"encoder.down_blocks.{level}"
        for n in range(config.layers_per_block):
            x = residual(p, f"{name}.resnets.{n}", x, groups, EPSILON)
        if level < levels - 1:
            # Zeros come below and on the right only, where the UNet has them on all sides.
            x = conv(p, f"{name}.downsamplers.0.conv", x, stride=2, padding=(0, 1))
    x = _middle(p, "encoder.mid_block", x, groups, attention)
    x = jax.nn.silu(group_norm(p, "encoder.conv_norm_out", x, groups, EPSILON))
    x = conv(p, "encoder.conv_out", x)
    x = conv(p, "quant_conv", x).astype(jnp.float32)
    mean, log_variance = jnp.split(x, 2, axis=-1)
    deviation = jnp.exp(log_variance.clip(-30, 20) / 2)
    return mean * config.scaling_factor, deviation * config.scaling_factor


def decode(
    p: dict, config: VAEConfig, latents: jax.Array, attention: str | Callable = "plain"
) -> jax.Array:
    """diffusers' ``AutoencoderKL.decode``: latents to images.

    Latents are (batch, height, width, 4). Images are from 0 to 1, (batch, 8 height, 8 width, 3),
    float32.
    """
    levels = len(config.block_out_channels)
    groups = config.norm_num_groups
    with jax.named_scope("decoder"):
        x = latents / config.scaling_factor
        x = conv(p, "post_quant_conv", x)
        x = conv(p, "decoder.conv_in", x)
        x = _middle(p, "decoder.mid_block", x, groups, attention)
        for level in range(levels):
            name = f"decoder.up_blocks.{level}"
            for n in range(config.layers_per_block + 1):
                x = residual(p, f"{name}.resnets.{n}", x, groups, EPSILON)
            if level < levels - 1:
                x = conv(p, f"{name}.upsamplers.0.conv", upsample(x))
        x = jax.nn.silu(group_norm(p, "decoder.conv_norm_out", x, groups, EPSILON))
        x = conv(p, "decoder.conv_out", x)
        return (x.astype(jnp.float32) / 2 + 0.5).clip(0, 1)


def _middle(p: dict, name: str, x: jax.Array, groups: int, attention: str | Callable) -> jax.Array:
    """diffusers' ``UNetMidBlock2D``: each pixel looks at all others, with one head.

    From (batch, height, width, channels) to the same shape.
    """
    channels = x.shape[-1]
    x = residual(p, f"{name}.resnets.0", x, groups, EPSILON)
    layer = f"{name}.attentions.0"
    y = group_norm(p, f"{layer}.group_norm", x, groups, EPSILON)
    y = y.reshape(len(x), -1, channels)  # (batch, pixels, channels)
    key, value = keys_and_values(p, layer, y, heads=1)
    y = attend(p, layer, y, key, value, attention)
    x += y.reshape(x.shape)
    return residual(p, f"{name}.resnets.1", x, groups, EPSILON)
