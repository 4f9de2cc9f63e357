"""All of it together: prompts to images."""

import jax
import jax.numpy as jnp

from stable_diffusion.attention import find_attention
from stable_diffusion.configs import Config
from stable_diffusion.samplers import sample
from stable_diffusion.text import encode_text
from stable_diffusion.unet import read_text, unet
from stable_diffusion.vae import decode

# Those arguments of generate that are built into a compiled program: jax.jit(generate, static_argnames=STATIC).
STATIC = ("config", "sampler", "attention", "height", "width", "guided")


def check_ids(config: Config, ids: jax.Array) -> None:
    """Raise ``ValueError`` unless token ids have a shape that ``tokenize`` gives them."""
    needed = (len(config.text), config.text[0].max_position_embeddings)
    if ids.ndim != 3 or ids.shape[1:] != needed:
        raise ValueError(f"The token ids have the shape {ids.shape}: give {('prompts', *needed)}, as tokenize does.")


def encode_prompts(params: dict, config: Config, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the UNet reads of prompts, from token ids, (batch, text encoders, tokens).

    It gives a vector for each token, (batch, tokens, channels), and one for each prompt, (batch, channels), which only
    Stable Diffusion XL reads. Ids of a different shape raise ``ValueError``.
    """
    check_ids(config, ids)
    hidden, last, pooled = encode_text(params["text_encoder"], config.text[0], ids[:, 0])
    if not config.is_xl:
        return last, pooled
    hidden_2, _, pooled = encode_text(params["text_encoder_2"], config.text[1], ids[:, 1])
    return jnp.concatenate([hidden[-2], hidden_2[-2]], axis=-1), pooled


def pair(negative: jax.Array, positive: jax.Array) -> jax.Array:
    """Two batches in turns, (2 batch, ...), so that both halves of an image's guidance are on its device."""
    return jnp.stack([negative, positive], axis=1).reshape(-1, *positive.shape[1:])


def unpair(both: jax.Array) -> jax.Array:
    """The two batches that ``pair`` took: (2, batch, ...)."""
    return jnp.moveaxis(both.reshape(-1, 2, *both.shape[1:]), 1, 0)


def generate(
    params: dict, config: Config, ids: jax.Array, key: jax.Array, negative_ids: jax.Array | None = None,
    steps: int | jax.Array = 50, guidance: float | jax.Array = 7.5, latents: jax.Array | None = None, *,
    unguided_below: float | jax.Array | None = None, sampler: str | None = None, attention="auto",
    height: int | None = None, width: int | None = None, guided: bool | str = True,
) -> jax.Array:  # fmt: skip
    """Draw an image for each prompt, as diffusers' ``StableDiffusionPipeline`` and ``StableDiffusionXLPipeline`` do.

    A pure function, to be compiled by ``jax.jit(generate, static_argnames=STATIC)``. It gives images from 0 to 1,
    float32, (batch, height, width, 3); NaN if a compiled program gets ``steps`` out of range. What does not fit, as
    ids, sizes, parameters or names, raises ``ValueError``.

    Parameters
    ----------
    params, config, ids, negative_ids : dict, Config, jax.Array, jax.Array
        From ``load``; and token ids of what to draw, int, (batch, text encoders, tokens), and of what not to draw,
        (batch or 1, ...): those of "" at least. Only Stable Diffusion XL can do without.
    key, latents : jax.Array
        A random key for each image, (batch,), or one for all, as the pipelines take it; or noise in place of the keys',
        float32, (batch, height / 8, width / 8, 4).
    steps, guidance, unguided_below : int, float or jax.Array
        The number of steps, the guidance scale, (batch,) or one, and the timestep of training below which guidance is
        left out. All are inputs, so that different ones do not compile again.
    sampler, attention : str or callable
        One of ``SAMPLERS``, by default the model's own, and one of ``ATTENTION``.
    height, width : int, optional
        Of the images in pixels, by default as in training.
    guided : bool or str
        Without guidance a step is half of the work. Inside ``jax.shard_map`` this may name an axis of two devices, of
        which each does one half of the UNet's operations: the same images in less time.
    """
    side = config.unet.sample_size * config.pixels_per_latent
    height, width = (side if size is None else size for size in (height, width))
    grain = config.pixels_per_latent * 2 ** (len(config.unet.block_out_channels) - 1)
    if height < 1 or width < 1 or height % grain or width % grain:
        raise ValueError(f"This UNet cannot halve images of {height} × {width} pixels: choose multiples of {grain}.")
    most = config.schedule.num_train_timesteps - config.schedule.steps_offset - 1
    is_whole = jnp.issubdtype(jnp.result_type(steps), jnp.integer)
    if not is_whole or not (isinstance(steps, jax.core.Tracer) or 1 <= steps <= most):
        raise ValueError(f"The number of steps is {steps}: choose a whole number from 1 to {most}.")
    find_attention(attention)
    check_ids(config, ids)
    if negative_ids is not None and negative_ids.shape not in (ids.shape, (1, *ids.shape[1:])):
        raise ValueError(f"The negative ids have the shape {negative_ids.shape}: give {ids.shape}, or of 1 for all.")
    if isinstance(guided, str) and (devices := jax.lax.axis_size(guided)) != 2:
        raise ValueError(f"Guidance has two halves, and the axis {guided!r} has {devices} device(s): give it two.")

    batch, sizes = len(ids), jnp.array([height, width, 0, 0, height, width])
    if not guided:
        context, pooled = encode_prompts(params, config, ids)
    elif negative_ids is not None:
        context, pooled = encode_prompts(params, config, pair(jnp.broadcast_to(negative_ids, ids.shape), ids))
    elif config.is_xl:
        context, pooled = (pair(jnp.zeros_like(part), part) for part in encode_prompts(params, config, ids))
    else:
        raise ValueError("Guidance needs negative_ids: give token ids of what not to draw, or of the empty prompt.")
    condition = read_text(params["unet"], config.unet, context, pooled, sizes)

    def ask(x: jax.Array, timestep: jax.Array, read=condition) -> jax.Array:
        return unet(params["unet"], config.unet, x, timestep, read, attention).astype(jnp.float32)

    def ask_unguided(x: jax.Array, timestep: jax.Array) -> jax.Array:
        return ask(x, timestep, jax.tree.map(lambda part: unpair(part)[1], condition) if guided else condition)

    def ask_guided(x: jax.Array, timestep: jax.Array) -> jax.Array:
        if guided is True:
            without, with_prompt = unpair(ask(pair(x, x), timestep))
        else:  # this device's half, and then both devices' answers
            mine = jax.tree.map(lambda part: unpair(part)[jax.lax.axis_index(guided)], condition)
            without, with_prompt = jax.lax.all_gather(ask(x, timestep, mine), guided)
        return without + jnp.reshape(guidance, (-1, 1, 1, 1)) * (with_prompt - without)

    def model(x: jax.Array, timestep: jax.Array) -> jax.Array:
        if not guided or unguided_below is None:
            return (ask_guided if guided else ask_unguided)(x, timestep)
        return jax.lax.cond(timestep >= unguided_below, ask_guided, ask_unguided, x, timestep)

    shape = (height // config.pixels_per_latent, width // config.pixels_per_latent, config.unet.in_channels)
    if latents is None:  # drawn with channels first, as the pipelines draw them
        channels_first = (shape[2], *shape[:2])
        each = jax.vmap(lambda key: jax.random.normal(key, channels_first))
        latents = each(key) if key.ndim else jax.random.normal(key, (batch, *channels_first))
        latents = jnp.moveaxis(latents, 1, -1)
    if latents.shape != (batch, *shape):
        raise ValueError(f"Latents or keys are for {latents.shape}: give them for {(batch, *shape)}.")
    latents = sample(model, config.schedule, latents, jnp.int32(steps), sampler)
    return decode(params["vae"], config.vae, jnp.where((steps >= 1) & (steps <= most), latents, jnp.nan), attention)
