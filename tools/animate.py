"""Draw the README's animation of images that appear out of noise: ``python -m tools.animate``.

The bundled checkpoint draws four prompts in 15 steps. The latents are decoded after each step, and
every step becomes a frame of ``docs/_static/appearing.webp``.
"""

from pathlib import Path

import jax
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from course import sd
from course.sd.samplers import sample
from course.sd.vae import decode

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINT = ROOT / "checkpoints" / "shapes-sd"
PICTURE = ROOT / "docs" / "_static" / "appearing.webp"

PROMPTS = [
    "a large red heart on a white background",
    "a large green ring on a black background",
    "a medium white moon on a purple background",
    "a large purple arrow on a yellow background",
]
SEED = 4
STEPS = 15

# In pixels.
TILE = 192
GAP = 12
LINE = 20
HEIGHT = GAP + TILE + 8 + 3 * LINE + GAP

# In milliseconds.
FIRST_FRAME = 700
NEXT_FRAME = 180
LAST_FRAME = 2000


def draw_steps() -> list[np.ndarray]:
    """Draw the prompts; the images after 0, 1, … steps, each float32, (prompts, 64, 64, 3)."""
    params, config, tokenize = sd.load(CHECKPOINT)
    latents = []

    def sample_and_keep(model, schedule, noise, steps):
        def keep(x, alpha):
            jax.debug.callback(latents.append, x, ordered=True)
            return x

        latents.append(noise)
        return sample(model, schedule, noise, steps, after=keep)

    sd.generate(
        params,
        config,
        tokenize(PROMPTS),
        jax.random.split(jax.random.key(SEED), len(PROMPTS)),
        negative_ids=tokenize([""]),
        steps=STEPS,
        guidance=3.0,
        sampler=sample_and_keep,
    )
    jax.effects_barrier()  # until all latents are kept
    return [np.asarray(decode(params["vae"], config.vae, x)) for x in latents]


def draw_frame(images: np.ndarray, step: int) -> Image.Image:
    """Put the images of one step beside each other, with their prompts and the step below them."""
    width = GAP + len(images) * (TILE + GAP)
    frame = Image.new("RGB", (width, HEIGHT), "white")
    draw = ImageDraw.Draw(frame)
    font = ImageFont.load_default(size=14)
    for number, (image, prompt) in enumerate(zip(images, PROMPTS, strict=True)):
        left = GAP + number * (TILE + GAP)
        pixels = np.uint8(np.round(255 * image))
        tile = Image.fromarray(pixels).resize((TILE, TILE), Image.Resampling.LANCZOS)
        frame.paste(tile, (left, GAP))
        draw.rectangle((left, GAP, left + TILE - 1, GAP + TILE - 1), outline="lightgray")
        prompt = prompt.replace(" on a ", "\non a ")
        draw.multiline_text((left, GAP + TILE + 8), prompt, "black", font, spacing=6)
    what = f"step {step} of {STEPS}" if step else "noise"
    draw.text((GAP, HEIGHT - GAP), what, "gray", font, anchor="ls")
    return frame


def main() -> None:
    frames = [draw_frame(images, step) for step, images in enumerate(draw_steps())]
    durations = [FIRST_FRAME] + [NEXT_FRAME] * (len(frames) - 2) + [LAST_FRAME]
    frames[0].save(
        PICTURE,
        save_all=True,
        append_images=frames[1:],
        duration=durations,
        loop=0,  # for ever
        quality=85,
        method=6,
    )
    print(f"{PICTURE.relative_to(ROOT)}: {len(frames)} frames, {PICTURE.stat().st_size} bytes.")


if __name__ == "__main__":
    main()
