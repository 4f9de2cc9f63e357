"""Make what the landing page draws with, and recorded images for browsers that cannot draw.

That is the bundled checkpoint as ONNX files, the runtime for them, and sheets of images.
``python -m lab.site.build_site`` calls `make`. Nothing is made again that is newer than its
sources.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from course import sd
from course.sd.samplers import alphas
from course.shapes import scenes
from lab.site.lock import ROOT

DRAW_LOCK = ROOT / "locks" / "draw.lock"
CHECKPOINT = ROOT / "checkpoints" / "shapes-sd"
PAGE = ROOT / "docs" / "draw"
MADE = ROOT / "build" / "draw"
SOURCES = [file for file in CHECKPOINT.rglob("*") if file.suffix in (".json", ".msgpack", ".txt")]
SOURCES += (ROOT / "course" / "sd").glob("*.py")
MODELS = ("text_encoder.onnx", "denoiser.onnx", "decoder.onnx")
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
# There is a sheet of recorded images for each caption, with a column for each number of steps and
# a row for each guidance scale.
CAPTIONS = ("a large red heart on a white background", "a small yellow star on a blue background")
STEPS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
GUIDANCE_SCALES = (1.0, 2.0, 3.0, 5.0, 8.0)
SHEETS = tuple(f"recorded-{number}.webp" for number in range(len(CAPTIONS)))
# What the templates of the page name.
VALUES = {
    "captions": CAPTIONS,
    "steps": ", ".join(str(steps) for steps in STEPS),
    "scales": ", ".join(f"{scale:g}" for scale in GUIDANCE_SCALES),
}


def is_newer(made: list[Path], sources: list[Path]) -> bool:
    """Whether all files that are made from sources are there, and none is older than a source."""
    if not all(file.exists() for file in made):
        return False
    oldest = min(file.stat().st_mtime for file in made)
    return oldest >= max(file.stat().st_mtime for file in sources)


def export_models() -> None:
    """Write the ONNX files, in an environment of its own for the packages that this takes.

    Raises
    ------
    RuntimeError
        If the packages cannot be installed, or the export fails; the message says why.
    """
    exporter = ROOT / "lab" / "site" / "export_model.py"
    if is_newer([MADE / name for name in MODELS], [*SOURCES, DRAW_LOCK, exporter]):
        return
    environment = MADE / "venv"
    python = environment / "bin" / "python"
    installed = environment / "installed"
    if not is_newer([installed], [DRAW_LOCK]):
        uv = (sys.executable, "-m", "uv", "--quiet")
        run(*uv, "venv", "--clear", "--python", sys.executable, environment)
        run(*uv, "pip", "install", "--python", python, "--require-hashes", "-r", DRAW_LOCK)
        installed.touch()
    run(python, "-m", "lab.site.export_model", CHECKPOINT, MADE)


def fetch_runtime() -> None:
    """Install onnxruntime-web with npm, by its lock file.

    Raises
    ------
    RuntimeError
        If there is no npm, or it cannot install the package; the message says why.
    """
    locked = [PAGE / name for name in ("package.json", "package-lock.json", ".npmrc")]
    if is_newer([MADE / name for name in RUNTIME], locked):
        return
    if shutil.which("npm") is None:
        raise RuntimeError("npm is missing, which brings the page's runtime: install Node.js.")
    for file in locked:
        shutil.copy(file, MADE)
    run("npm", "ci", "--silent", "--prefix", MADE)
    for name in RUNTIME:
        shutil.copyfile(MADE / "node_modules" / "onnxruntime-web" / "dist" / name, MADE / name)


def run(*command) -> None:
    """Run a command in the repository.

    Raises
    ------
    RuntimeError
        If it fails; the message has the last that it said.
    """
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout)[-500:]}")


def write_settings(file: Path) -> None:
    """Write what the page's script knows of the checkpoint, and the sizes of what it can load."""
    tokenizer = CHECKPOINT / "tokenizer"
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    schedule = sd.read_config(CHECKPOINT).schedule
    merges = (tokenizer / "merges.txt").read_text().splitlines()[1:]
    loaded = [MADE / name for name in (*MODELS, RUNTIME[1])]
    settings = {
        "choices": {"size": [*scenes.SIZES], "color": [*scenes.COLORS], "shape": [*scenes.SHAPES]},
        "words": config["caption_words"],
        "vocabulary": json.loads((tokenizer / "vocab.json").read_text()),
        "merges": [line.split() for line in merges if line],
        "tokens": config["model_max_length"],
        "alphas": [float(f"{alpha:.9g}") for alpha in alphas(schedule)],
        "offset": schedule.steps_offset,
        "bytes": {file.name: file.stat().st_size for file in loaded if file.exists()},
    }
    file.write_text(json.dumps(settings, ensure_ascii=False))


def record_images() -> None:
    """Draw the recorded images, all from the same noise: a sheet for each caption."""
    if is_newer([MADE / name for name in SHEETS], [*SOURCES, Path(__file__)]):
        return
    jax.config.update("jax_platforms", "cpu")  # every build of the site shows the same images
    params, config, tokenize = sd.load(CHECKPOINT)
    draw = jax.jit(sd.generate, static_argnames=sd.STATIC)
    key = jax.random.key(0)
    rows = len(GUIDANCE_SCALES)
    noise = jnp.moveaxis(jax.random.normal(key, (1, 4, 8, 8)), 1, -1)  # drawn with channels first
    noise = jnp.tile(noise, (rows, 1, 1, 1))  # (rows, 8, 8, 4)
    scales = jnp.float32(GUIDANCE_SCALES)
    for name, caption in zip(SHEETS, CAPTIONS, strict=True):
        prompts = tokenize([caption] * rows)
        columns = []
        for steps in STEPS:
            images = draw(params, config, prompts, key, tokenize([""]), steps, scales, noise)
            columns.append(np.concatenate(images, axis=0))  # (rows * 64, 64, 3)
        sheet = np.concatenate(columns, axis=1)
        pixels = (255 * sheet).round().astype(np.uint8)
        Image.fromarray(pixels).save(MADE / name, quality=80, method=6)


def make(folder: Path) -> list[str]:
    """Fill a folder of the site; gives a sentence for each thing that is missing.

    Without the models or their runtime, the page shows recorded images only.
    """
    MADE.mkdir(parents=True, exist_ok=True)
    missing = []
    for step, names in ((export_models, MODELS), (fetch_runtime, RUNTIME)):
        try:
            step()
        except RuntimeError as error:
            for name in names:  # what an earlier build left belongs to an older model
                (MADE / name).unlink(missing_ok=True)
            missing.append(f"The landing page cannot draw, and shows recorded images. {error}")
    record_images()
    folder.mkdir(parents=True)
    for file in [*PAGE.glob("*.js"), *(MADE / name for name in (*MODELS, *RUNTIME, *SHEETS))]:
        if file.exists():
            shutil.copy(file, folder)
    write_settings(folder / "settings.json")
    return missing
