"""Record how ``course.sd`` compares with the Flax pipelines: ``benchmarks/model.json``.

Both draw the same prompts with the same weights, steps and sampler, on simulated devices of this
machine's CPU. They take turns, and each ratio is of two neighbours, so whatever else the machine
does slows both. Core seconds are what the cores worked for a program, however long it had to wait
for them. It takes about ten minutes on 2 cores, and chapter 11 points to the record. What is
recorded is left out: delete the file to measure anew.
"""

import argparse
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import (
    FOLDER,
    machine,
    make_parser,
    origin,
    read_json,
    work_through,
    write_json,
)
from course import sd
from helpers import Checkpoint, bundled_checkpoint, quiet_warnings, simulate_devices

TARGET = FOLDER / "model.json"
CHECKPOINTS = ("shapes-sd", "shapes-sdxl")
WORK = ((1, 1), (1, 8), (8, 1))  # devices, and images on each
STEPS = 30  # whatever the chapters take, so that records compare
FLAX = "flax pipeline"
PLAIN = "stable_diffusion"


def flax_pipeline(checkpoint: Checkpoint, images: int) -> tuple[Callable, tuple, tuple]:
    """What a Flax pipeline does if it is called with ``jit=True``: ``pmap`` of its ``_generate``.

    It gives the mapped function, the arguments to compile it with, and those of them that a call
    takes.
    """
    import diffusers
    from flax.jax_utils import replicate

    pipeline, params = diffusers.FlaxDiffusionPipeline.from_pretrained(
        checkpoint.source, dtype=checkpoint.dtype, safety_checker=None, feature_extractor=None
    )
    devices = jax.device_count()
    ids = pipeline.prepare_inputs(prompts(checkpoint, images))
    ids = ids.reshape(devices, -1, *ids.shape[1:])
    keys = jax.random.split(jax.random.key(0), devices)
    guidance = np.full((devices, 1), checkpoint.guidance_scale, np.float32)
    inputs = (ids, replicate(params), keys)
    size = (STEPS, checkpoint.height, checkpoint.width)
    mapped = jax.pmap(pipeline._generate, static_broadcasted_argnums=(3, 4, 5))
    return mapped, (*inputs, *size, guidance), (*inputs, guidance)


def plain_jax(checkpoint: Checkpoint, images: int) -> tuple[Callable, tuple, tuple]:
    """The same with ``course.sd``: ``shard_map`` of its ``generate``."""
    params, config, tokenize = sd.load(checkpoint.source, checkpoint.dtype)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole = NamedSharding(mesh, P())
    split = NamedSharding(mesh, P("data"))
    ids = jax.device_put(tokenize(prompts(checkpoint, images)), split)
    keys = jax.device_put(jax.random.split(jax.random.key(0), images), split)
    negative_ids = None if config.is_xl else tokenize([""])
    numbers = (np.int32(STEPS), np.float32(checkpoint.guidance_scale))
    shared = jax.device_put((params, negative_ids, *numbers), whole)

    def draw(ids, keys, shared):
        params, negative_ids, steps, guidance = shared
        return sd.generate(params, config, ids, keys, negative_ids, steps, guidance)

    mapped = jax.shard_map(
        draw,
        mesh=mesh,
        in_specs=(P("data"), P("data"), P()),
        out_specs=P("data"),
    )
    arguments = (ids, keys, shared)
    return jax.jit(mapped), arguments, arguments


SIDES = {FLAX: flax_pipeline, PLAIN: plain_jax}


def prompts(checkpoint: Checkpoint, images: int) -> list[str]:
    return [checkpoint.prompts[n % len(checkpoint.prompts)] for n in range(images)]


def in_turns(turn: int) -> list[str]:
    """The sides, with a different one first every time."""
    if turn % 2:
        return [PLAIN, FLAX]
    return [FLAX, PLAIN]


def measure(name: str, devices: int, images: int, compilations: int, runs: int) -> dict:
    """Seconds of both sides, in turns; it must be called in a process that has not started JAX."""
    quiet_warnings()
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(devices)
    checkpoint = bundled_checkpoint(name)
    sides = {side: make(checkpoint, devices * images) for side, make in SIDES.items()}
    seconds = {}
    for side in SIDES:
        seconds[side] = {
            what: [] for what in ("trace", "compile", "core compile", "run", "core run")
        }
    programs = {}
    for turn in range(compilations):
        for side in in_turns(turn):
            jax.clear_caches()
            mapped, arguments, _ = sides[side]
            start = time.perf_counter()
            lowered = mapped.lower(*arguments)
            traced = time.perf_counter()
            cores = time.process_time()
            programs[side] = lowered.compile()
            seconds[side]["trace"].append(traced - start)
            seconds[side]["compile"].append(time.perf_counter() - traced)
            seconds[side]["core compile"].append(time.process_time() - cores)
    for turn in range(-2, runs):  # two to warm up
        for side in in_turns(turn):
            _, _, inputs = sides[side]
            start = time.perf_counter()
            cores = time.process_time()
            jax.block_until_ready(programs[side](*inputs))
            if turn >= 0:
                seconds[side]["run"].append(time.perf_counter() - start)
                seconds[side]["core run"].append(time.process_time() - cores)
    return {
        "checkpoint": name,
        "devices": devices,
        "images per device": images,
        "steps": STEPS,
        "dtype": np.dtype(checkpoint.dtype).name,
        "sides": {side: summary(seconds[side], devices * images) for side in SIDES},
        "stable_diffusion / flax pipeline": ratios(seconds[FLAX], seconds[PLAIN]),
    }


def summary(seconds: dict, images: int) -> dict:
    medians = {what: statistics.median(values) for what, values in seconds.items()}
    return {
        "images per second": round(images / medians["run"], 3),
        "trace seconds": round(medians["trace"], 3),
        "compile seconds": round(medians["compile"], 3),
        "core seconds to compile": round(medians["core compile"], 3),
        "core seconds per image": round(medians["core run"] / images, 4),
    }


def ratios(flax: dict, plain: dict) -> dict:
    """Medians over neighbours: above 1 is better for images, and below 1 for seconds."""

    def median_ratio(numerators: list[float], denominators: list[float]) -> float:
        pairs = zip(numerators, denominators, strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    def trace_and_compile(side: dict) -> list[float]:
        return [sum(pair) for pair in zip(side["trace"], side["compile"], strict=True)]

    return {
        "images per second": median_ratio(flax["run"], plain["run"]),
        "compile seconds": median_ratio(plain["compile"], flax["compile"]),
        "core seconds to compile": median_ratio(plain["core compile"], flax["core compile"]),
        "core seconds per image": median_ratio(plain["core run"], flax["core run"]),
        "trace and compile seconds": median_ratio(
            trace_and_compile(plain), trace_and_compile(flax)
        ),
    }


def record(name: str, devices: int, images: int, options: argparse.Namespace) -> None:
    # JAX reads the number of devices once, so each measurement has a process of its own.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        work = process.submit(measure, name, devices, images, options.compilations, options.runs)
        found = work.result()
    print(json.dumps(found, indent=1), flush=True)
    content = origin()
    content["machine"] = machine() | {"load in the last 15 minutes": os.getloadavg()[2]}
    content["measured"] = [*read_json(TARGET, default={"measured": []})["measured"], found]
    write_json(TARGET, content)


def find_left(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    known = set()
    for found in read_json(TARGET, default={"measured": []})["measured"]:
        known.add((found["checkpoint"], found["devices"], found["images per device"]))
    left = {}
    for name in CHECKPOINTS:
        for devices, images in WORK:
            if (name, devices, images) not in known:
                label = f"{name} on {devices} device(s), {images} image(s) each"
                left[label] = functools.partial(record, name, devices, images, options)
    return left


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--compilations", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="of each side (%(default)s)")
    options = parser.parse_args()
    return work_through(lambda: find_left(options), options)


if __name__ == "__main__":
    sys.exit(main())
