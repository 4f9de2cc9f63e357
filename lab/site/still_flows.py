"""Draw the still pictures of chapter 15's widgets, by the widgets' own modules: needs Node.js.

``python -m lab.site.still_flows`` writes them beside the modules, in ``docs/flow``.
"""

import json
import subprocess
from pathlib import Path

from PIL import Image, ImageDraw

FLOW = Path(__file__).resolve().parents[2] / "docs" / "flow"
LARGER = 3  # than the picture, when it is drawn: so edges become smooth
GREY, LIGHT, BLUE, VIOLET = "#8a8f98", "#d8dbe0", "#0a7d91", "#8045e5"
LINE = """
import { density, fillNormal, follow, meanVelocity, times, uniformFrom } from "./flow.mjs";
const noise = fillNormal(new Float64Array(20_000), uniformFrom(0)).sort();
const starts = noise.filter((_, k) => k % 20 === 10);
const velocity = (x, t) => x.map((value) => meanVelocity(value, t));
const [exact, euler] = [100, 4].map((steps) => follow(velocity, starts, times(steps)));
const filled = Array.from({ length: 121 }, (_, k) => density(k / 20 - 3, 0));
const lists = (path) => path.map((x) => [...x]);
console.log(JSON.stringify({ exact: lists(exact), euler: lists(euler), filled }));
"""
PLANE = """
import { fillNormal, uniformFrom } from "./flow.mjs";
import { createNetwork, flow, learn, pointsOf, straighten } from "./network.mjs";
const points = pointsOf("heart");
const noise = fillNormal(new Float32Array(600), uniformFrom(7));
const parameters = createNetwork(0);
const ends = () => [1, 2, 4, 16].map((steps) => [...flow(parameters, noise, steps).at(-1)]);
for (const _ of learn(parameters, points, 1));
const learned = ends();
for (const _ of straighten(parameters, 2));
console.log(JSON.stringify({ points: [...points], ends: [...learned, ...ends()] }));
"""


def in_node(code: str):
    """What a program for Node.js prints as JSON."""
    command = ["node", "--input-type=module", "--eval", code]
    done = subprocess.run(command, cwd=FLOW, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def new_picture(width: int, height: int):
    """A white picture, and what draws into it."""
    picture = Image.new("RGB", (LARGER * width, LARGER * height), "white")
    return picture, ImageDraw.Draw(picture)


def save(picture, name: str) -> None:
    """Write a picture in its own size."""
    small = picture.resize([size // LARGER for size in picture.size], Image.Resampling.LANCZOS)
    small.save(FLOW / name, quality=80, method=6)


def draw_line() -> None:
    """Draw paths from noise to data, Euler's four steps over them, and histograms at the edge."""
    found = in_node(LINE)
    width, height, side = 640, 300, 70
    picture, draw = new_picture(width, height)

    def across(part):
        return LARGER * (10 + part * (width - side - 20))

    def up(x):
        return LARGER * (1 - x / 3) * height / 2

    def aside(density):
        return LARGER * (width - side + min(density, 1.5) / 1.5 * (side - 4))

    for paths, color, thick in ((found["exact"], GREY, 2), (found["euler"], BLUE, 3)):
        for n in range(25, 1000, 50):
            places = [(across(k / (len(paths) - 1)), up(x[n])) for k, x in enumerate(paths)]
            draw.line(places, fill=color, width=thick)
    for n in range(25, 1000, 50):
        draw.circle((across(1), up(found["euler"][-1][n])), 3 * LARGER, fill=VIOLET)
    curve = [(aside(density), up(k / 20 - 3)) for k, density in enumerate(found["filled"])]
    draw.polygon([(aside(0), up(-3)), *curve], fill=LIGHT)
    stairs = []
    for k in range(48):
        low, high = k / 8 - 3, (k + 1) / 8 - 3
        count = sum(low <= x < high for x in found["euler"][-1])
        stairs += [(aside(count / 1000 * 8), up(low)), (aside(count / 1000 * 8), up(high))]
    draw.line(stairs, fill=VIOLET, width=LARGER)
    save(picture, "line.webp")


def draw_plane() -> None:
    """Draw where 1, 2, 4 and 16 steps end, of a network that learned and then was straightened."""
    found = in_node(PLANE)
    side, gap = 150, 10
    picture, draw = new_picture(4 * side + 3 * gap, 2 * side + gap)
    for number, ends in enumerate(found["ends"]):
        left, top = ((side + gap) * place for place in (number % 4, number // 4))
        corner = (left + side - 1, top + side - 1)
        draw.rectangle([LARGER * v for v in (left, top, *corner)], outline=LIGHT, width=LARGER)
        for places, color, radius in ((found["points"], GREY, 0.5), (ends, VIOLET, 1.2)):
            for x, y in zip(places[::2], places[1::2], strict=True):
                if max(abs(x), abs(y)) < 2.5:
                    at = left + (x / 2.6 + 1) * side / 2, top + (1 - y / 2.6) * side / 2
                    draw.circle([LARGER * v for v in at], LARGER * radius, fill=color)
    save(picture, "plane.webp")


if __name__ == "__main__":
    draw_line()
    draw_plane()
