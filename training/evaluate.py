"""Scores of a bundled checkpoint, by the judge: ``python -m training.evaluate FOLDER``.

Unless told otherwise, the Flax pipeline draws every picture with its own scheduler, 30 steps and
guidance scale 3. Picture ``k`` starts from the latents of ``jax.random.key(k)``, for ``k`` from 0
on, and none is dropped.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from tqdm import tqdm

from course.shapes import judge, scenes
from helpers import image_grid
from training import diffusion
from training.pictures import save

BATCH = 25
SEED = scenes.CAPTION_SEED


def load_generator(
    folder: Path, dtype: jnp.dtype, steps: int, guidance: float
) -> Callable[[list[str]], np.ndarray]:
    """A function from captions to pictures: float32, (n, pixels, pixels, 3), from 0 to 1.

    Parameters are cast to ``dtype``, too, all but the scheduler's.
    """
    pipeline, params = diffusers.FlaxDiffusionPipeline.from_pretrained(
        folder, dtype=dtype, safety_checker=None, feature_extractor=None
    )
    scheduler = params.pop("scheduler")
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    params["scheduler"] = scheduler
    side = pipeline.unet.config.sample_size
    pixels = side * pipeline.vae_scale_factor
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))

    @jax.jit
    @jax.vmap
    def noise(number: jax.Array) -> jax.Array:
        return jax.random.normal(jax.random.key(number), (4, side, side))

    def draw(captions: list[str]) -> np.ndarray:
        drawn = []
        starts = range(0, len(captions), BATCH)
        for start in tqdm(starts, desc="pictures", unit_scale=BATCH, leave=False):
            some = captions[start : start + BATCH]
            ids = pipeline.prepare_inputs(some)
            latents = noise(jnp.arange(start, start + len(some)))
            images = generate(ids, params, None, steps, pixels, pixels, guidance, latents)
            drawn.append(np.float32(images))
        return np.concatenate(drawn)

    return draw


def training_captions(count: int) -> list[dict[str, str | None]]:
    """Attributes that captions name, drawn as in training but for the empty caption."""
    generator = torch.Generator().manual_seed(SEED)
    asked = []
    for scene in scenes.training_scenes(10 * count, SEED):
        named = diffusion.random_attributes(scene, generator)
        if any(named.values()):
            asked.append(named)
        if len(asked) == count:
            return asked
    raise AssertionError("ten times as many scenes are enough")


def score(draw: Callable, asked: list[dict[str, str | None]]) -> dict:
    """The share of pictures in which everything is right, and in which each attribute is."""
    images = draw([scenes.caption(**named) for named in asked])
    refused = []
    all_right = []
    colors_right = []
    by_attribute = defaultdict(list)
    for named, image in zip(asked, images, strict=True):
        seen = judge.read(image)
        refused.append(isinstance(seen, judge.Refusal))
        right = judge.right_attributes(named, seen)
        all_right.append(all(right.values()))
        for name, answer in right.items():
            by_attribute[name].append(answer)
        colors_right.append(has_the_colors(named, judge.read_colors(image)))
    return {
        "pictures": len(asked),
        "all": judge.share(all_right),
        **{name: judge.share(by_attribute[name]) for name in scenes.ATTRIBUTES},
        "refused": judge.share(refused),
        "both colors, whatever the shape": judge.share(colors_right),
    }


def has_the_colors(named: dict[str, str | None], seen: tuple | judge.Refusal) -> bool:
    """Whether the colours that ``judge.read_colors`` sees are those that a caption names."""
    if isinstance(seen, judge.Refusal):
        return False
    background, color, _ = seen
    return named["background"] in (None, background) and named["color"] in (None, color)


def distances(picture: np.ndarray, known: np.ndarray) -> np.ndarray:
    """From a picture to each of some others: the root of the mean squared difference, (others,)."""
    return np.sqrt(np.square(known - picture).mean(axis=(1, 2, 3)))


def nearest(draw: Callable, folder: Path | None) -> dict:
    """How far pictures are from the training scenes: a copy would be nearer than any fresh scene.

    The training scenes are those with the same colour, shape and background (with any other the
    distance is larger). For comparison, the same distance of freshly rendered scenes that training
    never saw. The folder gets an image of drawings above their nearest scenes.
    """
    pool = defaultdict(list)
    for scene in scenes.training_scenes(diffusion.POOL, diffusion.POOL_SEED):
        pool[scene.color, scene.shape, scene.background].append(scene)
    asked = [named for named in training_captions(400) if all(named.values())][:64]
    drawn = draw([scenes.caption(**named) for named in asked])
    rng = np.random.default_rng(SEED)
    of_drawn, of_fresh, neighbours = [], [], []
    for named, image in zip(asked, tqdm(drawn, desc="nearest", leave=False), strict=True):
        combination = named["color"], named["shape"], named["background"]
        known = np.stack([scenes.render(scene) for scene in pool[combination]]) / np.float32(255)
        fresh = scenes.render(scenes.random_scene(rng, *combination, size=named["size"]))
        apart = distances(image, known)
        of_drawn.append(float(apart.min()))
        of_fresh.append(float(distances(fresh / np.float32(255), known).min()))
        neighbours.append(known[apart.argmin()])
    if folder:
        rows = np.concatenate([drawn[:8], neighbours[:8]])
        save(image_grid(rows, columns=8), folder / "nearest.png")
    return {
        "pictures": len(asked),
        "training scenes": diffusion.POOL,
        "median distance": float(np.median(of_drawn)),
        "least distance": min(of_drawn),
        "median distance of fresh scenes": float(np.median(of_fresh)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint in Flax's format")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="what to compute in")
    add("--pictures", type=int, default=400, help="for each of the two scores")
    add("--steps", type=int, default=30, help="default: %(default)s")
    add("--guidance", type=float, default=3.0, help="default: %(default)s")
    add("--nearest", action="store_true", help="measure the distance from the training scenes")
    add("--draw", type=Path, metavar="TO", help="folder for samples.png, and for nearest.png")
    arguments = parser.parse_args()
    # Each would say many times that its Flax classes will go.
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    dtype = jnp.dtype(arguments.dtype)
    draw = load_generator(arguments.folder, dtype, arguments.steps, arguments.guidance)
    report = {
        "checkpoint": arguments.folder.name,
        "dtype": arguments.dtype,
        "training captions": score(draw, training_captions(arguments.pictures)),
        "held-out combinations": score(draw, scenes.held_out_captions(arguments.pictures)),
    }
    if arguments.nearest:
        report["nearest"] = nearest(draw, arguments.draw)
    if arguments.draw:
        captions = [scenes.caption(**named) for named in scenes.held_out_captions(16)]
        save(image_grid(draw(captions), captions=captions), arguments.draw / "samples.png")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
