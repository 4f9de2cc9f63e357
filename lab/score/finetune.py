"""How well the full recipe of chapter 14 teaches a bow tie.

Each seed runs the command ``python -m course.finetune`` in a process of its own, once as it is and
once with a weight of 0 for what is rehearsed. The judge looks at what the files draw: bow ties in
colours that the examples had and in others, and old captions of held-out combinations, which are
judged without the LoRA as well. The loss at fixed timesteps is that of the examples, of other bow
ties in the same colours, and of old scenes. The files stay in ``build/finetune``: the first seed's
with rehearsal are those in ``checkpoints/taught``.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import jax

from course import sd
from course.finetune import photos, training
from course.model.lora import merge
from course.sd import lora, words
from course.shapes import judge, scenes
from helpers import bundled_checkpoint
from lab.record import ROOT
from lab.train.judging import make_drawing

FOLDER = ROOT / "build" / "finetune"
SHAPE = "bowtie"
EXAMPLES = 24
REHEARSED = 1500
REHEARSED_SEED = 7
OPTIONS = [
    *("--word", SHAPE),
    *("--like", "star"),
    "--mirror",
    *("--rank", "12"),
    *("--steps", "600"),
    *("--batch", "24"),
    *("--rehearsed", "12"),
    *("--rate", "3e-3"),
]
# Without, what is rehearsed does not count, and all else is the same.
WAYS = {"with rehearsal": [], "without rehearsal": ["--prior-weight", "0"]}
SEEDS = 3
IMAGES = 100
STEPS = 30
OTHER_COLORS = tuple(color for color in scenes.COLORS if color not in scenes.TAUGHT_COLORS)
KINDS = {
    "colors of the examples": scenes.new_captions(SHAPE, scenes.TAUGHT_COLORS, IMAGES),
    "other colors": scenes.new_captions(SHAPE, OTHER_COLORS, IMAGES),
    "old captions": scenes.held_out_captions(IMAGES),
}
TIMESTEPS = (100, 300, 500, 700, 900)  # at which the loss is recorded
# What it is recorded of.
LOSSES = {
    "examples": scenes.new_examples(SHAPE, EXAMPLES),
    "other bow ties": scenes.new_examples(SHAPE, EXAMPLES, seed=1),
    "old scenes": scenes.training_scenes(EXAMPLES, REHEARSED_SEED + 1),
}


def questions(rows: list[dict]) -> list[dict]:
    recipe = {
        "options": " ".join(OPTIONS),
        "examples": EXAMPLES,
        "rehearsed": REHEARSED,
        "images": IMAGES,
        "timesteps": list(TIMESTEPS),
    }
    asked = [{"way": "before", "seed": None}]
    asked += [{"way": way, "seed": seed} for seed in range(SEEDS) for way in WAYS]
    return [each | recipe for each in asked]


def answer(way: str, seed: int | None, **recipe) -> dict:
    if way == "before":
        old = {"old captions": KINDS["old captions"]}
        return score(read_images(None, old), old) | {"losses": fixed_losses(None)}
    file = FOLDER / f"{way.replace(' ', '-')}-{seed}.safetensors"
    measured = train(file, [*OPTIONS, *WAYS[way], "--seed", str(seed)])
    found = read_images(file)
    shapes = {kind: count_shapes(found[kind]) for kind in KINDS}
    return measured | score(found) | {"shapes": shapes, "losses": fixed_losses(file)}


def train(file: Path, options: list[str]) -> dict:
    """Run the command, and return how long it took, and how many bytes it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        new, old = Path(folder) / "new", Path(folder) / "old"
        scenes.write_folder(scenes.new_examples(SHAPE, EXAMPLES), new)
        scenes.write_folder(scenes.training_scenes(REHEARSED, REHEARSED_SEED), old)
        # It is trained from the beginning, or its seconds would be missing.
        target = Path(folder) / file.name
        command = [sys.executable, "-m", "course.finetune", str(new), str(target)]
        command += ["--rehearse", str(old), *options]
        load = os.getloadavg()[0]
        start = time.monotonic()
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, cwd=ROOT, env=os.environ | {"TUTORIAL_DEVICES": "1"}, check=True)
        seconds = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        file.parent.mkdir(parents=True, exist_ok=True)
        written = 0
        for made in (target, words.word_file(target)):
            written += made.stat().st_size
            shutil.move(made, file.with_name(made.name))
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "seconds": round(seconds),
        "core seconds": round(cores),
        "load of others when it began": round(load, 1),
        "bytes": written,
    }


def read_images(file: Path | None, kinds: dict = KINDS) -> dict[str, list]:
    """Draw each kind of captions, with a LoRA or without, and have the judge read the images."""
    params, config, tokenize = sd.load(bundled_checkpoint("shapes-sd").source)
    if file:
        params, config, tokenize = words.read_word(file, params, config, tokenize)
        params = merge(params, lora.read_lora(file, params, config))
    draw = make_drawing(config, tokenize)
    found = {}
    for kind, asked in kinds.items():
        images = draw(params, [scenes.caption(**named) for named in asked], STEPS)
        found[kind] = [
            judge.read_scene(image, scenes.SHAPES + scenes.NEW_SHAPES) for image in images
        ]
    return found


def score(found: dict[str, list], kinds: dict = KINDS) -> dict[str, float]:
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


def fixed_losses(file: Path | None) -> dict[str, list[float]]:
    """Return the loss at each of the timesteps, with a LoRA or without."""
    params, config, tokenize = sd.load(bundled_checkpoint("shapes-sd").source)
    if file:
        params, config, tokenize = words.read_word(file, params, config, tokenize)
        trained = {"lora": lora.read_lora(file, params, config)}
    else:
        params, config, tokenize = words.add_word(params, config, tokenize, SHAPE, "star")
        trained = {"lora": {}}
    loss_at = jax.jit(training.loss_at, static_argnames="config")
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, examples in LOSSES.items():
            scenes.write_folder(examples, Path(folder) / name)
            side = config.unet.sample_size * config.pixels_per_latent
            images = photos.read_folder(Path(folder) / name, side, side)
            data = training.make_data(params, config, tokenize, images, word=True)
            losses = [loss_at(t, trained, params, data, config) for t in TIMESTEPS]
            found[name] = [round(float(loss), 4) for loss in losses]
    return found
