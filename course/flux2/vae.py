"""The VAE: from images to tokens and back.

Latents have an eighth of an image's height and width. Of each 2 x 2 of them the transformer gets
one token, whose channels the batch norm's statistics bring to the mean 0 and the variance 1.
"""

import functools

import jax
import jax.numpy as jnp

from course.flux2.configs import VAEConfig
from course.model.attention import automatic
from course.model.autoencoder import autoencoder_parameters, decode_latents, encode_latents
from course.model.layers import Parameter, within

# In bfloat16, too: the softmax is over all pixels of an image.
SCORES_IN_FLOAT32 = functools.partial(automatic, score_dtype=jnp.float32)


def vae_parameters(config: VAEConfig) -> dict[str, Parameter]:
    """Return shapes and logical axes of the VAE's parameters, by name."""
    statistics = Parameter(
        (config.latent_channels * config.patch_size[0] * config.patch_size[1],), (None,)
    )
    return {
        **autoencoder_parameters(config),
        **within("bn", {"running_mean": statistics, "running_var": statistics}),
    }


def encode(p: dict, config: VAEConfig, images: jax.Array) -> jax.Array:
    """diffusers' ``AutoencoderKLFlux2.encode`` and what its pipelines do then: images to tokens.

    Images are from 0 to 1, float, (batch, height, width, 3). The tokens are (batch, tokens,
    channels), float32, row by row.

    Raises
    ------
    ValueError
        If images are whole numbers.
    """
    latents, _ = encode_latents(p, config, images, attention=SCORES_IN_FLOAT32)
    mean, deviation = _statistics(p, config)
    return (pack(latents, config) - mean) / deviation


def decode(
    p: dict,
    config: VAEConfig,
    tokens: jax.Array,
    height: int,
    width: int,
    tile: int | None = None,
) -> jax.Array:
    """Turn tokens into images, with ``AutoencoderKLFlux2.decode`` on the way.

    Tokens are (batch, tokens, channels), and height and width the image's in pixels. Images are
    from 0 to 1, (batch, height, width, 3), float32. With ``tile``, see
    ``course.model.autoencoder.decode_in_tiles``.
    """
    mean, deviation = _statistics(p, config)
    latents = unpack(tokens * deviation + mean, config, height, width)
    return decode_latents(p, config, latents, attention=SCORES_IN_FLOAT32, tile=tile)


def pack(latents: jax.Array, config: VAEConfig) -> jax.Array:
    """Make one token of each 2 x 2 latents.

    From (batch, height, width, channels) to (batch, height / 2 * width / 2, 4 * channels); first
    come the four values of the first channel.
    """
    batch, height, width, channels = latents.shape
    rows, columns = config.patch_size
    x = latents.reshape(batch, height // rows, rows, width // columns, columns, channels)
    x = x.transpose(0, 1, 3, 5, 2, 4)  # (batch, height / 2, width / 2, channels, 2, 2)
    return x.reshape(batch, -1, channels * rows * columns)


def unpack(tokens: jax.Array, config: VAEConfig, height: int, width: int) -> jax.Array:
    """Do the reverse of ``pack``, for an image of so many pixels."""
    batch, _, channels = tokens.shape
    rows, columns = config.patch_size
    down = config.pixels_per_token // rows  # pixels to a latent
    high, wide = height // (down * rows), width // (down * columns)
    x = tokens.reshape(batch, high, wide, channels // (rows * columns), rows, columns)
    x = x.transpose(0, 1, 4, 2, 5, 3)  # (batch, height / 2, 2, width / 2, 2, channels)
    return x.reshape(batch, high * rows, wide * columns, -1)


def _statistics(p: dict, config: VAEConfig) -> tuple[jax.Array, jax.Array]:
    """Return mean and standard deviation of each of a token's channels, over many images."""
    variance = p["bn.running_var"].astype(jnp.float32)
    deviation = jnp.sqrt(variance + config.batch_norm_eps)
    return p["bn.running_mean"].astype(jnp.float32), deviation
