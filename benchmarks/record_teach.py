"""Record how well the full recipe of chapter 14 teaches a bow tie: ``python -m benchmarks.record_teach``.

Each seed runs the command ``python -m course.teach`` in a process of its own, and the judge looks at what the file that
it wrote draws: bow ties in colours that the examples had and in others, and old captions of held-out combinations,
which are judged without the LoRA as well. What is recorded is left out, so an interrupted run goes on; no seed is
dropped. With ``--ship`` the first seed's files become those in ``checkpoints/taught``.
"""

import argparse
import datetime
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

import stable_diffusion as sd
from course import lora, teach
from course.tpu.compiler import versions, write_json
from helpers import bundled_checkpoint
from training import fidelity, scenes

ROOT = Path(__file__).resolve().parents[1]
TARGET, SHIPPED = Path(__file__).with_name("teach.json"), ROOT / "checkpoints" / "taught"
SHAPE, EXAMPLES, REHEARSED, REHEARSED_SEED = "bowtie", 24, 1500, 7
OPTIONS = ["--word", SHAPE, "--like", "star", "--mirror", "--rank", "12", "--steps", "600"]
OPTIONS += ["--batch", "24", "--rehearsed", "12", "--rate", "3e-3"]
SEEDS, IMAGES, BATCH = 5, 100, 25
STEPS, GUIDANCE = 30, 3.0
KINDS = {
    "colors of the examples": scenes.new_captions(SHAPE, scenes.TAUGHT_COLORS, IMAGES),
    "other colors": scenes.new_captions(
        SHAPE, tuple(color for color in scenes.COLORS if color not in scenes.TAUGHT_COLORS), IMAGES
    ),
    "old captions": scenes.held_out_captions(IMAGES),
}


def score(file: Path | None, kinds: dict = KINDS) -> dict:
    """The share of images in which the judge finds all that the caption names, with a LoRA or without."""
    params, config, tokenize = sd.load(bundled_checkpoint("shapes-sd").source)
    if file:
        params, config, tokenize = teach.read_word(file, params, config, tokenize)
        params = lora.merge(params, lora.read_lora(file, params, config))
    draw, found = jax.jit(sd.generate, static_argnames=sd.STATIC), {}
    for kind, asked in kinds.items():
        right = []
        for start in range(0, len(asked), BATCH):
            named = asked[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(np.arange(start, start + len(named)))
            ids = tokenize([scenes.caption(**each) for each in named])
            images = np.asarray(draw(params, config, ids, keys, tokenize([""]), STEPS, GUIDANCE))
            seen = [fidelity.read(image, scenes.SHAPES + scenes.NEW_SHAPES) for image in images]
            right += [all(fidelity.right_attributes(*pair).values()) for pair in zip(named, seen, strict=True)]
        found[kind] = fidelity.share(right)
    return found


def train(folder: Path, seed: int) -> dict:
    """Run the command, and say how long it took, and how many bytes it wrote."""
    command = [sys.executable, "-m", "course.teach", folder / "new", folder / f"{seed}.safetensors"]
    command += ["--rehearse", folder / "old", *OPTIONS, "--seed", str(seed)]
    for file in folder.glob(f"{seed}.*"):  # left by an interrupted run: its seconds would be missing
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    load, start, before = os.getloadavg()[0], time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(list(map(str, command)), cwd=ROOT, env=os.environ | {"TUTORIAL_DEVICES": "1"}, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cores = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    files = folder / f"{seed}.safetensors", teach.word_file(folder / f"{seed}.safetensors")
    return {
        "seconds": round(time.monotonic() - start),
        "core seconds": round(cores),
        "load of others when it began": round(load, 1),
        "bytes": sum(file.stat().st_size for file in files),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where files are kept (default: a temporary one)")
    parser.add_argument("--ship", action="store_true", help="replace the files in checkpoints/taught")
    parser.add_argument(
        "--time", action="store_true", help="only time the first seed again, on a machine that is quiet"
    )
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    scenes.write_folder(scenes.new_examples(SHAPE, EXAMPLES), folder / "new")
    scenes.write_folder(scenes.training_scenes(REHEARSED, REHEARSED_SEED), folder / "old")
    record = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    if options.time:
        record["seeds"][0] |= train(folder, 0)
        write_json(TARGET, record)
        return
    if record.get("options") != OPTIONS:
        record = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions("jax", "jaxlib", "optax", "orbax-checkpoint"),
            "cores": os.cpu_count(),
            "options": OPTIONS,
            "examples": EXAMPLES,
            "rehearsed": REHEARSED,
            "images": IMAGES,
            "before": score(None, {"old captions": KINDS["old captions"]}),
            "seeds": [],
        }
    for seed in range(len(record["seeds"]), SEEDS):
        measured = train(folder, seed)
        file = folder / f"{seed}.safetensors"
        record["seeds"].append({"seed": seed} | measured | score(file))
        print(record["seeds"][-1], flush=True)
        write_json(TARGET, record)
    if options.ship:
        file = folder / "0.safetensors"
        if not file.exists():
            sys.exit(f"{file} is not there: give the --folder in which the first seed was trained.")
        SHIPPED.mkdir(exist_ok=True)
        for source, name in ((file, f"{SHAPE}.safetensors"), (teach.word_file(file), f"{SHAPE}.word.safetensors")):
            shutil.copyfile(source, SHIPPED / name)


if __name__ == "__main__":
    main()
