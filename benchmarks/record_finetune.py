"""Record how well the full recipe of chapter 14 teaches a bow tie: ``benchmarks/finetune.json``.

Each seed runs the command ``python -m course.finetune`` in a process of its own, and the judge
looks at what the file that it wrote draws: bow ties in colours that the examples had and in others,
and old captions of held-out combinations, which are judged without the LoRA as well. What is
recorded is left out, so an interrupted run goes on; no seed is dropped. With ``--ship`` the first
seed's files become those in ``checkpoints/taught``.
"""

import functools
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import stable_diffusion as sd
from benchmarks.common import (
    FOLDER,
    ROOT,
    make_parser,
    origin,
    read_json,
    work_through,
    write_json,
)
from helpers import bundled_checkpoint
from shapes import judge, scenes
from stable_diffusion import lora

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
SEEDS = 5
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


def score(file: Path | None, kinds: dict = KINDS) -> dict:
    """The share of images in which the judge finds all that the caption names.

    They are drawn with a LoRA, or without, for each kind of caption.
    """
    params, config, tokenize = sd.load(bundled_checkpoint("shapes-sd").source)
    if file:
        params, config, tokenize = lora.read_word(file, params, config, tokenize)
        params = lora.merge(params, lora.read_lora(file, params, config))
    draw = jax.jit(sd.generate, static_argnames=sd.STATIC)
    found = {}
    for kind, asked in kinds.items():
        right = []
        for start in range(0, len(asked), BATCH):
            named = asked[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(np.arange(start, start + len(named)))
            ids = tokenize([scenes.caption(**each) for each in named])
            images = draw(params, config, ids, keys, tokenize([""]), STEPS, GUIDANCE)
            for each, image in zip(named, np.asarray(images), strict=True):
                seen = judge.read(image, scenes.SHAPES + scenes.NEW_SHAPES)
                right.append(all(judge.right_attributes(each, seen).values()))
        found[kind] = judge.share(right)
    return found


def lora_file(folder: Path, seed: int) -> Path:
    return folder / f"{seed}.safetensors"


def train(folder: Path, seed: int) -> dict:
    """Run the command, and say how long it took, and how many bytes it wrote."""
    for path in folder.glob(f"{seed}.*"):
        # It was left by an interrupted run, whose seconds would be missing.
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    target = lora_file(folder, seed)
    command = [sys.executable, "-m", "course.finetune", str(folder / "new"), str(target)]
    command += ["--rehearse", str(folder / "old"), *OPTIONS, "--seed", str(seed)]
    load = os.getloadavg()[0]
    start = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TUTORIAL_DEVICES": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    written = target.stat().st_size + lora.word_file(target).stat().st_size
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
    return origin("jax", "jaxlib", "optax", "orbax-checkpoint") | {
        "cores": os.cpu_count(),
        "options": OPTIONS,
        "examples": EXAMPLES,
        "rehearsed": REHEARSED,
        "images": IMAGES,
        "before": score(None, {"old captions": KINDS["old captions"]}),
        "seeds": [],
    }


def write_images(folder: Path) -> None:
    """Draw what is trained on: the examples, and what is rehearsed."""
    scenes.write_folder(scenes.new_examples(SHAPE, EXAMPLES), folder / "new")
    scenes.write_folder(scenes.training_scenes(REHEARSED, REHEARSED_SEED), folder / "old")


def record_seed(folder: Path, seed: int) -> None:
    write_images(folder)
    record = read_record()
    measured = train(folder, seed)
    record["seeds"].append({"seed": seed} | measured | score(lora_file(folder, seed)))
    print(record["seeds"][-1], flush=True)
    write_json(TARGET, record)


def find_left(folder: Path) -> dict[str, Callable[[], None]]:
    """The next seed; they are recorded in order."""
    record = read_json(TARGET, default={"options": None})
    recorded = len(record["seeds"]) if record["options"] == OPTIONS else 0
    left = {}
    for seed in range(recorded, SEEDS):
        left[f"seed {seed}"] = functools.partial(record_seed, folder, seed)
    return left


def time_again(folder: Path) -> None:
    """Time the first seed again, and keep its scores."""
    write_images(folder)
    record = read_json(TARGET, default=None)
    record["seeds"][0] |= train(folder, 0)
    write_json(TARGET, record)


def ship(folder: Path) -> None:
    """Replace the files in ``checkpoints/taught`` by the first seed's."""
    file = lora_file(folder, 0)
    if not file.exists():
        sys.exit(f"{file} is not there: give the --folder in which the first seed was trained.")
    SHIPPED.mkdir(exist_ok=True)
    shutil.copyfile(file, SHIPPED / f"{SHAPE}.safetensors")
    shutil.copyfile(lora.word_file(file), SHIPPED / f"{SHAPE}.word.safetensors")


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
