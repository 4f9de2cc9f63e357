"""Train the UNet of Stable Diffusion 1 or XL with its text encoders, on latents of scenes.

It learns to say of noisy latents what is noise, or what else its configuration asks it to predict:
the bundled ones predict velocity. Which model it is, the configuration says.
"""

from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course import sd
from course.sd.pipeline import make_condition
from course.sd.tokenizer import Tokenizer
from course.sd.training import add_noise
from course.sd.vae import encode
from course.shapes import scenes
from lab.train import data, loop
from lab.train.data import PIXELS
from lab.train.judging import count_attributes, make_drawing

JUDGED = 96  # pictures
JUDGED_STEPS = 15
FULL_CAPTIONS = 0.5  # the share that names every attribute
# The timesteps in which a picture gets its shape: every other one is drawn from them.
MIDDLE = (100, 600)
# The share of XL's empty captions that are encoded. The others become zeros, as in the pipeline
# without a negative prompt.
EMPTY_BUT_ENCODED = 0.25

# Long and at a high learning rate: shapes-sd and shapes-sdxl start from what it gives.
FIRST = loop.Recipe(steps=6_000, cooldown=4_000, peak=2e-3, batch=128, pool=100_000)
SD = replace(FIRST, steps=3_000, cooldown=2_900, peak=1e-3, seed=1)
SDXL = FIRST


class Batch(NamedTuple):
    """The examples of one step. The first axis of each array is the batch."""

    latents: jax.Array  # float32, (batch, 8, 8, 4)
    noise: jax.Array  # the same
    timesteps: jax.Array  # int32, (batch,)
    ids: jax.Array  # of captions, int32, (batch, text encoders, tokens)
    is_shown: jax.Array  # whether XL's caption is encoded, or zeros are in its place, (batch,)


def prepare(
    file: Path, recipe: loop.Recipe, config: sd.Config, vae: dict[str, jax.Array]
) -> dict[str, np.ndarray]:
    """Return ``latents`` (scenes, 8, 8, 4) and ``attributes`` (scenes, 4), kept in the file."""

    def make() -> dict[str, np.ndarray]:
        pool = scenes.training_scenes(recipe.pool, data.POOL_SEED)
        mean_latents = jax.jit(lambda images: encode(vae, config.vae, images / 255)[0])
        latents = []
        for images in data.render_all(pool):
            latents.append(np.float16(mean_latents(np.float32(images))))
        return {
            "latents": np.concatenate(latents),
            "attributes": np.int32([data.attribute_indices(scene) for scene in pool]),
        }

    return data.kept(file, make)


def random_timesteps(key: jax.Array, batch: int, total: int) -> jax.Array:
    """Draw a timestep for each example, int32, (batch,).

    There is one in each of as many equal intervals: the same mean as of independent ones, with less
    variance. Half of the intervals divide the ``MIDDLE``, and half of them all timesteps.
    """
    places = (jnp.arange(batch) + jax.random.uniform(key, (batch,))) / batch
    low, high = MIDDLE
    timesteps = jnp.where(jnp.arange(batch) % 2, low + places * (high - low), places * total)
    return jnp.minimum(jnp.int32(timesteps), total - 1)


def random_batch(
    key: jax.Array, arrays: dict[str, jax.Array], recipe: loop.Recipe, config: sd.Config
) -> Batch:
    """Draw a step's scenes, captions, timesteps and noise."""
    keys = jax.random.split(key, 5)
    rows = jax.random.randint(keys[0], (recipe.batch,), 0, len(arrays["latents"]))
    latents = arrays["latents"][rows].astype(jnp.float32)
    captions = data.random_captions(keys[1], arrays["attributes"][rows], FULL_CAPTIONS)
    is_empty = captions == len(arrays["ids"]) - 1
    is_encoded = jax.random.uniform(keys[2], is_empty.shape) < EMPTY_BUT_ENCODED
    total = config.schedule.num_train_timesteps
    return Batch(
        latents=latents,
        noise=jax.random.normal(keys[3], latents.shape),
        timesteps=random_timesteps(keys[4], recipe.batch, total),
        ids=arrays["ids"][captions],
        is_shown=~is_empty | is_encoded,
    )


def loss_fn(params: dict, batch: Batch, config: sd.Config) -> jax.Array:
    """Return the mean squared error of what the UNet predicts."""
    context, pooled = sd.encode_prompts(params, config, batch.ids)
    if config.is_xl:
        context *= batch.is_shown[:, None, None]
        pooled *= batch.is_shown[:, None]
    condition = make_condition(params, config, context, pooled, PIXELS, PIXELS)
    noisy, target = add_noise(config.schedule, batch.latents, batch.noise, batch.timesteps)
    predicted = sd.denoise_step(params, config, noisy, batch.timesteps, condition, guided=False)
    return jnp.square(predicted - target).mean()


def make_task(recipe: loop.Recipe, config: sd.Config, earlier: dict | None = None) -> loop.Task:
    """Return what the loop needs to know of this training."""
    declared = {
        part: parameters
        for part, parameters in sd.model_parameters(config).items()
        if part != "vae"
    }

    def start(key: jax.Array) -> dict:
        params = loop.initial_parameters(key, declared, loop.start_layer)
        return params if earlier is None else loop.start_from(params, earlier)

    return loop.Task(
        recipe=recipe,
        start=start,
        matrices=loop.matrices_of(declared),
        random_batch=lambda key, arrays: random_batch(key, arrays, recipe, config),
        loss=lambda params, batch: loss_fn(params, batch, config),
    )


def train(
    folder: Path,
    recipe: loop.Recipe,
    config: sd.Config,
    tokenize: Tokenizer,
    vae: dict[str, jax.Array],
    earlier: dict | None = None,
    judged: int = JUDGED,
) -> dict[str, dict[str, jax.Array]]:
    """Train, and return the averaged parameters with the VAE, as ``sd.load`` does.

    Parameters
    ----------
    folder : Path
        Holds the state to resume from. The latents are kept in the folder that it is in, as they
        serve every UNet.
    recipe : Recipe
        Such as ``SD``.
    config, tokenize : Config, Tokenizer
        Of the model, from ``sd.load``.
    vae : dict
        The VAE's parameters, which stay as they are.
    earlier : dict, optional
        A model to start from, wherever names and shapes of its layers agree.
    judged : int
        How many pictures are drawn to be judged.
    """
    of_vae = loop.fingerprint(vae)
    about = {
        "unet": asdict(config.unet),
        "text": [asdict(encoder) for encoder in config.text],
        "batch": recipe.batch,
        "vae": of_vae,
        "earlier": loop.fingerprint(earlier["unet"]) if earlier else None,
    }
    loop.note_training(folder, about)
    arrays = prepare(folder.parent / f"latents-{recipe.pool}-{of_vae[:8]}.npz", recipe, config, vae)
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    arrays["ids"] = jnp.asarray(tokenize(data.all_captions()))
    draw = make_drawing(config, tokenize)
    asked = scenes.held_out_captions(judged)

    def judge(params: dict) -> dict[str, dict[str, int]]:
        captions = [scenes.caption(**named) for named in asked]
        images = draw(params | {"vae": vae}, captions, JUDGED_STEPS)
        return {"drawn": count_attributes(asked, images)}

    average = loop.train(folder, make_task(recipe, config, earlier), arrays, judge)
    return average | {"vae": vae}
