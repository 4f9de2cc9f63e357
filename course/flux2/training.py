"""What fine-tuning needs of FLUX.2: tokens, encoded captions, and the velocity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2 import pipeline
from course.flux2.configs import Config
from course.flux2.pipeline import positions, size_in_tokens, text_positions
from course.flux2.transformer import velocity

DENOISER = "transformer"  # the part that gets the LoRA


def encode_images(params: dict, config: Config, images: jax.Array) -> jax.Array:
    """Return tokens, float32, (batch, rows, columns, channels), of images from 0 to 1."""
    rows, columns = size_in_tokens(config, *images.shape[1:3])
    tokens = pipeline.encode_images(params, config, images)
    return tokens.reshape(len(images), rows, columns, -1)


def encode_captions(params: dict, config: Config, tokenized: tuple) -> jax.Array:
    """Return what the transformer gets of captions, as ``tokenize`` gives their ids and mask."""
    return pipeline.encode_prompts(params, config, *tokenized)


def predict(
    params: dict, config: Config, batch: Any, attention: str = "automatic", remat: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Return the velocity that the model says of a batch under noise, and what it should say.

    Parameters
    ----------
    params, config : dict, Config
        From ``load``. Only the transformer's parameters are read.
    batch : course.finetune.training.Batch
        With references, each example is an edit of its own.
    attention : str
        There is "automatic" alone.
    remat : bool
        Whether a block's activations are computed again for the gradients, and not kept.
    """
    if attention != "automatic":
        raise ValueError(f"FLUX.2 has no attention {attention!r}: leave it out.")
    count, rows, columns, channels = batch.latents.shape
    time = batch.times[:, None, None, None]
    noisy = (1 - time) * batch.latents + time * batch.noise
    tokens = noisy.reshape(count, -1, channels)
    places = positions(rows, columns)
    if batch.reference is not None:
        tokens = jnp.concatenate([tokens, batch.reference.reshape(tokens.shape)], axis=1)
        places = np.concatenate([places, positions(rows, columns, reference=1)])
    said = velocity(
        params["transformer"],
        config.transformer,
        tokens,
        batch.texts,
        batch.times,
        places,
        text_positions(batch.texts.shape[1]),
        remat=remat,
    )
    predicted = said[:, : rows * columns].reshape(noisy.shape)
    return predicted, batch.noise - batch.latents
