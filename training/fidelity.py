"""The judge: reads the attributes of a scene off a picture, or refuses.

Nothing in it is learned. It explains the picture as one shape of one colour on a background of another: the two colours
come from the border and from the inside of what differs from it, and the shape is the one whose drawing, by the same
renderer that made the training scenes, overlaps best with what is seen. A picture that has no such explanation (noise,
an empty background, two shapes, a half-denoised picture) or more than one (a blob between a square and a circle) is
refused, with the reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import minimize

from training import scenes

NEAR_COLOR = 55.0  # of 441, the distance between black and white: how far a colour may be from the palette's
DIFFERS = 60.0  # how far a pixel must be from the background to belong to something else
FAINT = 20.0  # a pixel that is nearer than this to the background is background: nobody sees the difference
MOST_STRAY_BORDER = 0.05  # share of border pixels that may differ from the background
MOST_STRAY_PIXELS = 0.06  # share of a shape's area that may have a third colour
LEAST_OVERLAP = 0.65  # intersection over union of the shape seen and one drawn with the same area and centroid
REACH = 0.15  # a shape whose overlap is less than the best by more than this is no rival; the others are fitted
LEAST_LEAD = 0.04  # by which the best shape, fitted, must overlap more than the next; 0.14 or more in rendered scenes
LEAST_AREA = 0.008  # of the picture; the smallest shape of the renderer covers several times that
TILTS = np.arange(-40.0, 41.0, 5.0)
# Halfway between the ranges that the renderer uses.
SMALL_BELOW, LARGE_ABOVE = (
    (scenes.SIZES[a][1] + scenes.SIZES[b][0]) / 2 for a, b in (("small", "medium"), ("medium", "large"))
)


@dataclass(frozen=True)
class Refusal:
    """Why a picture is no scene."""

    reason: str


def read_colors(picture: np.ndarray) -> tuple[str, str, np.ndarray] | Refusal:
    """The background's colour, the shape's, and how much of each pixel is shape, from 0 to 1; whatever the shape is."""
    pixels = np.asarray(picture, np.float32) * (1 if picture.dtype == np.uint8 else 255)

    border = np.concatenate([pixels[0], pixels[-1], pixels[1:-1, 0], pixels[1:-1, -1]])
    back = np.median(border, axis=0)
    if (np.linalg.norm(border - back, axis=1) > DIFFERS).mean() > MOST_STRAY_BORDER:
        return Refusal("the border has more than one colour")
    background = _palette_name(back)
    if background is None:
        return Refusal("the background has no colour of the palette")

    distance = np.linalg.norm(pixels - back, axis=-1)
    differs = distance > DIFFERS
    if differs.mean() < LEAST_AREA:
        return Refusal("there is nothing on the background")
    inside = _eroded(differs)
    if not inside.any():
        return Refusal("what differs from the background is only specks")
    front = np.median(pixels[inside], axis=0)
    color = _palette_name(front)
    if color is None or color == background:
        return Refusal("the shape has no colour of the palette")

    # How much of each pixel is shape, if it is a mixture of the two colours, and what is left over if it is not.
    step = front - back
    alpha = ((pixels - back) @ step / (step @ step)).clip(0, 1)
    stray = np.linalg.norm(pixels - back - alpha[..., None] * step, axis=-1) > DIFFERS
    if stray.mean() > MOST_STRAY_PIXELS * alpha.mean():
        return Refusal("there is a third colour")
    alpha[distance < FAINT] = 0
    return background, color, alpha


def read(picture: np.ndarray, shapes: tuple[str, ...] = scenes.SHAPES) -> scenes.Scene | Refusal:
    """Read a picture.

    Parameters
    ----------
    picture : numpy.ndarray
        Shape (pixels, pixels, 3): uint8, or float from 0 to 1.
    shapes : tuple of str
        Those that it may show: names of ``scenes.OUTLINES``.

    Returns
    -------
    Scene or Refusal
        The scene, its place, radius and tilt measured; the tilt of a circle or a ring is 0.
    """
    colors = read_colors(picture)
    if isinstance(colors, Refusal):
        return colors
    background, color, alpha = colors
    area, side = float(alpha.mean()), len(alpha)
    centers = (np.arange(side) + 0.5) / side
    centroid = np.array([alpha.sum(0) @ centers, alpha.sum(1) @ centers]) / alpha.sum()
    coarse = sorted((_coarse_match(alpha, shape, area, centroid) for shape in shapes), reverse=True)
    most = coarse[0][0]
    if most < LEAST_OVERLAP:
        return Refusal(f"the closest shape, a {coarse[0][1]}, covers only {most:.0%} of it")
    fine = sorted((_fine_match(alpha, match) for match in coarse if match[0] > most - REACH), reverse=True)
    overlap, shape, x, y, radius, tilt = fine[0]
    if len(fine) > 1 and overlap - fine[1][0] < LEAST_LEAD:
        return Refusal(f"it may be a {shape} or a {fine[1][1]}")
    size = "small" if radius < SMALL_BELOW else "large" if radius > LARGE_ABOVE else "medium"
    return scenes.Scene(size, color, shape, background, x, y, radius, tilt)


def _palette_name(color: np.ndarray) -> str | None:
    """The closest name in the palette, or None if no colour of it is close."""
    distances = {name: np.linalg.norm(color - value) for name, value in scenes.PALETTE.items()}
    name = min(distances, key=distances.get)
    return name if distances[name] < NEAR_COLOR else None


def _eroded(mask: np.ndarray) -> np.ndarray:
    """The pixels whose four neighbours belong to the mask too."""
    padded = np.pad(mask, 1)
    return mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]


def _tilts(shape: str) -> tuple[float, ...]:
    """Tilts that look different, coarsely."""
    symmetry = scenes.SYMMETRY[shape]
    return tuple(TILTS[np.abs(TILTS) <= symmetry / 2]) if symmetry else (0.0,)


@cache
def _moments(shape: str, tilt: float) -> tuple[float, np.ndarray]:
    """Area of the shape of radius 1, and its centroid seen from the centre of its circle."""
    fine = 256
    mask = scenes.coverage(shape, 0.5, 0.5, 0.5, tilt, fine)
    centers = (np.arange(fine) + 0.5) / fine - 0.5
    return float(mask.mean()) * 4, np.array([mask.sum(0) @ centers, mask.sum(1) @ centers]) / mask.sum() * 2


def _coarse_match(alpha: np.ndarray, shape: str, area: float, centroid: np.ndarray) -> tuple:
    """The best match of one shape, drawn with the area and the centroid that are seen, at any of the coarse tilts."""

    def match(tilt: float) -> tuple:
        unit_area, offset = _moments(shape, tilt)
        radius = float(np.sqrt(area / unit_area))
        x, y = (float(c) for c in centroid - offset * radius)
        return _overlap(alpha, shape, x, y, radius, tilt), shape, x, y, radius, tilt

    return max(map(match, _tilts(shape)))


def _fine_match(alpha: np.ndarray, match: tuple) -> tuple:
    """The match moved, scaled and turned until it overlaps most.

    A cross with one short arm has neither the area nor the centroid of the cross that it comes closest to.
    """
    _, shape, *start = match
    steps = np.array([0.02, 0.02, 0.02, 5.0])[: 4 if scenes.SYMMETRY[shape] else 3]  # a circle has no tilt
    start, fixed = np.array(start[: len(steps)]), start[len(steps) :]
    corners = np.vstack([np.zeros_like(steps), np.eye(len(steps))])
    found = minimize(
        lambda moved: -_overlap(alpha, shape, *(start + moved * steps), *fixed),
        corners[0],
        method="Nelder-Mead",
        options={"initial_simplex": corners, "xatol": 0.05, "fatol": 1e-3},
    )
    return float(-found.fun), shape, *(float(v) for v in start + found.x * steps), *fixed


def _overlap(alpha: np.ndarray, shape: str, x: float, y: float, radius: float, tilt: float) -> float:
    """Intersection over union of what is seen and a drawn shape."""
    drawn = scenes.coverage(shape, x, y, radius, tilt, len(alpha))
    return float(np.minimum(alpha, drawn).sum() / np.maximum(alpha, drawn).sum())


def right_attributes(asked: dict[str, str | None], seen: scenes.Scene | Refusal) -> dict[str, bool]:
    """For each attribute that a caption names, whether the reading has it. A refused picture has none."""
    return {name: getattr(seen, name, None) == value for name, value in asked.items() if value is not None}


def share(values: Iterable[bool]) -> float:
    values = list(values)
    return sum(values) / len(values)
