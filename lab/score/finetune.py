"""How well the command of chapter 14 teaches bundled models a bow tie.

Each seed runs ``python -m course.finetune`` in a process of its own, and the judge looks at what
the files draw: bow ties in colours that the examples had and in others, and old captions of
held-out combinations, which are judged without the LoRA as well. Stable Diffusion is also trained
with a weight of 0 for what is rehearsed. The loss at fixed timesteps is that of the examples, of
other bow ties in the same colours, and of old scenes. The files stay in ``build/finetune``, in a
folder for each model: the first seed's of ``shapes-sd``, with rehearsal, are those in
``checkpoints/taught``.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course.families import code_of, find_code
from course.finetune import photos, training
from course.model.lora import merge
from course.sd import words
from course.shapes import judge, scenes
from helpers import find_model
from lab.record import ROOT

FOLDER = ROOT / "build" / "finetune"
SHAPE = "bowtie"
EXAMPLES = 24
REHEARSED = 1500
REHEARSED_SEED = 7
# Without, what is rehearsed does not count, and all else is the same.
WAYS = {"with rehearsal": [], "without rehearsal": ["--prior-weight", "0"]}
SEEDS = 3
IMAGES = 100
BATCH = 25  # images drawn at a time
GUIDANCE = 3.0
OTHER_COLORS = tuple(color for color in scenes.COLORS if color not in scenes.TAUGHT_COLORS)
TIMESTEPS = (100, 300, 500, 700, 900)  # at which the loss is recorded


class Taught(NamedTuple):
    """How a bundled model is taught and judged."""

    options: str  # of the command
    steps: int  # of drawing
    ways: tuple[str, ...] = tuple(WAYS)
    name: str = SHAPE  # what captions call a bow tie
    has_size: bool = True  # whether captions of bow ties say how large they are


MODELS = {
    "shapes-sd": Taught(
        "--word bowtie --like star --mirror --rank 12 --steps 600 --batch 24 --rehearsed 12 "
        "--rate 3e-3",
        steps=30,
    ),
    # It reads few tokens, and "bowtie" would take four.
    "shapes-flux2": Taught(
        "--mirror --rank 12 --steps 450 --batch 12 --rehearsed 4 --rate 5e-3",
        steps=8,
        ways=("with rehearsal",),
        name="bow",
        has_size=False,
    ),
}


def questions(rows: list[dict]) -> list[dict]:
    asked = []
    for model, taught in MODELS.items():
        recipe = {
            "options": taught.options,
            "examples": EXAMPLES,
            "rehearsed": REHEARSED,
            "images": IMAGES,
            "timesteps": list(TIMESTEPS),
        }
        runs = [{"way": "before", "seed": None}]
        runs += [{"way": way, "seed": seed} for seed in range(SEEDS) for way in taught.ways]
        asked += [{"model": model} | run | recipe for run in runs]
    return asked


def answer(model: str, way: str, seed: int | None, **recipe) -> dict:
    asked = captions_of(model)
    if way == "before":
        old = {"old captions": asked["old captions"]}
        return score(read_images(model, None, old), old) | {"losses": fixed_losses(model, None)}
    file = FOLDER / model / f"{way.replace(' ', '-')}-{seed}.safetensors"
    measured = train(model, file, [*WAYS[way], "--seed", str(seed)])
    found = read_images(model, file, asked)
    shapes = {kind: count_shapes(found[kind]) for kind in asked}
    losses = fixed_losses(model, file)
    return measured | score(found, asked) | {"shapes": shapes, "losses": losses}


def captions_of(model: str) -> dict[str, list[dict]]:
    """Return what each kind of captions names."""
    kinds = {
        "colors of the examples": scenes.new_captions(SHAPE, scenes.TAUGHT_COLORS, IMAGES),
        "other colors": scenes.new_captions(SHAPE, OTHER_COLORS, IMAGES),
    }
    if not MODELS[model].has_size:
        for kind, asked in kinds.items():
            kinds[kind] = [named | {"size": None} for named in asked]
    return kinds | {"old captions": scenes.held_out_captions(IMAGES)}


def write_folder(model: str, examples: list[scenes.Scene], folder: Path) -> None:
    """Write scenes with captions in the words that a model is taught with."""
    if examples[0].shape == SHAPE and not MODELS[model].has_size:
        examples = [replace(each, size=None) for each in examples]
    scenes.write_folder(examples, folder)
    listed = folder / photos.TABLES[0]
    listed.write_text(listed.read_text().replace(SHAPE, MODELS[model].name))


def train(model: str, file: Path, options: list[str]) -> dict:
    """Run the command, and return how long it took, and how many bytes it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        write_folder(model, scenes.new_examples(SHAPE, EXAMPLES), new)
        write_folder(model, scenes.training_scenes(REHEARSED, REHEARSED_SEED), old)
        # It is trained from the beginning, or its seconds would be missing.
        target = Path(folder) / file.name
        command = [sys.executable, "-m", "course.finetune", str(new), str(target)]
        command += ["--model", model, "--rehearse", str(old)]
        command += [*MODELS[model].options.split(), *options]
        load = os.getloadavg()[0]
        start = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, env=os.environ | {"TUTORIAL_DEVICES": "1"}, check=True)
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        for made in filter(Path.exists, (target, words.word_file(target))):
            written += made.stat().st_size
            shutil.move(made, file.with_name(made.name))
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds),
        "core seconds": round(cores),
        "load of others when it began": round(load, 1),
        "bytes": written,
    }


def load(model: str, file: Path | None) -> tuple:
    """Return a model's parameters, configuration and tokenizer, and what a file adds to them.

    The latter is a LoRA, by parts of the model; what the file has of a word is in the others.
    """
    source = find_model(model)
    code = find_code(source)
    params, config, tokenize = code.load(source, "float32")
    if not file:
        return params, config, tokenize, {}
    if words.word_file(file).exists():
        params, config, tokenize = words.read_word(file, params, config, tokenize)
    return params, config, tokenize, code.read_lora(file, params, config)


def read_images(model: str, file: Path | None, kinds: dict[str, list[dict]]) -> dict[str, list]:
    """Draw each kind of captions, with a LoRA or without, and have the judge read the images."""
    params, config, tokenize, pairs = load(model, file)
    params = merge(params, pairs)
    draw = code_of(config).make_drawing(config, tokenize, MODELS[model].steps, GUIDANCE)
    found = {}
    for kind, asked in kinds.items():
        captions = [scenes.caption(**each).replace(SHAPE, MODELS[model].name) for each in asked]
        images = []
        for start in range(0, len(captions), BATCH):
            some = captions[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(jnp.arange(start, start + len(some)))
            images += list(np.float32(draw(params, tokenize(some), keys)))
        found[kind] = [
            judge.read_scene(image, scenes.SHAPES + scenes.NEW_SHAPES) for image in images
        ]
    return found


def score(found: dict[str, list], kinds: dict[str, list[dict]]) -> dict[str, float]:
    """Return the share of images in which the judge finds all that the caption names."""
    shares = {}
    for kind, asked in kinds.items():
        pairs = zip(asked, found[kind], strict=True)
        right = [judge.is_as_asked(each, seen) for each, seen in pairs]
        shares[kind] = judge.share(right)
    return shares


def count_shapes(found: list) -> dict[str, int]:
    """Count the images that show which shape, by frequency; "none" where it cannot be named."""
    shapes = [getattr(seen, "shape", "none") for seen in found]
    return dict(Counter(shapes).most_common())


def fixed_losses(model: str, file: Path | None) -> dict[str, list[float]]:
    """Return the loss at each of the timesteps, with a LoRA or without."""
    params, config, tokenize, pairs = load(model, file)
    has_word = "--word" in MODELS[model].options
    if has_word and not file:
        params, config, tokenize = words.add_word(params, config, tokenize, SHAPE, "star")
    recorded = {
        "examples": scenes.new_examples(SHAPE, EXAMPLES),
        "other bow ties": scenes.new_examples(SHAPE, EXAMPLES, seed=1),
        "old scenes": scenes.training_scenes(EXAMPLES, REHEARSED_SEED + 1),
    }
    loss_at = jax.jit(training.loss_at, static_argnames="config")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, examples in recorded.items():
            write_folder(model, examples, Path(folder) / name)
            images = photos.read_folder(Path(folder) / name, config.side, config.side)
            data = training.make_data(params, config, tokenize, images, word=has_word)
            losses = [loss_at(t, {"lora": pairs}, params, data, config) for t in TIMESTEPS]
            found[name] = [round(float(loss), 4) for loss in losses]
    return found
