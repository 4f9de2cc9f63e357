"""Record how ``stable_diffusion`` compares with the Flax pipelines: ``python -m benchmarks.record_model``.

It writes ``benchmarks/model.json``. Both draw the same prompts with the same weights, steps and sampler, on simulated
devices of this machine's CPU. They take turns, and each ratio is of two neighbours, so whatever else the machine does
slows both. Core seconds are what the cores worked for a program, however long it had to wait for them. It takes about
ten minutes on 2 cores.
"""

import argparse
import datetime
import json
import logging
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import diffusers
import jax
import numpy as np
import transformers
from flax.jax_utils import replicate
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import stable_diffusion
from course.tpu.compiler import versions, write_json
from helpers import Checkpoint, bundled_checkpoint, simulate_devices

TARGET = Path(__file__).with_name("model.json")
CHECKPOINTS = ("shapes-sd", "shapes-sdxl")
WORK = ((1, 1), (1, 8), (8, 1))  # devices, and images on each
STEPS = 30  # whatever the chapters take, so that records compare
log = logging.getLogger(__name__)


def flax_pipeline(checkpoint: Checkpoint, images: int) -> tuple[Callable, tuple, tuple]:
    """What a Flax pipeline does if it is called with ``jit=True``: ``pmap`` of its ``_generate``.

    It gives the mapped function, the arguments to compile it with, and those of them that a call takes.
    """
    settings = {"dtype": checkpoint.dtype, "safety_checker": None, "feature_extractor": None}
    pipeline, params = diffusers.FlaxDiffusionPipeline.from_pretrained(checkpoint.source, **settings)
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
    """The same with ``stable_diffusion``: ``shard_map`` of its ``generate``."""
    params, config, tokenize = stable_diffusion.load(checkpoint.source, checkpoint.dtype)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    ids = jax.device_put(tokenize(prompts(checkpoint, images)), split)
    keys = jax.device_put(jax.random.split(jax.random.key(0), images), split)
    numbers = (np.int32(STEPS), np.float32(checkpoint.guidance_scale))
    shared = jax.device_put((params, None if config.is_xl else tokenize([""]), *numbers), whole)

    def draw(ids, keys, shared):
        params, negative_ids, steps, guidance = shared
        return stable_diffusion.generate(params, config, ids, keys, negative_ids, steps, guidance)

    specs = {"in_specs": (P("data"), P("data"), P()), "out_specs": P("data")}
    return jax.jit(jax.shard_map(draw, mesh=mesh, **specs, check_vma=False)), (ids, keys, shared), (ids, keys, shared)


SIDES = {"flax pipeline": flax_pipeline, "stable_diffusion": plain_jax}


def prompts(checkpoint: Checkpoint, images: int) -> list[str]:
    return [checkpoint.prompts[n % len(checkpoint.prompts)] for n in range(images)]


def measure(name: str, devices: int, images: int, compilations: int, runs: int) -> dict:
    """Seconds of both sides, in turns; it must be called in a process that has not started JAX."""
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(devices)
    checkpoint = bundled_checkpoint(name)
    sides = {side: make(checkpoint, devices * images) for side, make in SIDES.items()}
    seconds = {side: {what: [] for what in ("trace", "compile", "core compile", "run", "core run")} for side in SIDES}
    programs = {}
    for turn in range(compilations):
        for side in in_turns(turn):
            jax.clear_caches()
            mapped, arguments, _ = sides[side]
            start = time.perf_counter()
            lowered = mapped.lower(*arguments)
            traced, cores = time.perf_counter(), time.process_time()
            programs[side] = lowered.compile()
            seconds[side]["trace"].append(traced - start)
            seconds[side]["compile"].append(time.perf_counter() - traced)
            seconds[side]["core compile"].append(time.process_time() - cores)
    for turn in range(-2, runs):  # two to warm up
        for side in in_turns(turn):
            start, cores = time.perf_counter(), time.process_time()
            jax.block_until_ready(programs[side](*sides[side][2]))
            if turn >= 0:
                seconds[side]["run"].append(time.perf_counter() - start)
                seconds[side]["core run"].append(time.process_time() - cores)
    return {
        "checkpoint": name,
        "devices": devices,
        "images per device": images,
        "steps": STEPS,
        "dtype": np.dtype(checkpoint.dtype).name,
        "sides": {side: summary(of, devices * images) for side, of in seconds.items()},
        "stable_diffusion / flax pipeline": ratios(*(seconds[side] for side in SIDES)),
    }


def in_turns(turn: int) -> list[str]:
    """The sides, with a different one first every time."""
    return list(SIDES)[:: -1 if turn % 2 else 1]


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

    def median(pairs) -> float:
        return round(statistics.median(a / b for a, b in pairs), 3)

    whole = [[sum(pair) for pair in zip(of["trace"], of["compile"], strict=True)] for of in (plain, flax)]
    return {
        "images per second": median(zip(flax["run"], plain["run"], strict=True)),
        "compile seconds": median(zip(plain["compile"], flax["compile"], strict=True)),
        "core seconds to compile": median(zip(plain["core compile"], flax["core compile"], strict=True)),
        "core seconds per image": median(zip(plain["core run"], flax["core run"], strict=True)),
        "trace and compile seconds": median(zip(*whole, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CHECKPOINTS, help="one checkpoint")
    parser.add_argument("--compilations", type=int, default=3, help="of each side (%(default)s)")
    parser.add_argument("--runs", type=int, default=7, help="of each side (%(default)s)")
    parser.add_argument("--to", type=Path, default=TARGET, help="file to write (%(default)s)")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    log.setLevel(logging.INFO)
    found = []
    for name in [options.only] if options.only else CHECKPOINTS:
        for devices, images in WORK:
            # JAX reads the number of devices once, so each has a process of its own.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                work = process.submit(measure, name, devices, images, options.compilations, options.runs)
                found.append(work.result())
            log.info(json.dumps(found[-1], indent=1))
    machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "load in the last 15 minutes": os.getloadavg()[2]}
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    write_json(options.to, {"date": date, "versions": versions(), "machine": machine, "measured": found})


def cpu_name() -> str:
    """What Linux calls the CPU, or else its architecture."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


if __name__ == "__main__":
    main()
