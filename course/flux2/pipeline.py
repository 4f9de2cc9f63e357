"""From a prompt to an image, and from an image and a prompt to another image."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2 import qwen3, sampler, transformer, vae
from course.flux2.configs import Config
from course.flux2.parameters import model_parameters
from course.flux2.tokenizer import Tokenizer
from course.model.guidance import guide, is_guided, pair, unpair
from course.model.parameters import check_parameters

REFERENCE_DISTANCE = 10  # of a reference image from the image, on the first axis of positions


def positions(rows: int, columns: int, reference: int = 0) -> np.ndarray:
    """Return where an image's tokens are, on four axes: (rows * columns, 4).

    The axes are the number of the reference image (times 10; 0 is the image itself), the row, the
    column, and the place in a text, which is 0 for images.

    >>> positions(1, 2, reference=1).tolist()
    [[10, 0, 0, 0], [10, 0, 1, 0]]
    """
    places = np.zeros((rows, columns, 4), np.int32)
    places[..., 0] = REFERENCE_DISTANCE * reference
    places[..., 1] = np.arange(rows)[:, None]
    places[..., 2] = np.arange(columns)
    return places.reshape(-1, 4)


def text_positions(tokens: int) -> np.ndarray:
    """Return where a text's tokens are, on the same axes: (tokens, 4)."""
    places = np.zeros((tokens, 4), np.int32)
    places[:, 3] = np.arange(tokens)
    return places


def encode_prompts(params: dict, config: Config, ids: jax.Array, mask: jax.Array) -> jax.Array:
    """Return what the transformer gets of prompts: (prompts, tokens, joint_attention_dim).

    ``ids`` and ``mask`` come from the tokenizer. The transformer sees the padding, too: it was
    trained so.
    """
    return qwen3.encode_text(params["text_encoder"], config.text_encoder, ids, mask)


def encode_images(params: dict, config: Config, images: jax.Array) -> jax.Array:
    """Return tokens of images, (batch, tokens, channels).

    Images are from 0 to 1, float, (batch, height, width, 3).

    Whole numbers are refused by a ``ValueError``.
    """
    return vae.encode(params["vae"], config.vae, images)


def random_tokens(key: jax.Array, config: Config, batch: int, height: int, width: int) -> jax.Array:
    """Draw noise for images of so many pixels: float32, (batch, tokens, channels)."""
    rows, columns = size_in_tokens(config, height, width)
    return jax.random.normal(key, (batch, rows * columns, config.transformer.in_channels))


def size_in_tokens(config: Config, height: int, width: int) -> tuple[int, int]:
    """Return how many rows and columns of tokens an image of so many pixels has.

    Raises
    ------
    ValueError
        If the pixels of a token do not divide the height or the width.
    """
    side = config.vae.pixels_per_token
    if height % side or width % side:
        raise ValueError(
            f"{height} x {width} pixels cannot be divided into tokens of {side} x {side} pixels: "
            f"choose multiples of {side}."
        )
    return height // side, width // side


def check_noise(noise: jax.Array, config: Config, prompts: int, height: int, width: int) -> None:
    """Raise ``ValueError`` unless noise is for so many prompts and pixels."""
    rows, columns = size_in_tokens(config, height, width)
    needed = (prompts, rows * columns, config.transformer.in_channels)
    if noise.shape != needed:
        raise ValueError(
            f"{prompts} prompts and {height} x {width} pixels need noise of the shape "
            f"{needed}, and this has {noise.shape}: make it with random_tokens."
        )


def check_images(images: jax.Array, prompts: int, height: int, width: int) -> None:
    """Raise ``ValueError`` unless so many prompts can edit images, to this size."""
    if images.shape[-3:-1] != (height, width):
        given = " x ".join(map(str, images.shape[-3:-1]))
        raise ValueError(
            f"Images to edit must have the height and width of the result, {height} x {width}, "
            f"and these have {given}: resize or crop them."
        )
    if len(images) not in (1, prompts):
        raise ValueError(
            f"There are {len(images)} images to edit and {prompts} prompts: give one image for "
            "all prompts, or one for each; several for a prompt have an axis of their own."
        )


def denoise(
    params: dict,
    config: Config,
    noise: jax.Array,
    prompt: jax.Array,
    height: int,
    width: int,
    steps: int = 4,
    guidance: float | jax.Array | None = None,
    empty: jax.Array | None = None,
    reference: jax.Array | None = None,
    shift: float | None = None,
    velocity: Callable = transformer.velocity,
) -> jax.Array:
    """Go from noise to the tokens of an image: the steps of ``generate``, without its encoders.

    Parameters
    ----------
    params : dict
    config : Config
    noise : jax.Array
        As ``random_tokens`` gives it.
    prompt : jax.Array
        As ``encode_prompts`` gives it.
    height, width : int
        Of the image, in pixels.
    steps : int
    guidance : float or jax.Array, optional
        How far to go beyond what the empty prompt gives. Without, and at 1 or less, one run of the
        transformer does for a step, as in distilled models. A compiled program that gets it as an
        input takes two runs, whatever comes.
    empty : jax.Array, optional
        The empty prompt, encoded, where there is guidance: (1 or batch, tokens, channels).
    reference : jax.Array, optional
        Images to be edited, encoded, of the same height and width: (1 or batch, tokens, channels).
        If their number of tokens is a multiple, there are several for each image.
    shift : float, optional
        Of the sampler's times. If it is not given, the configuration decides.
    velocity : callable, optional
        The transformer, or a function that takes and gives the same, such as one whose tokens are
        split over devices: ``flux2.split_tokens``. Of a flow map (``guidance_embeds`` in the
        transformer's configuration) it also gets ``until``, the time that a step goes to.

    Returns
    -------
    jax.Array
        (batch, tokens, channels), float32.

    Raises
    ------
    ValueError
        If the size is not one of whole tokens, noise, prompts and reference images do not go
        together, or there is guidance without an empty prompt.
    """
    rows, columns = size_in_tokens(config, height, width)
    tokens = rows * columns
    batch = len(prompt)
    check_noise(noise, config, batch, height, width)
    if guidance is not None and not is_guided(guidance):
        guidance = None
    if guidance is not None and empty is None:
        raise ValueError(
            "With guidance, give the empty prompt, encoded: "
            "empty=encode_prompts(params, config, *tokenize(['']))"
        )
    places = [positions(rows, columns)]
    if reference is not None:
        if len(reference) not in (1, batch) or reference.shape[1] % tokens:
            raise ValueError(
                f"Reference images have the shape {reference.shape}: there must be one for all "
                f"{batch} prompts or one for each, and {tokens} tokens of each image."
            )
        reference = jnp.broadcast_to(reference, (batch, *reference.shape[1:]))
        for number in range(reference.shape[1] // tokens):
            places.append(positions(rows, columns, reference=number + 1))
    image_positions = np.concatenate(places)
    if shift is None:
        shift = config.shift
    if shift is None:
        shift = sampler.shift_by_size(tokens, steps)

    def run(x: jax.Array, prompt: jax.Array, time: jax.Array, until: Any = None) -> jax.Array:
        image = x
        if reference is not None:
            references = reference if len(x) == batch else pair(reference, reference)
            image = jnp.concatenate([x, references.astype(x.dtype)], axis=1)
        second = {} if until is None else {"until": jnp.full(len(x), until)}
        moved = velocity(
            params["transformer"],
            config.transformer,
            image,
            prompt,
            jnp.full(len(x), time),
            image_positions,
            text_positions(prompt.shape[1]),
            **second,
        )
        return moved[:, :tokens]

    def guided(x: jax.Array, time: jax.Array, until: Any = None) -> jax.Array:
        if guidance is None:
            return run(x, prompt, time, until)
        both = pair(jnp.broadcast_to(empty, prompt.shape), prompt)
        without, with_prompt = unpair(run(pair(x, x), both, time, until))
        return guide(guidance, without, with_prompt)

    follow = sampler.follow_map if config.transformer.guidance_embeds else sampler.euler
    with jax.named_scope("denoise"):
        return follow(guided, noise, sampler.times(steps, shift))


def generate(
    params: dict,
    config: Config,
    ids: jax.Array,
    mask: jax.Array,
    noise: jax.Array,
    height: int,
    width: int,
    steps: int = 4,
    guidance: float | jax.Array | None = None,
    empty: tuple[jax.Array, jax.Array] | None = None,
    images: jax.Array | None = None,
    shift: float | None = None,
    velocity: Callable = transformer.velocity,
) -> jax.Array:
    """diffusers' ``Flux2KleinPipeline``: from prompts to images, or from images to edited ones.

    For ``jax.jit``, ``config``, ``height``, ``width``, ``steps``, ``shift`` and ``velocity`` are
    static: ``flux2.STATIC`` has their names.

    Parameters
    ----------
    params : dict
        As ``load`` gives them.
    config : Config
    ids, mask : jax.Array
        As the tokenizer gives them.
    noise : jax.Array
        As ``random_tokens`` gives it, one for each prompt.
    height, width : int
        In pixels.
    steps : int
    guidance : float or jax.Array, optional
        For models that are not distilled. The published base has 4. At 1 or less there is none, as
        in ``denoise``.
    empty : tuple of jax.Array, optional
        ``ids`` and ``mask`` of the empty prompt, where there is guidance.
    images : jax.Array, optional
        Images to edit, of the same height and width, from 0 to 1: (1 or batch, height, width, 3).
        One is edited by every prompt; otherwise each prompt edits its own. Where a prompt edits
        several together, they are (1 or batch, several, height, width, 3).
    shift, velocity : optional
        As in ``denoise``.

    Returns
    -------
    jax.Array
        Images from 0 to 1: float32, (batch, height, width, 3).

    Raises
    ------
    ValueError
        If parameters are missing or have other shapes, if the size is not one of whole tokens or
        not that of the images to edit, if the numbers of prompts, noise and images do not go
        together, if images are whole numbers, if there is guidance without an empty prompt, or no
        step.
    """
    check_parameters(params, model_parameters(config))
    if images is not None:
        check_images(images, len(ids), height, width)
    if guidance is not None and not is_guided(guidance):
        guidance = None
    if guidance is not None and empty is None:
        raise ValueError("With guidance, give the empty prompt, too: empty=tokenize([''])")
    encoded_empty = None
    if guidance is not None:
        encoded_empty = encode_prompts(params, config, *empty)
    reference = None
    if images is not None:
        reference = encode_images(params, config, images.reshape(-1, *images.shape[-3:]))
        # The tokens of all images for a prompt follow one another.
        reference = reference.reshape(len(images), -1, reference.shape[-1])
    tokens = denoise(
        params,
        config,
        noise,
        encode_prompts(params, config, ids, mask),
        height=height,
        width=width,
        steps=steps,
        guidance=guidance,
        empty=encoded_empty,
        reference=reference,
        shift=shift,
        velocity=velocity,
    )
    return vae.decode(params["vae"], config.vae, tokens, height, width)


def make_drawing(
    config: Config, tokenize: Tokenizer, steps: int, guidance: float
) -> Callable[..., jax.Array]:
    """Return a program that draws images of the size that the model was trained for.

    It takes parameters, token ids with their mask, a key for each image, and perhaps images to
    edit. Images come as of ``generate``.
    """
    empty = tokenize([""])
    side = config.side

    @jax.jit
    def draw_all(
        params: dict,
        texts: tuple[jax.Array, jax.Array],
        keys: jax.Array,
        images: jax.Array | None = None,
    ) -> jax.Array:
        noise = jax.vmap(lambda key: random_tokens(key, config, 1, side, side)[0])(keys)
        return generate(params, config, *texts, noise, side, side, steps, guidance, empty, images)

    return draw_all


STATIC = ("config", "height", "width", "steps", "shift", "velocity")
