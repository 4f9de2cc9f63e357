"""How many held-out captions the bundled Stable Diffusion checkpoints draw right.

The settings are samplers and numbers of steps, in float32, in bfloat16, or with weights in int8;
scales of guidance; and how many of the last steps go without guidance (``unguided``). All of it
takes about ten minutes on 2 cores.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp

from course import sd
from course.model.quantize import quantize
from course.sd.samplers import SAMPLERS
from course.shapes import judge, scenes
from helpers import find_data
from lab.train.judging import GUIDANCE, make_drawing

PICTURES = 96
MANY = (2, 4, 6, 8, 10, 12, 15, 20, 30)
USUAL = {
    "checkpoint": "shapes-sd",
    "weights": "float32",
    "sampler": "ddim",
    "steps": 30,
    "guidance": GUIDANCE,
    "unguided": 0,
}
# Of the last steps, how many have no guidance: for samplers with so many steps.
UNGUIDED = {
    ("ddim", 30): (6, 12, 15, 18, 21, 24, 27, 30),
    ("dpm++", 10): (2, 3, 4, 5, 6, 7, 8, 9, 10),
    ("ddim", 8): (1, 2, 3, 4, 5, 6, 7, 8),
}


def questions(rows: list[dict]) -> list[dict]:
    asked = []
    for sampler in ("ddim", "dpm++"):
        asked += [{"sampler": sampler, "steps": steps} for steps in MANY]
    asked += [{"weights": "bfloat16", "steps": steps} for steps in (15, 30)]
    for steps in (8, 15, 30):
        asked.append({"checkpoint": "shapes-sdxl", "sampler": "euler", "steps": steps})
    for (sampler, steps), numbers in UNGUIDED.items():
        asked += [{"sampler": sampler, "steps": steps, "unguided": last} for last in numbers]
    # The card of shapes-flux2 has these beside its own.
    for steps in (1, 2, 4, 8, 16):
        asked += [{"steps": steps, "guidance": guidance} for guidance in (1.0, 2.0, 3.0)]
    for sampler, steps in (("ddim", 8), ("ddim", 30), ("dpm++", 10)):
        asked.append({"weights": "int8", "sampler": sampler, "steps": steps})
    return [USUAL | each for each in asked]


def answer(
    checkpoint: str, weights: str, sampler: str, steps: int, guidance: float, unguided: int
) -> dict:
    params, config, draw = load(checkpoint, weights)
    asked = scenes.held_out_captions(PICTURES)
    captions = [scenes.caption(**named) for named in asked]
    below = find_threshold(config.schedule, sampler, steps, unguided)
    images = draw(params, captions, steps, guidance, sampler=sampler, unguided_below=below)
    return {"right": judge.count_right(asked, images), "pictures": PICTURES}


@functools.cache
def load(checkpoint: str, weights: str) -> tuple[dict, sd.Config, Callable]:
    """Return a checkpoint's parameters and configuration, and a function that draws with it."""
    dtype = jnp.bfloat16 if weights == "bfloat16" else jnp.float32
    params, config, tokenize = sd.load(find_data("checkpoints") / checkpoint, dtype)
    if weights == "int8":
        params |= {"unet": quantize(params["unet"])}
    return params, config, make_drawing(config, tokenize)


def find_threshold(schedule, sampler: str, steps: int, unguided: int) -> float | None:
    """Return the timestep below which only the last so many steps are; None for none of them."""
    if unguided == 0:
        return None
    if unguided == steps:
        return float(schedule.num_train_timesteps)
    last_guided = jnp.int32(steps - unguided - 1)
    return float(SAMPLERS[sampler].point(schedule, jnp.int32(steps), last_guided).timestep)


def find_best(rows: list[dict]) -> dict:
    """Return shapes-sd's row with the least work, of those that score as 30 steps of its DDIM do.

    One point in a hundred less counts as equal.
    """
    shared = {key: USUAL[key] for key in ("checkpoint", "weights", "guidance")}
    rows = [row for row in rows if shared.items() <= row["question"].items()]
    (own,) = (row["answer"] for row in rows if row["question"] == USUAL)
    least = own["right"] - 0.01 * own["pictures"]
    equal = [row for row in rows if row["answer"]["right"] >= least]
    # How often the UNet computes an image: twice in a step with guidance.
    return min(equal, key=lambda row: 2 * row["question"]["steps"] - row["question"]["unguided"])
