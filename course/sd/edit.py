"""Draw over images: all of them, or only what a mask says.

To draw takes all steps, from noise on. To change an image, its latents are put under as much noise
as a later step expects, and only the steps from there on are taken. ``strength`` is the share of
the steps that is taken: at 1 next to nothing is left of the image.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course.model.guidance import is_guided
from course.sd.configs import Config
from course.sd.pipeline import check_drawing, decode_images, denoise, prepare
from course.sd.samplers import mix_noise
from course.sd.vae import encode


def check_inputs(
    config: Config, images: jax.Array, strength: float, mask: jax.Array | None = None
) -> None:
    """Raise ``ValueError`` if images cannot be drawn over.

    Inside a compiled program values cannot be looked at, so call this before. The arguments are
    those of ``inpaint``.
    """
    if np.ndim(images) != 4 or np.shape(images)[-1] != 3:
        raise ValueError(
            f"The images have the shape {np.shape(images)}: give (batch, height, width, 3)."
        )
    _, height, width, _ = np.shape(images)
    multiple = config.side_multiple
    if height % multiple or width % multiple:
        raise ValueError(
            f"An image has {height} × {width} pixels: resize it to multiples of {multiple}."
        )
    least, most = np.min(images), np.max(images)
    if not (least >= 0 and most <= 1):  # which NaN is not
        raise ValueError(f"Images go from {least} to {most}: divide bytes by 255.")
    if not 0 <= strength <= 1:
        raise ValueError(f"The strength is {strength}: choose 0 to 1.")
    if mask is not None and np.shape(mask) != (height, width):
        raise ValueError(
            f"The mask has the shape {np.shape(mask)}, and images have {(height, width)}: "
            "resize it."
        )


def first_step(strength: float | jax.Array, steps: int | jax.Array) -> jax.Array:
    """Return the step to begin with, of so many: at least the last one is taken."""
    taken = jnp.int32(steps * strength)
    return jnp.clip(steps - taken, 0, steps - 1)


def image_to_image(
    params: dict,
    config: Config,
    ids: jax.Array,
    key: jax.Array,
    negative_ids: jax.Array | None,
    images: jax.Array,
    strength: float | jax.Array,
    steps: int | jax.Array = 50,
    guidance: float | jax.Array = 7.5,
    latents: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Draw over images, as diffusers' ``StableDiffusionImg2ImgPipeline`` does.

    This is ``inpaint`` without a mask, which has the same arguments and errors.

    Returns
    -------
    jax.Array
        Images from 0 to 1, float32, (batch, height, width, 3).
    """
    inputs = params, config, ids, key, negative_ids, images
    return inpaint(*inputs, None, strength, steps, guidance, latents, **options)


def inpaint(
    params: dict,
    config: Config,
    ids: jax.Array,
    key: jax.Array,
    negative_ids: jax.Array | None,
    images: jax.Array,
    mask: jax.Array | None,
    strength: float | jax.Array,
    steps: int | jax.Array = 50,
    guidance: float | jax.Array = 7.5,
    latents: jax.Array | None = None,
    *,
    unguided_below: float | jax.Array | None = None,
    sampler: str | None = None,
    attention: str | Callable = "automatic",
    guided: bool = True,
    guidance_axis: str | None = None,
    decode_batch: int | None = None,
    decode_tile: int | None = None,
) -> jax.Array:
    """Draw over images where a mask is 1, as diffusers' ``StableDiffusionInpaintPipeline`` does.

    After each step, the latents of what should stay are put back, under the noise that belongs
    there.

    Parameters
    ----------
    params, config, ids, key, negative_ids, steps, guidance, latents
        As of ``generate``. A different number of steps compiles nothing again.
    images : jax.Array
        From 0 to 1, (batch, height, width, 3), one for each prompt.
    mask : jax.Array, optional
        1 where to draw and 0 where not, (height, width), for all images; ``None`` to draw
        everywhere.
    strength : float or jax.Array
        The share of the steps that is taken, from 0 to 1. A different one compiles nothing again.
    sampler : str, optional
        "ddim", "euler" or "dpm++"; by default the model's own.
    unguided_below, attention, guided, guidance_axis, decode_batch, decode_tile
        As of ``generate``.

    Returns
    -------
    jax.Array
        Images from 0 to 1, float32, (batch, height, width, 3).

    Raises
    ------
    ValueError
        If the sampler is PNDM, which cannot start in the middle, if images are whole numbers, or as
        of ``generate``.
    """
    check_drawing(attention, decode_batch, decode_tile)
    guided = guided and is_guided(guidance)
    _, height, width, _ = images.shape
    condition, noise = prepare(
        params, config, ids, key, negative_ids, latents, height=height, width=width, guided=guided
    )
    image, _ = encode(params["vae"], config.vae, images)
    first = first_step(strength, jnp.int32(steps))
    if mask is None:
        start = image
        put_back = None
    else:
        size = config.pixels_per_latent
        draws = mask[::size, ::size, None] > 0.5  # for each latent, (height / 8, width / 8, 1)
        start = jnp.where(first == 0, 0, image)  # with all steps, it starts from noise alone

        def put_back(x: jax.Array, alpha: jax.Array) -> jax.Array:
            return jnp.where(draws, x, mix_noise(image, noise, alpha))

    latents = denoise(
        params,
        config,
        condition,
        noise,
        steps,
        guidance,
        first=first,
        image=start,
        after=put_back,
        sampler=sampler,
        unguided_below=unguided_below,
        attention=attention,
        guided=guided,
        guidance_axis=guidance_axis,
    )
    if mask is not None:
        latents = jnp.where(draws, latents, image)
    return decode_images(params, config, latents, attention, decode_batch, decode_tile)
