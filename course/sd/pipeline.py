"""The whole model: from prompts to images."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from course.model.attention import find_attention
from course.model.autoencoder import check_tile
from course.model.guidance import guide, is_guided, pair, unpair
from course.model.parameters import check_parameters
from course.sd.clip import encode_text
from course.sd.configs import Config
from course.sd.parameters import model_parameters
from course.sd.samplers import sample
from course.sd.tokenizer import Tokenizer
from course.sd.unet import Condition, project_text, unet
from course.sd.vae import decode

# The arguments of generate that are built into a compiled program, as in
# jax.jit(generate, static_argnames=STATIC). All others are inputs.
STATIC = (
    "config",
    "sampler",
    "attention",
    "height",
    "width",
    "guided",
    "guidance_axis",
    "decode_batch",
    "decode_tile",
)


def check_ids(config: Config, ids: jax.Array) -> None:
    """Raise ``ValueError`` unless token ids have a shape that ``tokenize`` gives them."""
    encoders, tokens = len(config.text), config.text[0].max_position_embeddings
    if ids.ndim != 3 or ids.shape[1:] != (encoders, tokens):
        raise ValueError(
            f"The token ids have the shape {ids.shape}: "
            f"give {('prompts', encoders, tokens)}, as tokenize does."
        )


def check_negative_ids(
    config: Config, ids: jax.Array, negative_ids: jax.Array | None, guided: bool
) -> None:
    """Raise ``ValueError`` unless guidance has what it needs; arguments as of ``generate``."""
    if negative_ids is None:
        if guided and not config.is_xl:
            raise ValueError(
                "Guidance needs negative_ids: "
                "give token ids of what not to draw, or of the empty prompt."
            )
    elif negative_ids.shape not in (ids.shape, (1, *ids.shape[1:])):
        raise ValueError(
            f"The negative ids have the shape {negative_ids.shape}: "
            f"give {ids.shape}, or of 1 for all."
        )


def encode_prompts(params: dict, config: Config, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what the UNet reads of prompts.

    Parameters
    ----------
    params, config : dict, Config
        From ``load``.
    ids : jax.Array
        Token ids, int, (batch, text encoders, tokens).

    Returns
    -------
    context : jax.Array
        A vector for each token, (batch, tokens, channels).
    pooled : jax.Array
        A vector for each prompt, (batch, channels), which only Stable Diffusion XL reads.

    Raises
    ------
    ValueError
        If the ids have a different shape.
    """
    check_ids(config, ids)
    hidden, last, pooled = encode_text(params["text_encoder"], config.text[0], ids[:, 0])
    if not config.is_xl:
        return last, pooled
    hidden_2, _, pooled = encode_text(params["text_encoder_2"], config.text[1], ids[:, 1])
    return jnp.concatenate([hidden[-2], hidden_2[-2]], axis=-1), pooled


def half_of_condition(condition: Condition, half: int | jax.Array) -> Condition:
    """Return the condition of the negative prompts, 0, or of the prompts, 1, out of both."""
    words = {}
    for name, (key, value) in condition.words.items():  # the batch is their second axis
        words[name] = jax.vmap(unpair)(key)[:, half], jax.vmap(unpair)(value)[:, half]
    whole = condition.whole
    return Condition(words, None if whole is None else unpair(whole)[half])


def encode_condition(
    params: dict,
    config: Config,
    ids: jax.Array,
    negative_ids: jax.Array | None = None,
    *,
    height: int,
    width: int,
    guided: bool = True,
) -> Condition:
    """Return what every step reads of the prompts, and with guidance of the negative prompts.

    The arguments are those of ``generate``. With guidance the batch is twice as large, with the
    negative prompt of each image before its prompt.
    """
    check_ids(config, ids)
    check_negative_ids(config, ids, negative_ids, guided)
    if not guided:
        context, pooled = encode_prompts(params, config, ids)
    elif negative_ids is None:  # Stable Diffusion XL has zeros in place of the empty prompt
        context, pooled = encode_prompts(params, config, ids)
        context = pair(jnp.zeros_like(context), context)
        pooled = pair(jnp.zeros_like(pooled), pooled)
    else:
        both = pair(jnp.broadcast_to(negative_ids, ids.shape), ids)
        context, pooled = encode_prompts(params, config, both)
    return make_condition(params, config, context, pooled, height, width)


def make_condition(
    params: dict, config: Config, context: jax.Array, pooled: jax.Array, height: int, width: int
) -> Condition:
    """Return what the UNet reads of encoded prompts, for images of so many pixels.

    XL is told the size of the original and of the image, and that nothing was cut off.
    """
    sizes = jnp.array([height, width, 0, 0, height, width])
    return project_text(params["unet"], config.unet, context, pooled, sizes)


def denoise_step(
    params: dict,
    config: Config,
    latents: jax.Array,
    timestep: jax.Array,
    condition: Condition,
    guidance: float | jax.Array = 7.5,
    *,
    unguided_below: float | jax.Array | None = None,
    attention: str | Callable = "automatic",
    guided: bool = True,
    guidance_axis: str | None = None,
    remat: bool = False,
) -> jax.Array:
    """Return what the model predicts in one step of denoising; a sampler takes the step by it.

    With guidance, it predicts for the negative prompt and for the prompt, and goes on in the
    direction from the first to the second. At a scale of 1 or less there is none.

    Parameters
    ----------
    params, config : dict, Config
        From ``load``. Only the UNet's parameters are read.
    latents : jax.Array
        Noisy latents, (batch, height / 8, width / 8, 4).
    timestep : jax.Array
        One for all images, (); without guidance also one for each, (batch,).
    condition : Condition
        From ``encode_condition``, with the same ``guided``.
    guidance, unguided_below, attention, guided, guidance_axis
        As of ``generate``.
    remat : bool
        As of ``course.sd.unet.unet``.

    Returns
    -------
    jax.Array
        The noise in the latents, or what else the model was trained to predict, float32, in the
        shape of the latents.

    Raises
    ------
    ValueError
        If ``guidance_axis`` has not two devices, or there is no guidance for them.
    """
    if guidance_axis is not None:
        check_guidance_axis(guided, guidance_axis)

    def predict(latents: jax.Array, condition: Condition) -> jax.Array:
        output = unet(params["unet"], config.unet, latents, timestep, condition, attention, remat)
        return output.astype(jnp.float32)

    if not guided:
        return predict(latents, condition)
    if not is_guided(guidance):
        return predict(latents, half_of_condition(condition, 1))

    def without_guidance() -> jax.Array:
        return predict(latents, half_of_condition(condition, 1))

    def with_guidance() -> jax.Array:
        if guidance_axis is None:
            negative, positive = unpair(predict(pair(latents, latents), condition))
        else:  # this device's half, and then both devices' answers
            half = jax.lax.axis_index(guidance_axis)
            mine = predict(latents, half_of_condition(condition, half))
            negative, positive = jax.lax.all_gather(mine, guidance_axis)
        return guide(guidance, negative, positive)

    if unguided_below is None:
        return with_guidance()
    is_left_out = (timestep < unguided_below) | jnp.all(jnp.asarray(guidance) <= 1)
    return jax.lax.cond(is_left_out, without_guidance, with_guidance)


def check_guidance_axis(guided: bool, guidance_axis: str) -> None:
    """Raise ``ValueError`` unless guidance has two halves and the axis two devices."""
    if not guided:
        raise ValueError(
            f"Without guidance there are no halves of it for the axis {guidance_axis!r}: "
            "leave out guidance_axis, or guided=False."
        )
    devices = jax.lax.axis_size(guidance_axis)
    if devices != 2:
        raise ValueError(
            f"Guidance has two halves, and the axis {guidance_axis!r} has {devices} device(s): "
            "give it two."
        )


def prepare(
    params: dict,
    config: Config,
    ids: jax.Array,
    key: jax.Array,
    negative_ids: jax.Array | None,
    latents: jax.Array | None,
    *,
    height: int,
    width: int,
    guided: bool = True,
) -> tuple[Condition, jax.Array]:
    """Return what ``denoise`` starts from: the condition, and noise.

    The arguments are those of ``generate``. The noise is float32, (batch, height / 8, width / 8,
    4).

    Raises
    ------
    ValueError
        If parameters, ids, the size or the noise do not fit.
    """
    check_parameters(params, model_parameters(config))
    check_size(config, height, width)
    condition = encode_condition(
        params, config, ids, negative_ids, height=height, width=width, guided=guided
    )
    shape = (
        len(ids),
        height // config.pixels_per_latent,
        width // config.pixels_per_latent,
        config.unet.in_channels,
    )
    noise = draw_noise(key, shape) if latents is None else latents
    if noise.shape != shape:
        raise ValueError(f"Latents or keys are for {noise.shape}: give them for {shape}.")
    return condition, noise


def denoise(
    params: dict,
    config: Config,
    condition: Condition,
    noise: jax.Array,
    steps: int | jax.Array = 50,
    guidance: float | jax.Array = 7.5,
    *,
    sampler: str | None = None,
    first: int | jax.Array = 0,
    image: jax.Array | None = None,
    after: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    **options: Any,
) -> jax.Array:
    """Take the steps from noise to the latents of images.

    Parameters
    ----------
    params, config, steps, guidance, sampler
        As of ``generate``. Only the UNet's parameters are read.
    condition, noise : Condition, jax.Array
        From ``prepare``.
    first, image, after
        As of ``course.sd.samplers.sample``: for drawing over an image, from a later step on.
    **options
        As of ``denoise_step``: ``attention``, ``guided``, ``guidance_axis``, ``unguided_below``.

    Returns
    -------
    jax.Array
        Latents, float32, of the noise's shape. They are NaN if a compiled program gets a number of
        steps that is out of range.

    Raises
    ------
    ValueError
        If the number of steps or a name is not one that can be.
    """
    most_steps = find_most_steps(config)
    check_steps(steps, most_steps)

    def model(latents: jax.Array, timestep: jax.Array) -> jax.Array:
        return denoise_step(params, config, latents, timestep, condition, guidance, **options)

    latents = sample(model, config.schedule, noise, jnp.int32(steps), sampler, first, image, after)
    return jnp.where((steps >= 1) & (steps <= most_steps), latents, jnp.nan)


def check_drawing(
    attention: str | Callable, decode_batch: int | None, decode_tile: int | None
) -> None:
    """Raise ``ValueError``, before long work, unless these arguments of ``generate`` can be."""
    find_attention(attention)
    if decode_batch is not None and decode_batch < 1:
        raise ValueError(f"decode_batch is {decode_batch}: give 1 or more, or None for all images.")
    if decode_tile is not None:
        check_tile(decode_tile)


def decode_images(
    params: dict,
    config: Config,
    latents: jax.Array,
    attention: str | Callable = "automatic",
    decode_batch: int | None = None,
    decode_tile: int | None = None,
) -> jax.Array:
    """Return the images of latents, ``decode_batch`` at a time; arguments as of ``generate``."""
    if decode_batch is None:
        return decode(params["vae"], config.vae, latents, attention, decode_tile)

    def decode_one(latents: jax.Array) -> jax.Array:
        return decode(params["vae"], config.vae, latents[None], attention, decode_tile)[0]

    return jax.lax.map(decode_one, latents, batch_size=decode_batch)


def generate(
    params: dict,
    config: Config,
    ids: jax.Array,
    key: jax.Array,
    negative_ids: jax.Array | None = None,
    steps: int | jax.Array = 50,
    guidance: float | jax.Array = 7.5,
    latents: jax.Array | None = None,
    *,
    unguided_below: float | jax.Array | None = None,
    sampler: str | None = None,
    attention: str | Callable = "automatic",
    height: int | None = None,
    width: int | None = None,
    guided: bool = True,
    guidance_axis: str | None = None,
    decode_batch: int | None = None,
    decode_tile: int | None = None,
) -> jax.Array:
    """Draw an image for each prompt.

    It does what diffusers' ``StableDiffusionPipeline`` and ``StableDiffusionXLPipeline`` do. It is
    a pure function, to be compiled by ``jax.jit(generate, static_argnames=STATIC)``.

    Parameters
    ----------
    params, config : dict, Config
        From ``load``.
    ids : jax.Array
        Token ids of what to draw, int, (batch, text encoders, tokens).
    key : jax.Array
        A random key for each image, (batch,), or one for all, as the pipelines take it.
    negative_ids : jax.Array, optional
        Token ids of what not to draw, (batch or 1, text encoders, tokens): at least those of the
        empty prompt. Only Stable Diffusion XL can do without.
    steps : int or jax.Array
        The number of steps. A different one compiles nothing again.
    guidance : float or jax.Array
        The guidance scale, one for all or (batch,). A different one compiles nothing again. At 1 or
        less there is no guidance, as in diffusers: the negative prompt has no part in the image. A
        compiled program that gets the scale as an input does the work of guidance all the same, but
        where ``unguided_below`` is given; ``guided=False`` saves it.
    latents : jax.Array, optional
        Noise in place of the keys', float32, (batch, height / 8, width / 8, 4).
    unguided_below : float or jax.Array, optional
        The timestep of the training below which guidance is left out.
    sampler : str, optional
        A name in ``course.sd.SAMPLERS``; by default the model's own.
    attention : str or callable
        See ``course.model.attention``.
    height, width : int, optional
        Of the images in pixels; by default as in the training.
    guided : bool
        Whether there is guidance, if the scale is above 1. Without it a step is half of the work.
    guidance_axis : str, optional
        Inside ``jax.shard_map``, the name of an axis of two devices, of which each does one half of
        the UNet's work for guidance: the same images in less time. It needs ``check_vma=False``,
        since not every version of JAX can say of gathered values that they are the same everywhere.
    decode_batch : int, optional
        How many images the VAE decodes at a time; by default all of them. At 1024 × 1024 pixels
        the decoder needs more memory than a step, so with 1 a larger batch fits. Inside
        ``jax.shard_map`` it counts each device's images; with ``jax.jit`` alone leave it out, since
        the images of all devices would be decoded one after another.
    decode_tile : int, optional
        How many latents a tile has along each side, if the VAE is to decode an image in tiles, see
        ``course.model.autoencoder.decode_in_tiles``. For images of more than 1024 × 1024 pixels.

    Returns
    -------
    jax.Array
        Images from 0 to 1, float32, (batch, height, width, 3). They are NaN if a compiled program
        gets a number of steps that is out of range.

    Raises
    ------
    ValueError
        If ids, sizes, parameters, names or a number of steps do not fit.
    """
    check_drawing(attention, decode_batch, decode_tile)
    guided = guided and is_guided(guidance)
    height = config.side if height is None else height
    width = config.side if width is None else width
    condition, noise = prepare(
        params, config, ids, key, negative_ids, latents, height=height, width=width, guided=guided
    )
    latents = denoise(
        params,
        config,
        condition,
        noise,
        steps,
        guidance,
        sampler=sampler,
        unguided_below=unguided_below,
        attention=attention,
        guided=guided,
        guidance_axis=guidance_axis,
    )
    return decode_images(params, config, latents, attention, decode_batch, decode_tile)


def make_drawing(
    config: Config, tokenize: Tokenizer, steps: int, guidance: float
) -> Callable[..., jax.Array]:
    """Return a program that draws images of the size that the model was trained for.

    It takes parameters, token ids, a key for each image, and None: this model edits none by
    prompts. Images come as of ``generate``.
    """
    empty = tokenize([""])
    draw = partial(generate, guided=is_guided(guidance))
    program = jax.jit(draw, static_argnames=STATIC)

    def draw_all(params: dict, ids: jax.Array, keys: jax.Array, images: None = None) -> jax.Array:
        if images is not None:
            raise ValueError("Stable Diffusion edits no images by prompts: give FLUX.2-klein.")
        check_steps(steps, find_most_steps(config))  # the program would take them all
        return program(params, config, ids, keys, empty, steps, guidance)

    return draw_all


def check_size(config: Config, height: int, width: int) -> None:
    """Raise ``ValueError`` unless the UNet can draw images of this size, in pixels."""
    multiple = config.side_multiple
    if height < 1 or width < 1 or height % multiple or width % multiple:
        raise ValueError(
            f"This UNet cannot halve images of {height} × {width} pixels: "
            f"choose multiples of {multiple}."
        )


def find_most_steps(config: Config) -> int:
    """Return how many steps can have timesteps of their own."""
    return config.schedule.num_train_timesteps - config.schedule.steps_offset - 1


def check_steps(steps: int | jax.Array, most: int) -> None:
    """Raise ``ValueError`` unless ``steps`` is a whole number from 1 to ``most``.

    While a program is traced, its value is not known yet.
    """
    is_whole = jnp.issubdtype(jnp.result_type(steps), jnp.integer)
    if not is_whole or not (isinstance(steps, jax.core.Tracer) or 1 <= steps <= most):
        raise ValueError(f"The number of steps is {steps}: choose a whole number from 1 to {most}.")


def draw_noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draw noise for images, of variance 1, float32, (batch, height, width, channels).

    There is a key for each image, (batch,), or one for all, (). The numbers are drawn with channels
    first, as the pipelines draw them.
    """
    batch, height, width, channels = shape
    if key.ndim == 0:
        noise = jax.random.normal(key, (batch, channels, height, width))
    else:
        draw = jax.vmap(lambda key: jax.random.normal(key, (channels, height, width)))
        noise = draw(key)
    return jnp.moveaxis(noise, 1, -1)
