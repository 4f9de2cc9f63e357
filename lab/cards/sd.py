"""Scores of a bundled checkpoint, by the judge: ``python -m lab.cards.sd FOLDER``.

Unless told otherwise, the checkpoint draws every picture with its own sampler, 30 steps and
guidance scale 3. Picture ``k`` starts from the noise of ``jax.random.key(k)``, for ``k`` from 0 on,
and none is dropped.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course import sd
from course.shapes import scenes
from helpers import image_grid
from lab.cards.pictures import save_picture
from lab.train import data, unet
from lab.train.judging import GUIDANCE, count_attributes, make_drawing

SEED = scenes.CAPTION_SEED


def training_captions(count: int) -> list[dict[str, str | None]]:
    """Return attributes that captions name, drawn as in training but for the empty caption."""
    pool = scenes.training_scenes(2 * count, SEED)
    attributes = jnp.array([data.attribute_indices(scene) for scene in pool])
    numbers = data.random_captions(jax.random.key(SEED), attributes, unet.FULL_CAPTIONS)
    asked = [data.attributes_of(int(number)) for number in numbers]
    return [named for named in asked if any(named.values())][:count]


def score(draw: Callable, asked: list[dict[str, str | None]]) -> dict:
    """Return the share of pictures in which all is right, and in which each attribute is."""
    counts = count_attributes(asked, draw([scenes.caption(**named) for named in asked]))
    pictures = len(asked)
    shares = {"pictures": pictures, "all": counts["right"] / pictures}
    for name in scenes.ATTRIBUTES:
        shares[name] = counts[name] / sum(named[name] is not None for named in asked)
    shares["refused"] = counts["refused"] / pictures
    shares["both colors, whatever the shape"] = counts["colors"] / pictures
    return shares


def distances(picture: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Return the root of the mean squared difference to each of some other pictures, (others,)."""
    return np.sqrt(np.square(known - picture).mean(axis=(1, 2, 3)))


def nearest(draw: Callable, folder: Path | None) -> dict:
    """Return how far pictures are from the training scenes: a copy would be nearer than others.

    The training scenes are those with the same colour, shape and background (with any other the
    distance is larger). For comparison, the same distance of freshly rendered scenes that training
    never saw. The folder gets an image of drawings above their nearest scenes.
    """
    pool = defaultdict(list)
    for scene in scenes.training_scenes(unet.FIRST.pool, data.POOL_SEED):
        pool[scene.color, scene.shape, scene.background].append(scene)
    asked = [named for named in training_captions(400) if all(named.values())][:64]
    drawn = draw([scenes.caption(**named) for named in asked])
    rng = np.random.default_rng(SEED)
    of_drawn, of_fresh, neighbours = [], [], []
    for named, image in zip(asked, drawn, strict=True):
        combination = named["color"], named["shape"], named["background"]
        known = np.stack([scenes.render(scene) for scene in pool[combination]]) / np.float32(255)
        fresh = scenes.render(scenes.random_scene(rng, *combination, size=named["size"]))
        apart = distances(image, known)
        of_drawn.append(float(apart.min()))
        of_fresh.append(float(distances(fresh / np.float32(255), known).min()))
        neighbours.append(known[apart.argmin()])
    if folder:
        rows = np.concatenate([drawn[:8], neighbours[:8]])
        save_picture(image_grid(rows, columns=8), folder / "nearest.png")
    return {
        "pictures": len(asked),
        "training scenes": unet.FIRST.pool,
        "median distance": float(np.median(of_drawn)),
        "least distance": min(of_drawn),
        "median distance of fresh scenes": float(np.median(of_fresh)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, help="a checkpoint of Stable Diffusion 1 or XL")
    add("--dtype", choices=["float32", "bfloat16"], default="float32", help="what to compute in")
    add("--pictures", type=int, default=400, help="for each of the two scores")
    add("--steps", type=int, default=30, help="default: %(default)s")
    add("--guidance", type=float, default=GUIDANCE, help="default: %(default)s")
    add("--nearest", action="store_true", help="measure the distance from the training scenes")
    add("--draw", type=Path, metavar="TO", help="folder for samples.png, and for nearest.png")
    arguments = parser.parse_args()
    params, config, tokenize = sd.load(arguments.folder, jnp.dtype(arguments.dtype))
    draw = partial(
        make_drawing(config, tokenize),
        params,
        steps=arguments.steps,
        guidance=arguments.guidance,
    )
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
        save_picture(image_grid(draw(captions), captions=captions), arguments.draw / "samples.png")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
