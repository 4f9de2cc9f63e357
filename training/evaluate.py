"""Scores of a bundled checkpoint, by the judge: ``python -m training.evaluate checkpoints/shapes-sd``.

Unless told otherwise, the Flax pipeline draws every picture with its own scheduler, 30 steps and guidance scale 3.
Picture ``k`` starts from the latents of ``jax.random.key(k)``, for ``k`` from 0 on, and none is dropped.
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
from PIL import Image
from tqdm import tqdm

from helpers import image_grid
from training import diffusion, fidelity, scenes, sd, sdxl, spoiled

BATCH = 25
SEED = scenes.CAPTION_SEED


def load_generator(
    folder: Path, dtype: jnp.dtype, steps: int = diffusion.STEPS, guidance: float = diffusion.GUIDANCE_SCALE
) -> Callable[..., np.ndarray]:
    """A function from captions and key numbers to pictures: float32 of shape (n, pixels, pixels, 3), from 0 to 1.

    Parameters are cast to ``dtype``, too, all but the scheduler's.
    """
    pipeline, params = diffusers.FlaxDiffusionPipeline.from_pretrained(
        folder, dtype=dtype, safety_checker=None, feature_extractor=None
    )
    scheduler = params.pop("scheduler")
    params = jax.tree.map(lambda x: x.astype(dtype), params) | {"scheduler": scheduler}
    side = pipeline.unet.config.sample_size
    pixels = side * pipeline.vae_scale_factor
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))
    draw = jax.jit(jax.vmap(lambda key: jax.random.normal(jax.random.key(key), (4, side, side))))

    def pictures(captions: list[str], keys: np.ndarray, negative: str | None = None) -> np.ndarray:
        drawn = []
        for start in tqdm(range(0, len(captions), BATCH), desc="pictures", unit_scale=BATCH, leave=False):
            ids = pipeline.prepare_inputs(captions[start : start + BATCH])
            latents = draw(jnp.asarray(keys[start : start + BATCH]))
            unwanted = None if negative is None else pipeline.prepare_inputs([negative] * len(ids))
            images = generate(ids, params, None, steps, pixels, pixels, guidance, latents, unwanted)
            drawn.append(np.float32(images))
        return np.concatenate(drawn)

    return pictures


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


def score(generate: Callable, asked: list[dict[str, str | None]]) -> dict:
    """The share of pictures in which everything is right, and for each attribute the share in which it is."""
    images = generate([scenes.caption(**named) for named in asked], np.arange(len(asked)))
    readings = [fidelity.read(image) for image in images]
    right = [fidelity.right_attributes(named, reading) for named, reading in zip(asked, readings, strict=True)]
    by_attribute = defaultdict(list)
    for answers in right:
        for name, answer in answers.items():
            by_attribute[name].append(answer)
    colors = [fidelity.read_colors(image) for image in images]
    return {
        "pictures": len(asked),
        "both_colors_whatever_the_shape": fidelity.share(
            not isinstance(seen, fidelity.Refusal)
            and named["background"] in (None, seen[0])
            and named["color"] in (None, seen[1])
            for named, seen in zip(asked, colors, strict=True)
        ),
        "all_right": fidelity.share(all(answers.values()) for answers in right),
        **{name: fidelity.share(by_attribute[name]) for name in scenes.ATTRIBUTES},
        "refused": fidelity.share(isinstance(reading, fidelity.Refusal) for reading in readings),
    }


def judge_scores(count: int, pixels: int) -> dict:
    """How often the judge reads a rendered scene right, and refuses each kind of picture that is none."""
    rng = np.random.default_rng(SEED)
    choices = scenes.combinations()
    rendered = [scenes.random_scene(rng, *choices[i]) for i in rng.integers(len(choices), size=count)]
    right = (
        all(
            fidelity.right_attributes(
                {a: getattr(scene, a) for a in scenes.ATTRIBUTES}, fidelity.read(scenes.render(scene, pixels))
            ).values()
        )
        for scene in rendered
    )
    refused = {
        kind: fidelity.share(isinstance(fidelity.read(make(rng, pixels)), fidelity.Refusal) for _ in range(count // 4))
        for kind, make in spoiled.KINDS.items()
    }
    return {"rendered scenes": count, "read right": fidelity.share(right), "refused": refused}


def variety(generate: Callable) -> dict:
    """How much the pictures of one caption differ: the spread of place and tilt, and the values of what is left open.

    Spreads are standard deviations over 32 keys, divided by those of 2,000 rendered scenes of the same size. A caption
    of whose pictures the judge reads fewer than 8 has none.
    """
    rng = np.random.default_rng(SEED)
    ratios = defaultdict(list)
    for size, color, shape, background in (
        ("small", "red", "heart", "white"),
        ("medium", "blue", "star", "yellow"),
        ("small", "green", "arrow", "black"),
        ("medium", "white", "moon", "purple"),
    ):
        images = generate([scenes.caption(size, color, shape, background)] * 32, np.arange(32))
        read = [reading for reading in map(fidelity.read, images) if isinstance(reading, scenes.Scene)]
        if len(read) < 8:
            continue  # too few to speak of a spread
        drawn = [scenes.random_scene(rng, color, shape, background, size) for _ in range(2_000)]
        for name in ("x", "y", "tilt"):
            spread, reference = (np.std([getattr(scene, name) for scene in group]) for group in (read, drawn))
            ratios[name].append(float(spread / reference))
    open_values = {}
    for name, options in (
        ("color", scenes.COLORS),
        ("shape", scenes.SHAPES),
        ("size", scenes.SIZES),
        ("background", scenes.BACKGROUNDS),
    ):
        named = {"size": "medium", "color": "red", "shape": "heart", "background": "white"} | {name: None}
        images = generate([scenes.caption(**named)] * 64, np.arange(64))
        seen = {getattr(fidelity.read(image), name, None) for image in images} - {None}
        open_values[name] = f"{len(seen)} of {len(options)}"
    return {"spread_against_renderer": {k: [round(r, 2) for r in v] for k, v in ratios.items()}, "open": open_values}


def nearest(generate: Callable, recipe: diffusion.Recipe, folder: Path | None) -> dict:
    """How far pictures are from the training scenes: a copy would be nearer than any fresh scene is.

    The distance is the root of the mean squared difference of pixels from 0 to 1; the training scenes are those with
    the same colour, shape and background (with any other the distance is larger). For comparison, the same distance of
    freshly rendered scenes that training never saw. The folder gets a picture of drawings above their nearest scenes.
    """
    asked = [named for named in training_captions(400) if all(named.values())][:64]
    drawn = generate([scenes.caption(**named) for named in asked], np.arange(len(asked)))
    pool = defaultdict(list)
    for scene in scenes.training_scenes(diffusion.POOL, diffusion.POOL_SEED):
        pool[scene.color, scene.shape, scene.background].append(scene)
    rng = np.random.default_rng(SEED)
    distances, fresh_distances, found = [], [], []
    for named, image in zip(asked, tqdm(drawn, desc="nearest", leave=False), strict=True):
        named_three = named["color"], named["shape"], named["background"]
        known = np.stack([scenes.render(scene, recipe.pixels) for scene in pool[named_three]]) / np.float32(255)
        fresh_scene = scenes.random_scene(rng, *named_three, named["size"])
        fresh = scenes.render(fresh_scene, recipe.pixels) / np.float32(255)
        apart, fresh_apart = (np.sqrt(np.square(known - p).mean(axis=(1, 2, 3))) for p in (image, fresh))
        distances.append(float(apart.min()))
        fresh_distances.append(float(fresh_apart.min()))
        found.append(known[apart.argmin()])
    if folder:
        save(image_grid(np.concatenate([drawn[:8], np.stack(found[:8])]), columns=8), folder / "nearest.png")
    return {
        "pictures": len(asked),
        "training scenes": diffusion.POOL,
        "distance": float(np.median(distances)),
        "distance of fresh scenes": float(np.median(fresh_distances)),
        "least distance": min(distances),
    }


def negative_prompt(generate: Callable, count: int) -> dict:
    """The share of red hearts among hearts of any colour, without and with the negative prompt ``red``."""
    prompt, unwanted = "a heart on a white background", "red"
    shares = {}
    for kind, negative in (("without", None), ("with it", unwanted)):
        images = generate([prompt] * count, np.arange(count), negative)
        seen = [fidelity.read(image) for image in images]
        shares[kind] = fidelity.share(
            isinstance(scene, scenes.Scene) and (scene.color, scene.shape) == (unwanted, "heart") for scene in seen
        )
    return {"pictures": count, "prompt": prompt, "unwanted": unwanted, **shares}


def save(picture: Image.Image, file: Path) -> None:
    """Write a PNG with 52 levels for each colour: half the bytes, and no difference that can be seen."""
    picture.point(lambda level: 5 * round(level / 5)).save(file, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint in Flax format")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="what to compute in")
    parser.add_argument("--pictures", type=int, default=400, help="for each of the two scores")
    parser.add_argument("--steps", type=int, default=diffusion.STEPS, help="default: %(default)s")
    parser.add_argument("--guidance", type=float, default=diffusion.GUIDANCE_SCALE, help="default: %(default)s")
    parser.add_argument("--judge", type=int, metavar="N", help="test the judge itself on N rendered scenes as well")
    parser.add_argument("--variety", action="store_true", help="measure how much the pictures of one caption differ")
    parser.add_argument("--nearest", action="store_true", help="measure the distance from the training scenes")
    parser.add_argument("--negative", type=int, metavar="N", help="measure a negative prompt on N pictures")
    parser.add_argument("--draw", type=Path, metavar="FOLDER", help="for samples.png and, with --nearest, nearest.png")
    arguments = parser.parse_args()
    # Each would say many times that its Flax classes will go.
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    recipe = sdxl.RECIPE if (arguments.folder / "text_encoder_2").exists() else sd.RECIPE
    generate = load_generator(arguments.folder, jnp.dtype(arguments.dtype), arguments.steps, arguments.guidance)
    report = {
        "checkpoint": arguments.folder.name,
        "dtype": arguments.dtype,
        "training captions": score(generate, training_captions(arguments.pictures)),
        "held-out combinations": score(generate, scenes.held_out_captions(arguments.pictures)),
    }
    if arguments.judge:
        report["judge"] = judge_scores(arguments.judge, recipe.pixels)
    if arguments.variety:
        report["variety"] = variety(generate)
    if arguments.nearest:
        report["nearest"] = nearest(generate, recipe, arguments.draw)
    if arguments.negative:
        report["negative prompt"] = negative_prompt(generate, arguments.negative)
    if arguments.draw:
        named = scenes.held_out_captions(16)
        captions = [scenes.caption(**attributes) for attributes in named]
        save(image_grid(generate(captions, np.arange(16)), captions=captions), arguments.draw / "samples.png")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
