"""Stable Diffusion's VAE: its latents have 4 channels, and are scaled to about the variance 1."""

from collections.abc import Callable

import jax

from course.model.autoencoder import decode_latents, encode_latents
from course.sd.configs import VAEConfig


def encode(
    p: dict, config: VAEConfig, images: jax.Array, attention: str | Callable = "automatic"
) -> tuple[jax.Array, jax.Array]:
    """diffusers' ``AutoencoderKL.encode``: images to latents.

    Images are from 0 to 1, (batch, height, width, 3). It returns the mean and the standard
    deviation of the latents, as the UNet has them, both (batch, height / 8, width / 8, 4), float32.
    """
    mean, deviation = encode_latents(p, config, images, attention)
    return mean * config.scaling_factor, deviation * config.scaling_factor


def decode(
    p: dict,
    config: VAEConfig,
    latents: jax.Array,
    attention: str | Callable = "automatic",
    tile: int | None = None,
) -> jax.Array:
    """diffusers' ``AutoencoderKL.decode``: latents to images.

    Latents are (batch, height, width, 4). Images are from 0 to 1, (batch, 8 height, 8 width, 3),
    float32. With ``tile``, see ``course.model.autoencoder.decode_in_tiles``.
    """
    return decode_latents(p, config, latents / config.scaling_factor, attention, tile=tile)
