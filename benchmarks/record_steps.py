"""Record how many held-out captions a checkpoint draws right in how many steps.

The judge in ``shapes`` decides. Picture ``k`` starts from the noise of ``jax.random.key(k)``, and
none is dropped. ``benchmarks/steps.json``, which chapter 12 shows, is written after each setting,
and what is recorded is left out. All of it takes about ten minutes on 2 cores.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import (
    FOLDER,
    make_parser,
    name_of,
    origin,
    read_json,
    work_through,
    write_json,
)
from course import sd
from course.sd import Config
from course.sd.samplers import SAMPLERS
from course.sd.tokenizer import Tokenizer
from course.shapes import judge, scenes
from helpers import find_data

TARGET = FOLDER / "steps.json"
PICTURES = 96
BATCH = 32
GUIDANCE = 3.0
MANY = (2, 4, 6, 8, 10, 12, 15, 20, 30)
STEPS = {
    ("shapes-sd", "ddim"): MANY,
    ("shapes-sd", "dpm++"): MANY,
    ("shapes-sd in bfloat16", "ddim"): (15, 30),
    ("shapes-sdxl", "euler"): (8, 15, 30),
}
# Of the last steps, how many have no guidance: for each of shapes-sd's samplers with this many
# steps.
UNGUIDED = {
    ("ddim", 30): (6, 12, 15, 18, 21, 24, 27, 30),
    ("dpm++", 10): (2, 3, 4, 5, 6, 7, 8, 9, 10),
    ("ddim", 8): (1, 2, 3, 4, 5, 6, 7, 8),
}


def settings() -> list[dict]:
    """What to draw with; ``unguided`` is how many of the last steps have no guidance."""
    found = []
    for (checkpoint, sampler), numbers in STEPS.items():
        for steps in numbers:
            found.append(
                {"checkpoint": checkpoint, "sampler": sampler, "steps": steps, "unguided": 0}
            )
    for (sampler, steps), numbers in UNGUIDED.items():
        for last in numbers:
            found.append(
                {"checkpoint": "shapes-sd", "sampler": sampler, "steps": steps, "unguided": last}
            )
    return found


def find_threshold(schedule, sampler: str, steps: int, unguided: int) -> float | None:
    """The timestep below which only the last so many steps are; None for none of them."""
    if unguided == 0:
        return None
    if unguided == steps:
        return float(schedule.num_train_timesteps)
    last_guided = jnp.int32(steps - unguided - 1)
    return float(SAMPLERS[sampler].point(schedule, jnp.int32(steps), last_guided).timestep)


def find_best(record: dict) -> dict:
    """shapes-sd's setting with the least work, of those that score as 30 steps of its DDIM do.

    One point less counts as equal.
    """
    usual = {"checkpoint": "shapes-sd", "sampler": "ddim", "steps": 30, "unguided": 0}
    (own,) = (row for row in record["rows"] if usual.items() <= row.items())
    equal = []
    for row in record["rows"]:
        is_close = own["right"] - row["right"] <= 0.01 * record["pictures"]
        if row["checkpoint"] == "shapes-sd" and is_close:
            equal.append(row)
    # How often the UNet computes an image: twice in a step with guidance.
    return min(equal, key=lambda row: 2 * row["steps"] - row["unguided"])


@functools.cache
def load(checkpoint: str) -> tuple:
    name, _, dtype = checkpoint.partition(" in ")
    return sd.load(find_data("checkpoints") / name, dtype or jnp.float32)


@functools.cache
def drawing() -> Callable:
    """The program that draws, compiled once for each checkpoint and sampler."""
    return jax.jit(sd.generate, static_argnames=sd.STATIC)


def draw_pictures(
    params: dict,
    config: Config,
    tokenize: Tokenizer,
    sampler: str,
    steps: int,
    unguided: int = 0,
    guidance: float = GUIDANCE,
) -> np.ndarray:
    """All pictures, float32 from 0 to 1, (pictures, height, width, 3)."""
    below = find_threshold(config.schedule, sampler, steps, unguided)
    captions = [scenes.caption(**each) for each in scenes.held_out_captions(PICTURES)]
    found = []
    for start in range(0, PICTURES, BATCH):
        images = drawing()(
            params,
            config,
            tokenize(captions[start : start + BATCH]),
            jax.vmap(jax.random.key)(jnp.arange(start, start + BATCH)),
            tokenize([""]),
            steps,
            guidance,
            sampler=sampler,
            unguided_below=below,
        )
        found.append(np.float32(images))
    return np.concatenate(found)


def count_right(images: np.ndarray) -> int:
    """In how many pictures the judge finds all that the caption names."""
    return judge.count_right(scenes.held_out_captions(PICTURES), images)


def record(setting: dict) -> None:
    options = dict(setting)
    images = draw_pictures(*load(options.pop("checkpoint")), **options)
    row = setting | {"right": count_right(images)}
    print(row, flush=True)
    rows = read_json(TARGET, default={"rows": []})["rows"]
    content = origin("jax", "jaxlib", "numpy", "scipy")
    content |= {"pictures": PICTURES, "guidance": GUIDANCE, "rows": [*rows, row]}
    write_json(TARGET, content)


def find_left() -> dict[str, Callable[[], None]]:
    rows = read_json(TARGET, default={"rows": []})["rows"]
    left = {}
    for setting in settings():
        if not any(setting.items() <= row.items() for row in rows):
            left[name_of(setting)] = functools.partial(record, setting)
    return left


if __name__ == "__main__":
    sys.exit(work_through(find_left, make_parser(__doc__).parse_args()))
