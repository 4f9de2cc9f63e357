"""The VAE: from images to latents and back.

Latents have an eighth of an image's height and width, and 4 channels.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from stable_diffusion.attention import attend, keys_and_values
from stable_diffusion.configs import VAEConfig
from stable_diffusion.layers import conv, group_norm, residual, upsample

EPSILON = 1e-6


def encode(
    p: dict, config: VAEConfig, images: jax.Array, attention: str | Callable = "auto"
) -> tuple[jax.Array, jax.Array]:
    """diffusers' ``AutoencoderKL.encode``: images to latents.

    Images are from 0 to 1, (batch, height, width, 3). It returns the mean and the standard
    deviation of the latents, as the UNet has them, both (batch, height / 8, width / 8, 4), float32.
    """
    channels = config.block_out_channels
    groups = config.norm_num_groups
    x = conv(p, "encoder.conv_in", 2 * images - 1, channels[0])
    for level, features in enumerate(channels):
        name = f"encoder.down_blocks.{level}"
        for n in range(config.layers_per_block):
            x = residual(p, f"{name}.resnets.{n}", x, features, groups, EPSILON)
        if level < len(channels) - 1:
            # Zeros come below and on the right only, where the UNet has them on all sides.
            x = conv(p, f"{name}.downsamplers.0.conv", x, features, stride=2, padding=(0, 1))
    x = _middle(p, "encoder.mid_block", x, groups, attention)
    x = jax.nn.silu(group_norm(p, "encoder.conv_norm_out", x, groups, EPSILON))
    x = conv(p, "encoder.conv_out", x, 2 * config.latent_channels)
    x = conv(p, "quant_conv", x, 2 * config.latent_channels, size=1).astype(jnp.float32)
    mean, log_variance = jnp.split(x, 2, axis=-1)
    deviation = jnp.exp(log_variance.clip(-30, 20) / 2)
    return mean * config.scaling_factor, deviation * config.scaling_factor


def decode(
    p: dict, config: VAEConfig, latents: jax.Array, attention: str | Callable = "auto"
) -> jax.Array:
    """diffusers' ``AutoencoderKL.decode``: latents to images.

    Latents are (batch, height, width, 4). Images are from 0 to 1, (batch, 8 height, 8 width, 3),
    float32.
    """
    channels = config.block_out_channels[::-1]
    groups = config.norm_num_groups
    with jax.named_scope("decoder"):
        x = latents / config.scaling_factor
        x = conv(p, "post_quant_conv", x, config.latent_channels, size=1)
        x = conv(p, "decoder.conv_in", x, channels[0])
        x = _middle(p, "decoder.mid_block", x, groups, attention)
        for level, features in enumerate(channels):
            name = f"decoder.up_blocks.{level}"
            for n in range(config.layers_per_block + 1):
                x = residual(p, f"{name}.resnets.{n}", x, features, groups, EPSILON)
            if level < len(channels) - 1:
                x = conv(p, f"{name}.upsamplers.0.conv", upsample(x), features)
        x = jax.nn.silu(group_norm(p, "decoder.conv_norm_out", x, groups, EPSILON))
        x = conv(p, "decoder.conv_out", x, config.out_channels)
        return (x.astype(jnp.float32) / 2 + 0.5).clip(0, 1)


def _middle(p: dict, name: str, x: jax.Array, groups: int, attention: str | Callable) -> jax.Array:
    """diffusers' ``UNetMidBlock2D``: each pixel looks at all others, with one head.

    From (batch, height, width, channels) to the same shape.
    """
    channels = x.shape[-1]
    x = residual(p, f"{name}.resnets.0", x, channels, groups, EPSILON)
    layer = f"{name}.attentions.0"
    y = group_norm(p, f"{layer}.group_norm", x, groups, EPSILON)
    y = y.reshape(len(x), -1, channels)  # (batch, pixels, channels)
    key, value = keys_and_values(p, layer, y, channels, heads=1, bias=True)
    y = attend(p, layer, y, key, value, attention, bias=True)
    x += y.reshape(x.shape)
    return residual(p, f"{name}.resnets.1", x, channels, groups, EPSILON)
