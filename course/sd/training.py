"""What fine-tuning needs of Stable Diffusion: latents, encoded captions, and what is predicted."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from course.sd.configs import Config, ScheduleConfig
from course.sd.pipeline import denoise_step, encode_prompts, make_condition
from course.sd.samplers import alphas
from course.sd.vae import encode

DENOISER = "unet"  # the part that gets the LoRA


class Encoded(NamedTuple):
    """What the text encoders say of captions, as ``course.sd.encode_prompts`` gives it."""

    context: jax.Array  # (captions, tokens, channels)
    pooled: jax.Array  # (captions, channels), which only Stable Diffusion XL reads


def encode_images(params: dict, config: Config, images: jax.Array) -> jax.Array:
    """Return latents, float32, of images from 0 to 1, (batch, height, width, 3)."""
    return encode(params["vae"], config.vae, images)[0]


def encode_captions(params: dict, config: Config, ids: jax.Array) -> Encoded:
    """Return what the text encoders say of captions, whose token ids ``tokenize`` gives."""
    return Encoded(*encode_prompts(params, config, ids))


def add_noise(
    schedule: ScheduleConfig, latents: jax.Array, noise: jax.Array, timesteps: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return latents under noise, and what the model should say of them, each in their shape."""
    alpha = jnp.asarray(alphas(schedule))[timesteps]  # the image's share of the variance
    alpha = alpha[:, None, None, None]
    image_scale = jnp.sqrt(alpha)
    noise_scale = jnp.sqrt(1 - alpha)
    noisy = image_scale * latents + noise_scale * noise
    if schedule.prediction_type == "epsilon":
        target = noise
    else:  # "v_prediction" (Salimans and Ho, 2022)
        target = image_scale * noise - noise_scale * latents
    return noisy, target


def predict(
    params: dict, config: Config, batch: Any, attention: str = "automatic", remat: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return what the model says of a batch under noise, and what it should say.

    Parameters
    ----------
    params, config : dict, Config
        From ``load``. Text encoders are read only where captions are token ids.
    batch : course.finetune.training.Batch
    attention, remat
        As of ``denoise_step``.
    """
    texts = batch.texts
    if not isinstance(texts, Encoded):
        texts = encode_captions(params, config, texts)
    height, width = (config.pixels_per_latent * side for side in batch.latents.shape[1:3])
    condition = make_condition(params, config, texts.context, texts.pooled, height, width)
    total = config.schedule.num_train_timesteps
    timesteps = jnp.minimum(jnp.int32(batch.times * total), total - 1)
    noisy, target = add_noise(config.schedule, batch.latents, batch.noise, timesteps)
    predicted = denoise_step(
        params,
        config,
        noisy,
        timesteps,
        condition,
        guided=False,
        attention=attention,
        remat=remat,
    )
    return predicted, target
