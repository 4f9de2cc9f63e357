"""What the small models draw over several devices, beside what one draws of the same noise.

The file that the planner writes for a way does it, on simulated devices in float32. For each kind
of way and each number of devices one is asked: that in which the most devices share a picture, as
far as the model permits. (Small FLUX.2 has 6 heads, so over 8 devices only 2 share the heads of a
picture.) For so many pictures the planner finds few ways, so there are three numbers: 8 divides the
first, 2 but not 4 the last, and in the second, which is odd, only guidance has halves to divide. A
question names the weights' hash, so that other weights are scored anew. All of it takes about a
quarter of an hour on 2 cores.
"""

import dataclasses
import functools
import itertools
import runpy
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

from course import flux2
from course.families import find_code
from course.shapes import judge, scenes
from course.tpu.pieces import load_config
from course.tpu.plan import Job, make_job, suitable_draw
from course.tpu.plan_file import write_plan
from course.tpu.splits import DATA
from helpers import find_model, simulate_devices
from lab.score.flux2 import hash_of_weights

MODELS = ("shapes-flux2", "shapes-sd")
PICTURES = (24, 25, 26)
DEVICES = (2, 4, 8)
STEPS = 8


def questions(rows: list[dict]) -> list[dict]:
    found = {}
    for model, devices, pictures in itertools.product(MODELS, DEVICES, PICTURES):
        job = find_job(model, pictures, devices)
        for way in reversed(job.ways):  # the first of which shares a picture among all devices
            is_guidance = way.kind == DATA and way.halves == 2
            if not job.why_not(way):
                kind = "guidance" if is_guidance else way.kind
                found.setdefault((model, devices, kind), (str(way), pictures))
    asked = []
    for (model, devices, _), (way, pictures) in found.items():
        weights = hash_of_weights(find_model(model))
        question = {"model": model, "weights": weights, "devices": devices}
        _, guidance = suitable_draw(load_config(model))
        question |= {"way": way, "pictures": pictures, "steps": STEPS, "guidance": guidance}
        asked.append(question)
    return asked


def answer(
    model: str, weights: str, devices: int, way: str, pictures: int, steps: int, guidance: float
) -> dict:
    simulate_devices(max(DEVICES))
    asked = scenes.held_out_captions(max(PICTURES))
    captions = tuple(scenes.caption(**named) for named in asked)
    alone = draw_on_one(model, captions, steps, guidance)
    # The first of more pictures have the same noise.
    asked, captions, alone = asked[:pictures], captions[:pictures], alone[:pictures]
    drawn = draw_split(find_job(model, pictures, devices, steps), way, captions)
    return {
        "difference": float(255 * np.abs(drawn - alone).max()),
        "right": judge.count_right(asked, drawn),
        "right on one": judge.count_right(asked, alone),
    }


def find_job(model: str, pictures: int, devices: int, steps: int = STEPS) -> Job:
    """Return what is split, also over fewer devices than the chips that a plan can be for."""
    job = make_job(model, batch=pictures, dtype="float32")
    program = dataclasses.replace(job.program, steps=steps)
    return dataclasses.replace(job, program=program, chips=devices)


def draw_split(job: Job, way: str, captions: tuple[str, ...]) -> np.ndarray:
    """Draw as the file does that the planner writes for a way: float32, from 0 to 1."""
    ways = {str(each): each for each in job.ways}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "draw.py"
        write_plan(job, ways[way], file)
        names = runpy.run_path(str(file))
    loaded = names["load"](find_model(job.program.model), jnp.float32)
    return np.float32(names["draw"](*loaded, captions))


@functools.cache
def draw_on_one(model: str, captions: tuple[str, ...], steps: int, guidance: float) -> np.ndarray:
    """Draw what such a file draws, on one device: float32, from 0 to 1."""
    folder = find_model(model)
    code = find_code(folder)
    params, config, tokenize = code.load(folder, jnp.float32)
    generate = jax.jit(code.generate, static_argnames=code.STATIC)
    key, empty, side = jax.random.key(0), tokenize([""]), config.side
    if code is flux2:
        noise = flux2.random_tokens(key, config, len(captions), side, side)
        ids = tokenize(captions)
        images = generate(params, config, *ids, noise, side, side, steps, guidance, empty)
    else:
        latents = side // config.pixels_per_latent
        noise = jax.random.normal(key, (len(captions), latents, latents, config.unet.in_channels))
        ids = tokenize(captions)
        images = generate(params, config, ids, None, empty, steps, guidance, noise)
    return np.float32(images)
