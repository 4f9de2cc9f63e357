"""Make what the landing page draws with: ONNX files, a runtime for them, and recorded images for everybody else.

``python -m tools.build_site`` calls `make`. Nothing is made anew that is newer than what it follows from.
"""

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

import stable_diffusion
from stable_diffusion.samplers import alphas
from tools.install import install
from tools.lock import DRAW_LOCK, ROOT
from training import scenes

CHECKPOINT = ROOT / "checkpoints" / "shapes-sd"
PAGE = ROOT / "docs" / "draw"
MADE = ROOT / "build" / "draw"
SOURCES = [file for file in CHECKPOINT.rglob("*") if file.suffix in (".json", ".msgpack", ".txt")]
SOURCES += (ROOT / "stable_diffusion").glob("*.py")
MODELS = ("text_encoder.onnx", "denoiser.onnx", "decoder.onnx")
RUNTIME = ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
# What the recorded images show, one file for each caption: a row for each guidance scale, a column for so many steps.
RECORDED = ("a large red heart on a white background", "a small yellow star on a blue background")
STEPS, GUIDANCE, SEED = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30), (1.0, 2.0, 3.0, 5.0, 8.0), 0


def is_newer(made: list[Path], sources: list[Path]) -> bool:
    """Whether all that is made is there, and no older than its sources."""
    if not all(file.exists() for file in made):
        return False
    return min(file.stat().st_mtime for file in made) >= max(file.stat().st_mtime for file in sources)


def export_models() -> None:
    """Write the ONNX files, in an environment that has what this takes.

    Raises
    ------
    RuntimeError
        If the packages cannot be installed, or the export fails; the message has a sentence.
    """
    if is_newer([MADE / name for name in MODELS], [*SOURCES, DRAW_LOCK, ROOT / "tools" / "export_model.py"]):
        return
    environment = MADE / "venv"
    python, installed = environment / "bin" / "python", environment / "installed"
    try:
        if not is_newer([installed], [DRAW_LOCK]):
            shutil.rmtree(environment, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
            install(python, DRAW_LOCK)
            installed.touch()
        command = [str(python), "-m", "tools.export_model", str(CHECKPOINT), str(MADE)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"The model could not be exported to ONNX: {(error.stderr or str(error))[-500:]}") from None


def fetch_runtime() -> None:
    """Install onnxruntime-web with npm, by its lock file.

    Raises
    ------
    RuntimeError
        If there is no npm, or it cannot install the package; the message is a sentence.
    """
    locked = [PAGE / name for name in ("package.json", "package-lock.json", ".npmrc")]
    if is_newer([MADE / name for name in RUNTIME], locked):
        return
    if shutil.which("npm") is None:
        raise RuntimeError("npm is missing, which brings the page's runtime: install Node.js.")
    for file in locked:
        shutil.copy(file, MADE)
    installed = subprocess.run(["npm", "ci", "--silent"], cwd=MADE, capture_output=True, text=True)
    if installed.returncode:
        raise RuntimeError(f"npm cannot install the page's runtime: {installed.stderr[-500:] or 'is there a network?'}")
    for name in RUNTIME:
        (MADE / name).write_bytes((MADE / "node_modules" / "onnxruntime-web" / "dist" / name).read_bytes())


def write_settings(folder: Path) -> None:
    """Write what the page needs to know of the checkpoint: words, tokens, schedule, and how large the files are."""
    tokenizer = CHECKPOINT / "tokenizer"
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    schedule = stable_diffusion.read_config(CHECKPOINT).schedule
    merges = [line.split() for line in (tokenizer / "merges.txt").read_text().splitlines()[1:]]
    settings = {
        "choices": {"size": [*scenes.SIZES], "color": [*scenes.COLORS], "shape": [*scenes.SHAPES]},
        "words": config["caption_words"],
        "vocabulary": json.loads((tokenizer / "vocab.json").read_text()),
        "merges": [pair for pair in merges if pair],
        "tokens": config["model_max_length"],
        "alphas": [float(f"{alpha:.9g}") for alpha in alphas(schedule)],
        "offset": schedule.steps_offset,
        "bytes": {name: (folder / name).stat().st_size for name in (*MODELS, RUNTIME[1]) if (folder / name).exists()},
    }
    (folder / "settings.json").write_text(json.dumps(settings, ensure_ascii=False))


def record_images() -> None:
    """Draw the recorded images: for each caption a file with a row for each guidance scale."""
    files = [MADE / f"recorded-{k}.webp" for k in range(len(RECORDED))]
    if is_newer(files, [*SOURCES, Path(__file__)]):
        return
    jax.config.update("jax_platforms", "cpu")  # the site's images are those of a CPU, and libtpu has nothing to say
    params, config, tokenize = stable_diffusion.load(CHECKPOINT)
    captions = [caption for caption in RECORDED for _ in GUIDANCE]
    guidance = jnp.float32(GUIDANCE * len(RECORDED))
    noise = jnp.tile(jax.random.normal(jax.random.key(SEED), (1, 4, 8, 8)), (len(captions), 1, 1, 1))
    latents = jnp.moveaxis(noise, 1, -1)  # one and the same noise for all
    draw = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    inputs = params, config, tokenize(captions), jax.random.key(SEED), tokenize([""])
    columns = [np.asarray(draw(*inputs, steps, guidance, latents)) for steps in STEPS]
    images = np.stack(columns).reshape(len(STEPS), len(RECORDED), len(GUIDANCE), *columns[0].shape[1:])
    for file, table in zip(files, images.swapaxes(0, 1), strict=True):  # (steps, guidance, height, width, 3)
        steps, rows, height, width, _ = table.shape
        sheet = table.transpose(1, 2, 0, 3, 4).reshape(rows * height, steps * width, 3)
        Image.fromarray((sheet * 255).round().astype(np.uint8)).save(file, quality=80, method=6)


def translated(name: str, language: str) -> str:
    """A part of a page, from a file with its English, in a language: its texts, and what its script will say."""
    text, table = (PAGE / name).read_text(), PAGE / f"{language}.json"
    if not table.exists():
        return text
    words = json.loads(table.read_text())
    for pattern in (r"(?<=>)[^<>]+(?=<)", r'(?<=aria-label=")[^"]+', r'#[\w-]+(?=")'):
        text = re.sub(pattern, lambda match: words.get(" ".join(match.group().split()), match.group()), text)
    script = (PAGE / re.search(r"draw/(\w+\.js)", text).group(1)).read_text()
    said = {english: word for english, word in words.items() if f't("{english}"' in script}
    data = f'data-words="{html.escape(json.dumps(said, ensure_ascii=False))}"'
    return re.sub(r'class="(draw|recorded)"', rf'class="\1" {data}', text, count=1)


def form_html(language: str) -> str:
    """The part of the landing page that draws. ``PAGES`` stands for its language's first folder."""
    return translated("form.html", language).replace("RECORDED", recorded_html(language))


def recorded_html(language: str) -> str:
    """The recorded images as a part of a page, in which ``ROOT`` stands for the site's first folder."""
    template = "Images for “{0}”, from one noise. From left to right {1} steps, from top to bottom guidance scale {2}."
    if (table := PAGE / f"{language}.json").exists():
        template = json.loads(table.read_text())[template]
    steps, scales = ", ".join(map(str, STEPS)), ", ".join(f"{scale:g}" for scale in GUIDANCE)
    figures = []
    for k, caption in enumerate(RECORDED):
        file, alt = f"ROOT/draw/recorded-{k}.webp", template.format(caption, steps, scales)
        figures.append(f'<figure><img src="{file}" alt="{alt}" data-caption="{caption}"></figure>')
    page = translated("recorded.html", language).replace("FIGURES", "\n".join(figures))
    return page.replace("STEPS", steps).replace("SCALES", scales)


def make(folder: Path) -> list[str]:
    """Fill a folder of the site; returns a sentence for each thing that is missing.

    Without the models or their runtime, the page shows recorded images only.
    """
    MADE.mkdir(parents=True, exist_ok=True)
    missing = []
    for step, names in ((export_models, MODELS), (fetch_runtime, RUNTIME)):
        try:
            step()
        except RuntimeError as error:
            for name in names:  # what an earlier build left is of an older model
                (MADE / name).unlink(missing_ok=True)
            missing.append(f"The landing page cannot draw, and shows recorded images. {error}")
    record_images()
    write_settings(MADE)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recorded = [f"recorded-{k}.webp" for k in range(len(RECORDED))]
    for name in (*MODELS, *RUNTIME, *recorded, "settings.json"):
        if (MADE / name).exists():
            shutil.copy(MADE / name, folder)
    for file in PAGE.glob("*.js"):
        shutil.copy(file, folder)
    return missing
