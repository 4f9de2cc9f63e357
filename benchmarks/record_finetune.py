"""Record how well the full recipe of chapter 14 teaches a bow tie: ``benchmarks/finetune.json``.

Each seed runs the command ``python -m course.finetune`` in a process of its own, once as it is and
once with a weight of 0 for what is rehearsed. The judge looks at what the files draw: bow ties in
colours that the examples had and in others, and old captions of held-out combinations, which are
judged without the LoRA as well. The loss at fixed timesteps is that of the examples, of other bow
ties in the same colours, and of old scenes. What is recorded is left out, so an interrupted run
goes on; no seed is dropped. With ``--ship`` the first seed's files become those in
``checkpoints/taught``.
"""

import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import (
    FOLDER,
    ROOT,
    make_parser,
    origin,
    read_json,
    work_through,
    write_json,
)
from course import sd
from course.finetune import photos, training
from course.model.lora import merge
from course.sd import lora, words
from course.shapes import judge, scenes
from helpers import bundled_checkpoint

TARGET = FOLDER / "finetune.json"
SHIPPED = ROOT / "checkpoints" / "taught"
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
WITHOUT = ["--prior-weight", "0"]  # what is rehearsed does not count, and all else is the same
WAYS = {"with rehearsal": [], "without rehearsal": WITHOUT}
SEEDS = 3
IMAGES = 100
BATCH = 25
STEPS = 30
GUIDANCE = 3.0
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


def read_images(file: Path | None, kinds: dict = KINDS) -> dict[str, list]:
    """Draw each kind of captions, with a LoRA or without, and have the judge read the images."""
    params, config, tokenize = sd.load(bundled_checkpoint("shapes-sd").source)
    if file:
        params, config, tokenize = words.read_word(file, params, config, tokenize)
        params = merge(params, lora.read_lora(file, params, config))
    draw = jax.jit(sd.generate, static_argnames=sd.STATIC)
    found = {}
    for kind, asked in kinds.items():
        found[kind] = []
        for start in range(0, len(asked), BATCH):
            named = asked[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(np.arange(start, start + len(named)))
            ids = tokenize([scenes.caption(**each) for each in named])
            images = draw(params, config, ids, keys, tokenize([""]), STEPS, GUIDANCE)
            for image in np.asarray(images):
                found[kind].append(judge.read(image, scenes.SHAPES + scenes.NEW_SHAPES))
    return found


def score(found: dict[str, list], kinds: dict = KINDS) -> dict[str, float]:
    """The share of images in which the judge finds all that the caption names."""
    shares = {}
    for kind, asked in kinds.items():
        pairs = zip(asked, found[kind], strict=True)
        right = [all(judge.right_attributes(each, seen).values()) for each, seen in pairs]
        shares[kind] = judge.share(right)
    return shares


def count_shapes(found: list) -> dict[str, int]:
    """How many images show which shape, by frequency; "none" where it cannot be named."""
    shapes = [getattr(seen, "shape", "none") for seen in found]
    return dict(Counter(shapes).most_common())


def fixed_losses(file: Path | None) -> dict[str, list[float]]:
    """The loss at each of the timesteps, with a LoRA or without."""
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


def lora_file(folder: Path, way: str, seed: int) -> Path:
    return folder / f"{way.replace(' ', '-')}-{seed}.safetensors"


def train(folder: Path, way: str, seed: int) -> dict:
    """Run the command, and say how long it took, and how many bytes it wrote."""
    target = lora_file(folder, way, seed)
    for path in folder.glob(f"{target.stem}.*"):
        # It was left by an interrupted run, whose seconds would be missing.
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    command = [sys.executable, "-m", "course.finetune", str(folder / "new"), str(target)]
    command += ["--rehearse", str(folder / "old"), *OPTIONS, *WAYS[way], "--seed", str(seed)]
    load = os.getloadavg()[0]
    start = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TUTORIAL_DEVICES": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    written = target.stat().st_size + words.word_file(target).stat().st_size
    return {
        "seconds": round(time.monotonic() - start),
        "core seconds": round(cores),
        "load of others when it began": round(load, 1),
        "bytes": written,
    }


def read_record() -> dict:
    """The record as far as it goes; of other options nothing counts."""
    record = read_json(TARGET, default={"options": None})
    if record["options"] == OPTIONS:
        return record
    old = {"old captions": KINDS["old captions"]}
    return origin("jax", "jaxlib", "optax", "orbax-checkpoint") | {
        "cores": os.cpu_count(),
        "options": OPTIONS,
        "examples": EXAMPLES,
        "rehearsed": REHEARSED,
        "images": IMAGES,
        "timesteps": list(TIMESTEPS),
        "before": {
            "old captions": score(read_images(None, old), old)["old captions"],
            "losses": fixed_losses(None),
        },
        **{way: [] for way in WAYS},
    }


def write_images(folder: Path) -> None:
    """Draw what is trained on: the examples, and what is rehearsed."""
    scenes.write_folder(scenes.new_examples(SHAPE, EXAMPLES), folder / "new")
    scenes.write_folder(scenes.training_scenes(REHEARSED, REHEARSED_SEED), folder / "old")


def record_seed(folder: Path, way: str, seed: int) -> None:
    write_images(folder)
    record = read_record()
    measured = train(folder, way, seed)
    found = read_images(lora_file(folder, way, seed))
    shapes = {kind: count_shapes(found[kind]) for kind in KINDS}
    losses = fixed_losses(lora_file(folder, way, seed))
    entry = {"seed": seed} | measured | score(found) | {"shapes": shapes, "losses": losses}
    record[way].append(entry)
    print(entry, flush=True)
    write_json(TARGET, record)


def find_left(folder: Path) -> dict[str, Callable[[], None]]:
    """The next seed of each way; they are recorded in order."""
    record = read_json(TARGET, default={"options": None})
    left = {}
    for seed in range(SEEDS):
        for way in WAYS:
            if record["options"] != OPTIONS or seed >= len(record[way]):
                left[f"seed {seed} {way}"] = functools.partial(record_seed, folder, way, seed)
    return left


def time_again(folder: Path) -> None:
    """Time the first seed again, and keep its scores."""
    write_images(folder)
    record = read_json(TARGET, default=None)
    way = next(iter(WAYS))
    record[way][0] |= train(folder, way, 0)
    write_json(TARGET, record)


def ship(folder: Path) -> None:
    """Replace the files in ``checkpoints/taught`` by the first seed's."""
    file = lora_file(folder, next(iter(WAYS)), 0)
    if not file.exists():
        sys.exit(f"{file} is not there: give the --folder in which the first seed was trained.")
    SHIPPED.mkdir(exist_ok=True)
    shutil.copyfile(file, SHIPPED / f"{SHAPE}.safetensors")
    shutil.copyfile(words.word_file(file), SHIPPED / f"{SHAPE}.word.safetensors")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, help="where files are kept (default: a temporary one)"
    )
    parser.add_argument(
        "--ship", action="store_true", help="replace the files in checkpoints/taught"
    )
    parser.add_argument(
        "--time",
        action="store_true",
        help="only time the first seed again, on a machine that is quiet",
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    if options.time:
        time_again(folder)
        return 0
    status = work_through(lambda: find_left(folder), options)
    if options.ship and not options.list:
        ship(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
