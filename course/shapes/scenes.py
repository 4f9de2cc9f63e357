"""Captioned scenes: one flat shape on a flat background, drawn with Pillow.

A scene has four attributes that a caption can name (colour, shape, size, background) and four that
it cannot (the two coordinates of the centre, the exact radius, the tilt). Lengths are fractions of
the picture's width.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

PALETTE = {
    "red": (214, 39, 40),
    "orange": (255, 140, 0),
    "yellow": (255, 225, 50),
    "green": (44, 160, 60),
    "blue": (30, 80, 220),
    "purple": (140, 40, 180),
    "pink": (255, 150, 190),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
COLORS = tuple(PALETTE)
BACKGROUNDS = COLORS
# Radius of the circle around the shape. The gaps between the ranges let a judge tell the sizes
# apart.
SIZES = {"small": (0.16, 0.19), "medium": (0.24, 0.28), "large": (0.36, 0.42)}
MARGIN = 0.02  # between that circle and the picture's edge
MAX_TILT = 20.0  # degrees, to either side
ATTRIBUTES = ("size", "color", "shape", "background")
# Pixels are drawn this many times finer, then averaged: that is the anti-aliasing.
SUPERSAMPLING = 4

HELD_OUT_FILE = Path(__file__).with_name("held_out.json")
CAPTION_SEED = 2026  # of captions to be judged; their pictures have their own keys


def _arc(radius: float, start: float, stop: float, center=(0.0, 0.0)) -> np.ndarray:
    """Return points on an arc, angles in degrees."""
    angles = np.radians(np.linspace(start, stop, 48))
    return np.stack(
        [center[0] + radius * np.cos(angles), center[1] + radius * np.sin(angles)], axis=1
    )


def _corners(*angles: float, radii=(1.0,)) -> np.ndarray:
    """Return points at the given angles in degrees, the radii taken in turn."""
    radius = np.resize(radii, len(angles))[:, None]
    return radius * np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)


def _heart() -> np.ndarray:
    t = np.linspace(0, 2 * np.pi, 96, endpoint=False)
    y = -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t))
    points = np.stack([16 * np.sin(t) ** 3, y], axis=1)
    points -= (points.max(axis=0) + points.min(axis=0)) / 2
    return points / np.linalg.norm(points, axis=1).max()


def _moon() -> np.ndarray:
    # A circle of radius 1 minus one of radius 0.8 whose centre lies 0.6 to the right: they meet at
    # +-53.1 degrees of the first and at +-90 (seen from its own centre, the side that faces left)
    # of the second.
    cos_outer = (1 + 0.6**2 - 0.8**2) / (2 * 0.6)
    outer = np.degrees(np.arccos(cos_outer))
    inner = np.degrees(np.arctan2(np.sin(np.radians(outer)), cos_outer - 0.6))
    return np.concatenate(
        [_arc(1, outer, 360 - outer), _arc(0.8, 360 - inner, inner, center=(0.6, 0))]
    )


def _cross(arm: float = 0.32) -> np.ndarray:
    tip = np.sqrt(1 - arm**2)
    quarter = np.array([(arm, -tip), (arm, -arm), (tip, -arm)])
    turn = np.array([(0, 1), (-1, 0)])
    return np.concatenate([quarter @ np.linalg.matrix_power(turn, k) for k in range(4)])


# Each shape is a list of outlines within the unit circle (x to the right, y downwards); a second
# one is a hole.
OUTLINES: dict[str, list[np.ndarray]] = {
    "circle": [_arc(1, 0, 360)],
    "ring": [_arc(1, 0, 360), _arc(0.55, 0, 360)],
    "square": [_corners(45, 135, 225, 315)],
    "triangle": [_corners(-90, 30, 150)],
    "star": [_corners(*range(-90, 270, 36), radii=(1, 0.42))],
    "heart": [_heart()],
    "cross": [_cross()],
    "moon": [_moon()],
    "arrow": [
        np.array(
            [
                (0, -1),
                (0.8, -0.1),
                (0.32, -0.1),
                (0.32, 0.9),
                (-0.32, 0.9),
                (-0.32, -0.1),
                (-0.8, -0.1),
            ]
        )
    ],
    "bowtie": [
        np.array([(-0.8, -0.6), (0, -0.16), (0.8, -0.6), (0.8, 0.6), (0, 0.16), (-0.8, 0.6)])
    ],
}
NEW_SHAPES = ("bowtie",)  # which the bundled checkpoints have not seen: chapter 14 teaches it
SHAPES = tuple(shape for shape in OUTLINES if shape not in NEW_SHAPES)
# Turned by this many degrees, a shape looks the same again (0: at any angle).
SYMMETRY = dict.fromkeys(OUTLINES, 360.0) | {
    "circle": 0.0,
    "ring": 0.0,
    "square": 90.0,
    "triangle": 120.0,
    "star": 72.0,
    "cross": 90.0,
    "bowtie": 180.0,
}


@dataclass(frozen=True)
class Scene:
    """One shape on a background.

    ``x``, ``y`` and ``radius`` are fractions of the width, ``tilt`` is in degrees.
    """

    size: str
    color: str
    shape: str
    background: str
    x: float = 0.5
    y: float = 0.5
    radius: float = 0.26
    tilt: float = 0.0


def held_out() -> frozenset[tuple[str, str, str]]:
    """Read the (color, shape, background) combinations that training never sees: a tenth of all."""
    return frozenset(tuple(row) for row in json.loads(HELD_OUT_FILE.read_text(encoding="utf-8")))


def held_out_captions(count: int) -> list[dict[str, str]]:
    """List attributes of full captions of held-out combinations, each combination in turn."""
    rng = np.random.default_rng(CAPTION_SEED)
    choices = sorted(held_out())
    captions = []
    for k in range(count):
        color, shape, background = choices[k % len(choices)]
        size = str(rng.choice(list(SIZES)))
        captions.append({"color": color, "shape": shape, "background": background, "size": size})
    return captions


def combinations() -> list[tuple[str, str, str]]:
    """List all (color, shape, background) combinations in which the shape can be seen."""
    return [c for c in product(COLORS, SHAPES, BACKGROUNDS) if c[0] != c[2]]


def random_scene(
    rng: np.random.Generator, color: str, shape: str, background: str, size: str | None = None
) -> Scene:
    """Choose what a caption leaves open: place, radius, tilt, and the size if none is given."""
    size = size or str(rng.choice(list(SIZES)))
    radius = rng.uniform(*SIZES[size])
    x, y = rng.uniform(radius + MARGIN, 1 - radius - MARGIN, size=2)
    return Scene(size, color, shape, background, x, y, radius, rng.uniform(-MAX_TILT, MAX_TILT))


def training_scenes(count: int, seed: int) -> list[Scene]:
    """Draw ``count`` scenes by chance of all combinations but the held-out ones, equally likely."""
    rng = np.random.default_rng(seed)
    allowed = [c for c in combinations() if c not in held_out()]
    return [random_scene(rng, *allowed[i]) for i in rng.integers(len(allowed), size=count)]


# Of examples of a new shape. How it looks in the others, a model has to find out.
TAUGHT_COLORS = ("red", "yellow", "green", "blue", "purple", "white")


def new_examples(shape: str, count: int, seed: int = 0) -> list[Scene]:
    """List scenes that teach a shape: colours and sizes in turn, on backgrounds of all colours."""
    rng = np.random.default_rng(seed)
    named = _colors_and_sizes(rng, TAUGHT_COLORS, count)
    return [random_scene(rng, shape=shape, **attributes) for attributes in named]


def new_captions(shape: str, colors: tuple[str, ...], count: int) -> list[dict[str, str]]:
    """List attributes of full captions of a new shape, the colours in turn."""
    rng = np.random.default_rng(CAPTION_SEED)
    named = _colors_and_sizes(rng, colors, count)
    return [attributes | {"shape": shape} for attributes in named]


def _colors_and_sizes(
    rng: np.random.Generator, colors: tuple[str, ...], count: int
) -> list[dict[str, str]]:
    """List all attributes but the shape: colours in turn, then sizes, on backgrounds by chance."""
    sizes = list(SIZES)
    attributes = []
    for k in range(count):
        color = colors[k % len(colors)]
        size = sizes[k // len(colors) % len(sizes)]
        background = str(rng.choice([other for other in BACKGROUNDS if other != color]))
        attributes.append({"size": size, "color": color, "background": background})
    return attributes


def write_folder(examples: list[Scene], folder: Path, pixels: int = 64) -> None:
    """Write scenes as a folder of images with captions.

    ``metadata.jsonl`` has the name and text of one file in each line. Images are PNG, (pixels,
    pixels).
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for k, scene in enumerate(examples):
        name = f"{k:03}.png"
        text = caption(scene.size, scene.color, scene.shape, scene.background)
        Image.fromarray(render(scene, pixels)).save(folder / name)
        lines.append(json.dumps({"file_name": name, "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def coverage(shape: str, x: float, y: float, radius: float, tilt: float, pixels: int) -> np.ndarray:
    """Return how much of each pixel the shape covers: float32, (pixels, pixels), from 0 to 1."""
    side = pixels * SUPERSAMPLING
    cos = np.cos(np.radians(tilt))
    sin = np.sin(np.radians(tilt))
    turn = np.array([(cos, sin), (-sin, cos)])
    mask = Image.new("L", (side, side))
    draw = ImageDraw.Draw(mask)
    ink = 255
    for outline in OUTLINES[shape]:
        points = (outline @ turn * radius + (x, y)) * side
        draw.polygon(points.ravel().tolist(), fill=ink)
        ink = 0  # of a hole
    return np.asarray(mask.reduce(SUPERSAMPLING), np.float32) / 255


def render(scene: Scene, pixels: int = 64) -> np.ndarray:
    """Draw a scene: uint8 of shape (pixels, pixels, 3)."""
    alpha = coverage(scene.shape, scene.x, scene.y, scene.radius, scene.tilt, pixels)[..., None]
    front = np.array(PALETTE[scene.color], np.float32)
    back = np.array(PALETTE[scene.background], np.float32)
    return np.rint(back + alpha * (front - back)).astype(np.uint8)


def caption(size: str | None, color: str | None, shape: str | None, background: str | None) -> str:
    """Say what is given and leave out what is ``None``.

    >>> caption("small", "red", "heart", "white")
    'a small red heart on a white background'
    >>> caption(None, "red", None, None)
    'red'
    >>> caption(None, None, "heart", "white")
    'a heart on a white background'
    >>> caption(None, None, None, "white")
    'a white background'
    """
    words = [word for word in (size, color, shape) if word]
    # No attribute begins with a vowel but "orange" and "arrow".
    if shape:
        words.insert(0, _article(words[0]))
    if background:
        if words:
            words.append("on")
        words += [_article(background), background, "background"]
    return " ".join(words)


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
