"""The judge: reads the attributes of a scene off a picture, or refuses.

Nothing in it is learned. It explains the picture as one shape of one colour on a background of
another: the two colours come from the border and from the inside of what differs from it, and the
shape is the one whose drawing, by the same renderer that made the training scenes, overlaps best
with what is seen. A picture that has no such explanation (noise, an empty background, two shapes, a
half-denoised picture) or more than one (a blob between a square and a circle) is refused, with the
reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize

from course.shapes import scenes

# Distances between colours: black and white are 441 apart.
NEAR_COLOR = 55.0  # how far a colour may be from the palette's
DIFFERS = 60.0  # how far a pixel must be from the background to belong to something else
FAINT = 20.0  # a pixel that is nearer than this to the background is background to the eye
MOST_STRAY_BORDER = 0.05  # share of border pixels that may differ from the background
MOST_STRAY_PIXELS = 0.06  # share of a shape's area that may have a third colour
LEAST_AREA = 0.008  # of the picture; the smallest shape of the renderer covers several times that
# Overlaps, as intersection over union of what is seen and a drawn shape. The first one that is
# drawn has the same area and centroid; those that come near the best are then fitted.
LEAST_OVERLAP = 0.65  # of the first one
REACH = 0.15  # a shape whose first one is further than this below the best is no rival
LEAST_LEAD = 0.04  # of the best, fitted, over the next; 0.14 or more in rendered scenes
TILTS = np.arange(-40.0, 41.0, 5.0)  # degrees
# Halfway between the ranges that the renderer uses.
SMALL_BELOW = (scenes.SIZES["small"][1] + scenes.SIZES["medium"][0]) / 2
LARGE_ABOVE = (scenes.SIZES["medium"][1] + scenes.SIZES["large"][0]) / 2


@dataclass(frozen=True)
class Refusal:
    """Why a picture is no scene."""

    reason: str


class Match(NamedTuple):
    """A drawn shape, and how much of what is seen it explains: the best match is the largest."""

    overlap: float  # intersection over union
    shape: str
    x: float  # of the centre, as the other lengths a fraction of the width
    y: float
    radius: float
    tilt: float  # degrees


def read_colors(picture: np.ndarray) -> tuple[str, str, np.ndarray] | Refusal:
    """Read the colours of background and shape off a picture, whatever the shape is.

    Parameters
    ----------
    picture : numpy.ndarray
        Shape (pixels, pixels, 3): uint8, or float from 0 to 1.

    Returns
    -------
    tuple or Refusal
        The background's colour, the shape's, and how much of each pixel is shape: float32, (pixels,
        pixels), from 0 to 1.
    """
    pixels = np.asarray(picture, np.float32)
    if picture.dtype != np.uint8:
        pixels = pixels * 255

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

    # How much of each pixel is shape, if it is a mixture of the two colours, and what is left over
    # if it is not.
    step = front - back
    alpha = ((pixels - back) @ step / (step @ step)).clip(0, 1)
    stray = np.linalg.norm(pixels - back - alpha[..., None] * step, axis=-1) > DIFFERS
    if stray.mean() > MOST_STRAY_PIXELS * alpha.mean():
        return Refusal("there is a third colour")
    alpha[distance < FAINT] = 0
    return background, color, alpha


def read_scene(
    picture: np.ndarray, shapes: tuple[str, ...] = scenes.SHAPES
) -> scenes.Scene | Refusal:
    """Read the scene that a picture shows.

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
    area = float(alpha.mean())
    centroid = _centroid(alpha)
    coarse = [_coarse_match(alpha, shape, area, centroid) for shape in shapes]
    best = max(coarse)
    if best.overlap < LEAST_OVERLAP:
        return Refusal(f"the closest shape, a {best.shape}, covers only {best.overlap:.0%} of it")
    rivals = [match for match in coarse if match.overlap > best.overlap - REACH]
    fine = sorted((_fine_match(alpha, match) for match in rivals), reverse=True)
    best = fine[0]
    if len(fine) > 1 and best.overlap - fine[1].overlap < LEAST_LEAD:
        return Refusal(f"it may be a {best.shape} or a {fine[1].shape}")
    if best.radius < SMALL_BELOW:
        size = "small"
    elif best.radius > LARGE_ABOVE:
        size = "large"
    else:
        size = "medium"
    return scenes.Scene(size, color, best.shape, background, best.x, best.y, best.radius, best.tilt)


def _palette_name(color: np.ndarray) -> str | None:
    """Return the closest name in the palette, or None if no colour of it is close."""
    distances = {name: np.linalg.norm(color - value) for name, value in scenes.PALETTE.items()}
    name = min(distances, key=distances.get)
    return name if distances[name] < NEAR_COLOR else None


def _eroded(mask: np.ndarray) -> np.ndarray:
    """Return the pixels whose four neighbours belong to the mask too."""
    padded = np.pad(mask, 1)
    return mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]


def _centroid(mask: np.ndarray) -> np.ndarray:
    """Return x and y of a mask's centroid, as fractions of its width: (2,)."""
    side = len(mask)
    centers = (np.arange(side) + 0.5) / side
    return np.array([mask.sum(0) @ centers, mask.sum(1) @ centers]) / mask.sum()


def _tilts(shape: str) -> list[float]:
    """List the tilts at which a shape looks different, in coarse steps."""
    symmetry = scenes.SYMMETRY[shape]
    if symmetry == 0:
        return [0.0]
    return [float(tilt) for tilt in TILTS if abs(tilt) <= symmetry / 2]


@cache
def _moments(shape: str, tilt: float) -> tuple[float, np.ndarray]:
    """Return the area of the shape of radius 1, and its centroid seen from its circle's centre."""
    radius = 0.5
    mask = scenes.coverage(shape, 0.5, 0.5, radius, tilt, 256)
    return float(mask.mean()) / radius**2, (_centroid(mask) - 0.5) / radius


def _coarse_match(alpha: np.ndarray, shape: str, area: float, centroid: np.ndarray) -> Match:
    """Return the best match of one shape at any of the coarse tilts.

    It is drawn with the area, and with the centroid, (2,), that are seen.
    """
    matches = []
    for tilt in _tilts(shape):
        unit_area, offset = _moments(shape, tilt)
        radius = float(np.sqrt(area / unit_area))
        x, y = (centroid - offset * radius).tolist()
        overlap = _overlap(alpha, shape, x, y, radius, tilt)
        matches.append(Match(overlap, shape, x, y, radius, tilt))
    return max(matches)


def _fine_match(alpha: np.ndarray, match: Match) -> Match:
    """Move, scale and turn a match until it overlaps most.

    A cross with one short arm has neither the area nor the centroid of the cross that it comes
    closest to.
    """
    start = np.array([match.x, match.y, match.radius, match.tilt])
    steps = np.array([0.02, 0.02, 0.02, 5.0])
    free = 4
    if scenes.SYMMETRY[match.shape] == 0:
        free = 3  # a circle looks the same at any tilt

    def place(moved: np.ndarray) -> np.ndarray:
        """Return x, y, radius and tilt, of which the free ones have moved by so many steps."""
        placed = start.copy()
        placed[:free] += moved * steps[:free]
        return placed

    optimum = minimize(
        lambda moved: -_overlap(alpha, match.shape, *place(moved)),
        np.zeros(free),
        method="Nelder-Mead",
        options={
            "initial_simplex": np.vstack([np.zeros(free), np.eye(free)]),
            "xatol": 0.05,
            "fatol": 1e-3,
        },
    )
    return Match(float(-optimum.fun), match.shape, *place(optimum.x).tolist())


def _overlap(
    alpha: np.ndarray, shape: str, x: float, y: float, radius: float, tilt: float
) -> float:
    """Return the intersection over union of what is seen and a drawn shape."""
    drawn = scenes.coverage(shape, x, y, radius, tilt, len(alpha))
    return float(np.minimum(alpha, drawn).sum() / np.maximum(alpha, drawn).sum())


def right_attributes(asked: dict[str, str | None], seen: scenes.Scene | Refusal) -> dict[str, bool]:
    """Say for each attribute that a caption names whether the reading has it.

    A refused picture has none.
    """
    right = {}
    for name, value in asked.items():
        if value is not None:
            right[name] = getattr(seen, name, None) == value
    return right


def is_as_asked(asked: dict[str, str | None], seen: scenes.Scene | Refusal) -> bool:
    """Return whether the reading of a picture has all that its caption names."""
    return all(right_attributes(asked, seen).values())


def count_right(asked: Iterable[dict[str, str | None]], pictures: Iterable[np.ndarray]) -> int:
    """Count the pictures in which everything is right that their captions name."""
    right = 0
    for named, picture in zip(asked, pictures, strict=True):
        right += is_as_asked(named, read_scene(picture))
    return right


def likely_shares(right: np.ndarray, judged: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the smallest and the largest true share that would make a count likely.

    Likely is 19 times of 20. By Wilson (1927), whose intervals stay between 0 and 1.

    Examples
    --------
    >>> low, high = likely_shares(93, 96)
    >>> print(f"{low:.3f} to {high:.3f}")
    0.912 to 0.989
    """
    deviations = 1.96
    share = np.asarray(right) / judged
    spread = deviations**2 / judged
    middle = (share + spread / 2) / (1 + spread)
    reach = deviations * np.sqrt(share * (1 - share) / judged + spread / 4 / judged) / (1 + spread)
    # The share is between them, but for rounding where none or all are right.
    return np.minimum(middle - reach, share), np.maximum(middle + reach, share)


def share(values: Iterable[bool]) -> float:
    """Return the share of true values."""
    values = list(values)
    return sum(values) / len(values)
