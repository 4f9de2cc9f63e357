"""The VAE of both models: from images to latents and back.

Latents have fewer pixels than an image, an eighth of its height and width with four levels, and a
few channels. What a model makes of them, numbers of variance 1 or tokens, is its own.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from course.model.attention import attend, keys_and_values
from course.model.layers import (
    Parameter,
    conv,
    conv_parameters,
    group_norm,
    linear_parameters,
    norm_parameters,
    residual,
    residual_parameters,
    upsample,
    within,
)

EPSILON = 1e-6  # of all group norms

# What the original release calls the layers of an attention.
ORIGINAL_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}


@dataclass(frozen=True)
class AutoencoderConfig:
    """What an autoencoder's configuration says of its sizes; each model's has more."""

    in_channels: int = 3
    out_channels: int = 3
    block_out_channels: tuple[int, ...] = (64,)  # of each level, from the image down
    decoder_block_out_channels: tuple[int, ...] | None = None  # None: the same
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32


def autoencoder_parameters(config: AutoencoderConfig) -> dict[str, Parameter]:
    """Return shapes and logical axes of the parameters, by name."""
    latents = config.latent_channels
    few = (None, None)  # too few channels to be split
    return {
        **within("encoder", _encoder_parameters(config)),
        **within("quant_conv", conv_parameters(2 * latents, 2 * latents, size=1, axes=few)),
        **within("post_quant_conv", conv_parameters(latents, latents, size=1, axes=few)),
        **within("decoder", _decoder_parameters(config)),
    }


def _encoder_parameters(config: AutoencoderConfig) -> dict[str, Parameter]:
    channels = config.block_out_channels
    inputs = channels[0]
    declared = within(
        "conv_in", conv_parameters(config.in_channels, inputs, axes=(None, "outputs"))
    )
    for level, outputs in enumerate(channels):
        name = f"down_blocks.{level}"
        for n in range(config.layers_per_block):
            declared |= within(f"{name}.resnets.{n}", residual_parameters(inputs, outputs))
            inputs = outputs
        if level < len(channels) - 1:
            declared |= within(f"{name}.downsamplers.0.conv", conv_parameters(outputs, outputs))
    declared |= within("mid_block", _middle_parameters(inputs))
    declared |= within("conv_norm_out", norm_parameters(inputs))
    last = conv_parameters(inputs, 2 * config.latent_channels, axes=(None, None))
    return declared | within("conv_out", last)


def _decoder_parameters(config: AutoencoderConfig) -> dict[str, Parameter]:
    channels = (config.decoder_block_out_channels or config.block_out_channels)[::-1]
    inputs = channels[0]
    declared = within(
        "conv_in", conv_parameters(config.latent_channels, inputs, axes=(None, "outputs"))
    )
    declared |= within("mid_block", _middle_parameters(inputs))
    for level, outputs in enumerate(channels):
        name = f"up_blocks.{level}"
        for n in range(config.layers_per_block + 1):
            declared |= within(f"{name}.resnets.{n}", residual_parameters(inputs, outputs))
            inputs = outputs
        if level < len(channels) - 1:
            declared |= within(f"{name}.upsamplers.0.conv", conv_parameters(outputs, outputs))
    declared |= within("conv_norm_out", norm_parameters(inputs))
    last = conv_parameters(inputs, config.out_channels, axes=(None, None))
    return declared | within("conv_out", last)


def _middle_parameters(channels: int) -> dict[str, Parameter]:
    declared = within("resnets.0", residual_parameters(channels, channels))
    declared |= within("attentions.0.group_norm", norm_parameters(channels))
    for name in ("to_q", "to_k", "to_v", "to_out.0"):
        # Not by heads, as other attentions: there is only one.
        declared |= within(f"attentions.0.{name}", linear_parameters(channels, channels))
    return declared | within("resnets.1", residual_parameters(channels, channels))


def encode_latents(
    p: dict, config: AutoencoderConfig, images: jax.Array, attention: str | Callable = "automatic"
) -> tuple[jax.Array, jax.Array]:
    """Return mean and standard deviation of the latents of images.

    Images are from 0 to 1, (batch, height, width, 3). Both results are (batch, height / 8,
    width / 8, latent channels), float32.

    Raises
    ------
    ValueError
        If images are whole numbers, or go beyond 0 to 1. While a program is traced, its values are
        not known: then the latents of such an image are NaN.
    """
    if not jnp.issubdtype(images.dtype, jnp.floating):
        raise ValueError(
            f"Images are numbers from 0 to 1, and these are {images.dtype}: divide them by 255."
        )
    are_right = jnp.all((images >= 0) & (images <= 1), axis=(1, 2, 3))  # which NaN is not
    if not isinstance(are_right, jax.core.Tracer) and not are_right.all():
        least, most = np.min(images), np.max(images)  # NaN if one is, where XLA's may be infinite
        raise ValueError(
            f"Images are numbers from 0 to 1, and these go from {least} to {most}: divide bytes by "
            "255."
        )
    levels = len(config.block_out_channels)
    groups = config.norm_num_groups
    with jax.named_scope("encoder"):
        x = conv(p, "encoder.conv_in", 2 * images - 1)
        for level in range(levels):
            name = f"encoder.down_blocks.{level}"
            for n in range(config.layers_per_block):
                x = residual(p, f"{name}.resnets.{n}", x, groups, EPSILON)
            if level < levels - 1:
                # Zeros come below and on the right only, where a UNet has them on all sides.
                x = conv(p, f"{name}.downsamplers.0.conv", x, stride=2, padding=(0, 1))
        x = _middle(p, "encoder.mid_block", x, groups, attention)
        x = jax.nn.silu(group_norm(p, "encoder.conv_norm_out", x, groups, EPSILON))
        x = conv(p, "encoder.conv_out", x)
        x = conv(p, "quant_conv", x).astype(jnp.float32)
        x = jnp.where(are_right[:, None, None, None], x, jnp.nan)
        mean, log_variance = jnp.split(x, 2, axis=-1)
        return mean, jnp.exp(log_variance.clip(-30, 20) / 2)


def decode_latents(
    p: dict,
    config: AutoencoderConfig,
    latents: jax.Array,
    attention: str | Callable = "automatic",
    clip: bool = True,
    tile: int | None = None,
) -> jax.Array:
    """Return the images of latents.

    Latents, as the encoder gives them, are (batch, height, width, latent channels). Images are from
    0 to 1, (batch, 8 height, 8 width, 3), float32. Training leaves ``clip`` out: what is clipped
    has no gradient. With ``tile``, see `decode_in_tiles`.
    """
    if tile is not None:

        def decode_one(latents: jax.Array) -> jax.Array:
            return decode_latents(p, config, latents, attention, clip=False)

        images = decode_in_tiles(decode_one, latents, tile)
        return images.clip(0, 1) if clip else images
    levels = len(config.block_out_channels)
    groups = config.norm_num_groups
    with jax.named_scope("decoder"):
        x = conv(p, "post_quant_conv", latents)
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
        images = x.astype(jnp.float32) / 2 + 0.5
        return images.clip(0, 1) if clip else images


def check_tile(tile: int) -> None:
    """Raise ``ValueError`` unless a tile can have so many latents along a side."""
    if tile < 4:
        raise ValueError(f"A tile has {tile} latents along a side: give 4 or more.")


def decode_in_tiles(
    decode: Callable[[jax.Array], jax.Array], latents: jax.Array, tile: int
) -> jax.Array:
    """Decode one tile of an image after another, so that no more memory is taken than for a tile.

    Tiles overlap by a quarter, and there one passes into the next, as in diffusers'
    ``AutoencoderKL.enable_tiling``. What a decoder finds out about the whole image, its norms and
    its attention find out about a tile here, so images differ a little.

    Parameters
    ----------
    decode : callable
        From latents to images.
    latents : jax.Array
        (batch, height, width, channels).
    tile : int
        Latents along each side of a tile, at least 4.

    Returns
    -------
    jax.Array
        Images, as ``decode`` returns them for all latents.
    """
    check_tile(tile)
    batch, *sides, channels = latents.shape
    tile_sides = [min(tile, side) for side in sides]
    overlap = tile // 4
    starts = [
        sorted({*range(0, side - size, tile - overlap), side - size})
        for side, size in zip(sides, tile_sides, strict=True)
    ]
    of_tile = jax.eval_shape(
        decode, jax.ShapeDtypeStruct((batch, *tile_sides, channels), latents.dtype)
    )
    scale = of_tile.shape[1] // tile_sides[0]
    # From 1 at an edge to more, over as many pixels as tiles overlap by.
    ramps = []
    for size in tile_sides:
        place = jnp.arange(scale * size)
        ramps.append(jnp.minimum(1 + jnp.minimum(place, place[::-1]), scale * overlap))
    weight = (ramps[0][:, None] * ramps[1]).astype(of_tile.dtype)[None, :, :, None]

    def add(sums: tuple, start: jax.Array) -> tuple:
        row, column = start
        part = jax.lax.dynamic_slice(latents, (0, row, column, 0), (batch, *tile_sides, channels))
        corner = (0, scale * row, scale * column, 0)
        added = []
        for total, new in zip(sums, (decode(part) * weight, weight), strict=True):
            old = jax.lax.dynamic_slice(total, corner, new.shape)
            added.append(jax.lax.dynamic_update_slice(total, old + new, corner))
        return tuple(added), None

    height, width = (scale * side for side in sides)
    images = jnp.zeros((batch, height, width, of_tile.shape[-1]), of_tile.dtype)
    weights = jnp.zeros((1, height, width, 1), of_tile.dtype)
    corners = jnp.array([(row, column) for row in starts[0] for column in starts[1]])
    (images, weights), _ = jax.lax.scan(add, (images, weights), corners)
    return images / weights


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


def name_original(name: str, config: AutoencoderConfig) -> str:
    """Return what a parameter is called in the files that Stable Diffusion was released in.

    >>> name_original("decoder.mid_block.resnets.0.conv1.bias", AutoencoderConfig())
    'decoder.mid.block_1.conv1.bias'
    """
    if match := re.fullmatch(r"(.+\.)mid_block\.resnets\.(\d+)\.(.+)", name):
        part, n, rest = match.groups()
        name = f"{part}mid.block_{int(n) + 1}.{rest}"
    elif match := re.fullmatch(r"(.+\.)mid_block\.attentions\.0\.(.+)\.(\w+)", name):
        part, layer, kind = match.groups()
        name = f"{part}mid.attn_1.{ORIGINAL_ATTENTION[layer]}.{kind}"
    elif match := re.fullmatch(r"(.+\.)(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name):
        part, way, level, list_name, n, rest = match.groups()
        if way == "up":  # their levels count from the image on, on both ways
            level = len(config.block_out_channels) - 1 - int(level)
        if list_name == "resnets":
            name = f"{part}{way}.{level}.block.{n}.{rest}"
        else:
            name = f"{part}{way}.{level}.{way}sample.{rest}"
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
