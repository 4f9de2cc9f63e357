"""Train the autoencoder (VAE): from scenes of 64 × 64 pixels to latents of 8 × 8 × 4, and back.

It decodes noisy latents: scenes that differ then lie apart, and what diffusion gets slightly wrong
is put right (latent denoising, https://arxiv.org/abs/2507.15856). In the end the channels of its
latents have zero mean, a variance of 1 and no correlation.
"""

import math
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course.model.autoencoder import autoencoder_parameters, decode_latents, encode_latents
from course.sd import VAEConfig
from course.shapes import judge, scenes
from lab.train import data, loop

JUDGED = 128  # pictures
# The most noise that is added to the latents before they are decoded, in their own spread.
LATENT_NOISE = 0.5
# How often a small shape is seen, for one of another size: it is the hardest.
SMALL_SHARE = 3.0
# Of the error at the edges, which make a star a star: as much for a small one as for a large one.
EDGE_WEIGHT = 0.4
# Each scene is seen about three times.
RECIPE = loop.Recipe(steps=3_000, cooldown=2_000, peak=2e-3, batch=32, pool=40_000)


def signed(images: jax.Array) -> jax.Array:
    """Return images from 0 to 1 as numbers from -1 to 1, in which errors are measured."""
    return 2 * images - 1


def at_edges(images: jax.Array) -> jax.Array:
    """Return 1 where the colour changes within a pixel's distance, 0 elsewhere: (n, h, w)."""

    def highest(x: jax.Array) -> jax.Array:  # of each pixel and its neighbours
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME")

    change = highest(images) + highest(-images)  # the highest less the lowest
    return jnp.float32(change.max(axis=-1) > 0.1)


def picture_loss(restored: jax.Array, images: jax.Array) -> jax.Array:
    """Return how far restored pictures are from the true ones, edges counting more.

    Both are (n, h, w, 3), from -1 to 1.
    """
    difference = restored - images
    # The squared error is what PSNR measures; the absolute one keeps pushing on flat areas that are
    # almost right.
    error = (jnp.square(difference) + 0.1 * jnp.abs(difference)).mean(axis=-1)  # (n, h, w)
    edges = at_edges(images)
    error_at_edges = (error * edges).sum(axis=(1, 2)) / edges.sum(axis=(1, 2))  # (n,)
    return error.mean() + EDGE_WEIGHT * error_at_edges.mean()


def random_batch(key: jax.Array, arrays: dict[str, jax.Array], recipe: loop.Recipe) -> dict:
    """Draw a step's pictures, and the noise under which their latents are decoded."""
    keys = jax.random.split(key, 3)
    pool = len(arrays["images"])
    rows = jax.random.choice(keys[0], pool, (recipe.batch,), p=arrays["shares"])
    return {
        "images": jnp.float32(arrays["images"][rows]) / 255,
        "level": LATENT_NOISE * jax.random.uniform(keys[1], (recipe.batch, 1, 1, 1)),
        "key": keys[2],
    }


def loss_fn(params: dict, batch: dict, config: VAEConfig) -> jax.Array:
    """Return the loss of pictures that were encoded, put under noise, and decoded."""
    p = params["vae"]
    latents, _ = encode_latents(p, config, batch["images"])
    mean = latents.mean(axis=(0, 1, 2))
    deviation = latents.std(axis=(0, 1, 2))
    noise = jax.random.normal(batch["key"], latents.shape)
    noisy = (latents - mean) / deviation + batch["level"] * noise
    restored = decode_latents(p, config, noisy, clip=False)
    return picture_loss(signed(restored), signed(batch["images"]))


def normalize_latents(
    p: dict[str, jax.Array], config: VAEConfig, images: np.ndarray
) -> dict[str, jax.Array]:
    """Put into the weights what training did to the latents, and whiten their channels, exactly.

    Both are changes of the two 1 × 1 convolutions around the latents. Diffusion starts from white
    noise; channels of one size and without correlation are what it learns fastest. ``images`` are
    uint8, (n, h, w, 3).
    """
    mean_latents = jax.jit(lambda images: encode_latents(p, config, images)[0])
    latents = []
    for start in range(0, len(images), 256):
        latents.append(np.asarray(mean_latents(np.float32(images[start : start + 256]) / 255)))
    channels = np.float64(np.concatenate(latents)).reshape(-1, config.latent_channels)
    mean = channels.mean(axis=0)
    deviation = channels.std(axis=0)
    eigenvalues, basis = np.linalg.eigh(np.corrcoef(channels.T))
    whiten = basis.T / np.sqrt(eigenvalues)[:, None] / deviation
    unwhiten = basis * np.sqrt(eigenvalues)

    # The encoder's convolution has 8 outputs: the first 4 are the mean, the others the logarithm of
    # the variance, which says what noise the decoder has seen. Weights are (1, 1, inputs, outputs).
    n = config.latent_channels
    weight = np.zeros(p["quant_conv.weight"].shape)
    weight[..., :n] = np.float64(p["quant_conv.weight"][..., :n]) @ whiten.T
    bias = np.full(2 * n, 2 * math.log(LATENT_NOISE / 2))
    bias[:n] = whiten @ (np.float64(p["quant_conv.bias"][:n]) - mean)
    decoded = unwhiten.T @ np.float64(p["post_quant_conv.weight"])
    return p | {
        "quant_conv.weight": jnp.float32(weight),
        "quant_conv.bias": jnp.float32(bias),
        "post_quant_conv.weight": jnp.float32(decoded),
    }


def unseen_scenes(count: int) -> list[scenes.Scene]:
    """Return scenes of held-out combinations."""
    rng = np.random.default_rng(0)
    choices = sorted(scenes.held_out())
    return [scenes.random_scene(rng, *choices[k % len(choices)]) for k in range(count)]


def judge_restored(p: dict[str, jax.Array], config: VAEConfig, count: int) -> dict:
    """Return how well unseen scenes come back: PSNR in dB, and how many are read right."""
    some = unseen_scenes(count)
    images = np.stack([scenes.render(scene) for scene in some]).astype(np.float32) / 255

    @jax.jit
    def restore(images: jax.Array) -> jax.Array:
        latents, _ = encode_latents(p, config, images)
        return decode_latents(p, config, latents)

    restored = np.concatenate([restore(images[n : n + 64]) for n in range(0, count, 64)])
    ratios = -10 * np.log10(np.square(restored - images).mean(axis=(1, 2, 3)))
    asked = [{name: getattr(scene, name) for name in scenes.ATTRIBUTES} for scene in some]
    right = judge.count_right(asked, restored)
    psnr = {"mean": float(ratios.mean()), "worst": float(ratios.min())}
    return {"psnr": psnr, "restored": {"right": right, "pictures": count}}


def make_task(recipe: loop.Recipe, config: VAEConfig) -> loop.Task:
    """Return what the loop needs to know of this training."""
    declared = {"vae": autoencoder_parameters(config)}
    return loop.Task(
        recipe=recipe,
        start=lambda key: loop.initial_parameters(key, declared, loop.start_layer),
        matrices=loop.matrices_of(declared),
        random_batch=lambda key, arrays: random_batch(key, arrays, recipe),
        loss=lambda params, batch: loss_fn(params, batch, config),
    )


def train(
    folder: Path, recipe: loop.Recipe, config: VAEConfig, judged: int = JUDGED
) -> dict[str, jax.Array]:
    """Train, and return the averaged parameters, with whitened latents.

    Parameters
    ----------
    folder : Path
        Holds the state to resume from.
    recipe : Recipe
        Such as ``RECIPE``.
    config : VAEConfig
    judged : int
        How many scenes are encoded and decoded, to be judged.
    """
    about = {"vae": asdict(config), "batch": recipe.batch, "pool": recipe.pool}
    loop.note_training(folder, about)
    pool = scenes.training_scenes(recipe.pool, recipe.seed)
    images = np.concatenate(list(data.render_all(pool)))
    shares = np.array([SMALL_SHARE if scene.size == "small" else 1.0 for scene in pool])
    arrays = {"images": jnp.asarray(images), "shares": jnp.float32(shares / shares.sum())}

    def finish(params: dict) -> dict[str, jax.Array]:
        return normalize_latents(params["vae"], config, images[:2048])

    average = loop.train(
        folder,
        make_task(recipe, config),
        arrays,
        lambda params: judge_restored(finish(params), config, judged),
    )
    return finish(average)
