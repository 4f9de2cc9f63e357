"""Pictures that are no scenes, to test the judge with: it must refuse them."""

from collections.abc import Callable

import numpy as np

from course.shapes import scenes


def _random_scene(rng: np.random.Generator, size: str | None = None) -> scenes.Scene:
    choices = scenes.combinations()
    return scenes.random_scene(rng, *choices[rng.integers(len(choices))], size=size)


def noise(rng: np.random.Generator, pixels: int) -> np.ndarray:
    return rng.integers(0, 256, (pixels, pixels, 3), dtype=np.uint8)


def smooth_noise(rng: np.random.Generator, pixels: int) -> np.ndarray:
    """Noise as coarse as the latents: what a decoder makes of noise that was never removed."""
    coarse = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return coarse.repeat(pixels // 8, axis=0).repeat(pixels // 8, axis=1)


def empty_background(rng: np.random.Generator, pixels: int) -> np.ndarray:
    color = scenes.PALETTE[str(rng.choice(scenes.BACKGROUNDS))]
    return np.broadcast_to(np.array(color, np.uint8), (pixels, pixels, 3))


def two_shapes(rng: np.random.Generator, pixels: int) -> np.ndarray:
    """A scene with a second shape beside the first, of the same colour half of the time."""
    first = _random_scene(rng, size=str(rng.choice(["small", "medium"])))
    while True:
        second = _random_scene(rng, size=str(rng.choice(["small", "medium"])))
        distance = np.hypot(first.x - second.x, first.y - second.y)
        if second.color != first.background and distance > first.radius + second.radius:
            break
    color = first.color if rng.random() < 0.5 else second.color
    alpha = scenes.coverage(second.shape, second.x, second.y, second.radius, second.tilt, pixels)[
        ..., None
    ]
    picture = scenes.render(first, pixels)
    return np.rint(picture + alpha * (np.array(scenes.PALETTE[color]) - picture)).astype(np.uint8)


def half_denoised(rng: np.random.Generator, pixels: int) -> np.ndarray:
    """A scene with half or more of its variance replaced by coarse noise."""
    share = rng.uniform(0.5, 0.9)
    clean = scenes.render(_random_scene(rng), pixels) / 127.5 - 1
    coarse = rng.normal(0, 0.6, (8, 8, 3)).repeat(pixels // 8, axis=0).repeat(pixels // 8, axis=1)
    mixed = np.sqrt(1 - share) * clean + np.sqrt(share) * coarse
    return np.rint((mixed.clip(-1, 1) + 1) * 127.5).astype(np.uint8)


KINDS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "noise": noise,
    "smooth noise": smooth_noise,
    "empty background": empty_background,
    "two shapes": two_shapes,
    "half denoised": half_denoised,
}
