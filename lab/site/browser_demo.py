"""Make what the landing page draws with, and recorded images for browsers that cannot draw.

That is a bundled checkpoint as ONNX files, the runtime for them, and sheets of images. Chapter 4
shows recorded images of another, for many steps and guidance scales.
``python -m lab.site.build_site`` calls `make`. Nothing is made again that is newer than its
sources.
"""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from course import flux2, sd
from course.flux2.tokenizer import PADDING, TEMPLATE
from course.shapes import scenes
from lab.site.lock import ROOT
from lab.train.data import all_captions

DRAW_LOCK = ROOT / "locks" / "draw.lock"
CHECKPOINT = ROOT / "checkpoints" / "shapes-few"
PAGE = ROOT / "docs" / "draw"
MADE = ROOT / "build" / "draw"
MODELS = tuple(
    f"{name}.onnx" for name in ("text_encoder", "encoder", "drawer", "editor", "decoder")
)
MODELS += ("transformer.weights",)
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
# What the page shows until it draws itself, and where it cannot: a row for each caption, a column
# for each number of runs of the network.
DRAWN = (
    "a large red heart on a white background",
    "a small yellow star on a blue background",
    "a medium green ring on a black background",
)
RUNS = (1, 2, 4)
DRAWN_SHEET = "drawn.webp"
# What it can edit.
SCENES = (
    scenes.Scene("large", "red", "heart", "white", radius=0.4),
    scenes.Scene("medium", "yellow", "star", "blue", x=0.4, y=0.45, radius=0.26, tilt=12.0),
    scenes.Scene("small", "green", "ring", "black", x=0.65, y=0.6, radius=0.18),
    scenes.Scene("large", "purple", "arrow", "orange", x=0.5, y=0.48, radius=0.38, tilt=-15.0),
)
SCENES_SHEET = "scenes.webp"
# For chapter 4 there is a sheet for each caption, with a column for each number of steps and a row
# for each guidance scale.
RECORDED = ROOT / "checkpoints" / "shapes-sd"
CAPTIONS = ("a large red heart on a white background", "a small yellow star on a blue background")
STEPS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
GUIDANCE_SCALES = (1.0, 2.0, 3.0, 5.0, 8.0)
SHEETS = tuple(f"recorded-{number}.webp" for number in range(len(CAPTIONS)))
# What the templates of the page name.
VALUES = {
    "checkpoint": CHECKPOINT.name,
    "drawn": DRAWN,
    "runs": RUNS,
    "scenes": [scenes.caption(s.size, s.color, s.shape, s.background) for s in SCENES],
    "captions": CAPTIONS,
    "steps": ", ".join(str(steps) for steps in STEPS),
    "scales": ", ".join(f"{scale:g}" for scale in GUIDANCE_SCALES),
}


def sources(checkpoint: Path, code: str) -> list[Path]:
    """List what images and ONNX files follow from: a checkpoint, and the code of its model."""
    kinds = (".json", ".msgpack", ".safetensors", ".txt")
    files = [file for file in checkpoint.rglob("*") if file.suffix in kinds]
    for folder in (code, "model"):
        files += (ROOT / "course" / folder).glob("*.py")
    return files


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
    if is_newer(
        [MADE / name for name in MODELS], [*sources(CHECKPOINT, "flux2"), DRAW_LOCK, exporter]
    ):
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
    """Write what the page's script knows of the checkpoint, and what it can load."""
    config = flux2.read_config(CHECKPOINT)
    tokenize = flux2.load_tokenizer(CHECKPOINT, config)
    model = json.loads((CHECKPOINT / "tokenizer" / "tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in model["added_tokens"]}
    tokens = jax.eval_shape(
        lambda: flux2.random_tokens(jax.random.key(0), config, 1, config.side, config.side)
    )
    times = {}
    for steps in RUNS:
        shift = config.shift or flux2.shift_by_size(tokens.shape[1], steps)
        times[steps] = flux2.times(steps, shift).tolist()
    files = {}
    for name in (*MODELS, RUNTIME[1]):
        if (MADE / name).exists():
            content = (MADE / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            files[name] = {"bytes": len(content), "digest": digest}
    settings = {
        "choices": {"size": [*scenes.SIZES], "color": [*scenes.COLORS], "shape": [*scenes.SHAPES]},
        "words": list(dict.fromkeys(" ".join(all_captions()).split())),
        "template": TEMPLATE,
        "vocabulary": model["model"]["vocab"],
        "merges": model["model"]["merges"],
        "special": special,
        "padding": special[PADDING],
        "tokens": tokenize.max_length,
        "shape": tokens.shape,
        "noise": tokens.size,
        "times": times,
        "files": files,
        "isWhole": len(files) == len(MODELS) + 1,
    }
    file.write_text(json.dumps(settings, ensure_ascii=False))


def draw_images() -> None:
    """Draw what the page shows until it draws itself, and the scenes that it can edit."""
    made = [MADE / DRAWN_SHEET, MADE / SCENES_SHEET]
    if is_newer(made, [*sources(CHECKPOINT, "flux2"), Path(__file__)]):
        return
    params, config, tokenize = flux2.load(CHECKPOINT, jnp.float32)
    side = config.side
    draw = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    noise = flux2.random_tokens(jax.random.key(0), config, 1, side, side)
    noise = jnp.tile(noise, (len(DRAWN), 1, 1))
    columns = []
    for steps in RUNS:
        images = draw(params, config, *tokenize(DRAWN), noise, side, side, steps)
        columns.append(np.concatenate(images, axis=0))
    save_sheet(np.concatenate(columns, axis=1), MADE / DRAWN_SHEET)
    pictures = np.concatenate([scenes.render(scene, side) for scene in SCENES], axis=1)
    Image.fromarray(pictures).save(MADE / SCENES_SHEET, lossless=True)


def save_sheet(sheet: np.ndarray, file: Path) -> None:
    """Save images from 0 to 1, (height, width, 3), in one file."""
    Image.fromarray((255 * sheet).round().astype(np.uint8)).save(file, quality=80, method=6)


def record_images() -> None:
    """Draw chapter 4's recorded images, all from the same noise: a sheet for each caption."""
    if is_newer([MADE / name for name in SHEETS], [*sources(RECORDED, "sd"), Path(__file__)]):
        return
    params, config, tokenize = sd.load(RECORDED)
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
        save_sheet(np.concatenate(columns, axis=1), MADE / name)


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
    jax.config.update("jax_platforms", "cpu")  # every build of the site shows the same images
    draw_images()
    record_images()
    folder.mkdir(parents=True)
    made = (*MODELS, *RUNTIME, DRAWN_SHEET, SCENES_SHEET, *SHEETS)
    for file in [*PAGE.glob("*.js"), *(MADE / name for name in made)]:
        if file.exists():
            shutil.copy(file, folder)
    write_settings(folder / "settings.json")
    return missing
