"""How fast the bundled checkpoint draws on this CPU, by several programs.

They draw the same images in turn: diffusers' Flax pipeline, the model of ``course.sd`` with fewer
and fewer steps, and, if there is a ``.venv-pytorch``, PyTorch's diffusers, as it is and compiled.
Ratios are medians over neighbours in time. How many captions a setting draws right is from
``score/sd``. It takes about five minutes on 2 cores, which must have nothing else to do: on a busy
machine PyTorch loses far more than JAX.
"""

import contextlib
import functools
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import psutil

from course import sd
from helpers import find_data, read_record
from lab.record import ROOT
from lab.score.sd import PICTURES, USUAL, find_best, find_threshold
from lab.train.judging import GUIDANCE

PYTORCH = ROOT / ".venv-pytorch" / "bin" / "python"
BATCH = 8
ROUNDS = 5
PROMPTS = ["a small red heart on a white background"] * BATCH
PIPELINE = "the guides' pipeline"
MODEL = "this model"
EAGER = "PyTorch's diffusers"
COMPILED = "PyTorch's diffusers, compiled"


def flax_pipeline(folder: Path) -> Callable[[], None]:
    """Return a function that draws with diffusers' Flax pipeline."""
    import diffusers

    pipeline, params = diffusers.FlaxStableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None
    )
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))
    ids = pipeline.prepare_inputs(PROMPTS)
    key = jax.random.key(0)

    def draw() -> None:
        images = generate(ids, params, key, USUAL["steps"], 64, 64, GUIDANCE)
        images.block_until_ready()

    return draw


def plain_jax(folder: Path, sampler: str, steps: int, unguided: int) -> Callable[[], None]:
    """Return a function that draws with the model in plain JAX."""
    params, config, tokenize = sd.load(folder)
    generate = jax.jit(sd.generate, static_argnames=sd.STATIC)
    ids = tokenize(PROMPTS)
    empty = tokenize([""])
    key = jax.random.key(0)
    below = find_threshold(config.schedule, sampler, steps, unguided)

    def draw() -> None:
        images = generate(
            params,
            config,
            ids,
            key,
            empty,
            steps,
            GUIDANCE,
            sampler=sampler,
            unguided_below=below,
        )
        images.block_until_ready()

    return draw


class PyTorch:
    """A process that draws with PyTorch's diffusers, `lab.clock.draw_with_pytorch`."""

    def __init__(self, folder: Path, *how: str):
        self.process = subprocess.Popen(
            [PYTORCH, "-m", "lab.clock.draw_with_pytorch", str(folder), str(BATCH), *how],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def draw(self, sampler: str, steps: int) -> float:
        """Draw, and return the seconds that it took."""
        print(sampler, steps, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def write_for_pytorch(source: Path, target: Path) -> None:
    """Write the bundled pipeline as PyTorch has it."""
    params, _, _ = sd.load(source)
    sd.save(params, source, target)


def pytorch_versions() -> dict[str, str]:
    """Return the versions of torch and diffusers in PyTorch's environment."""
    script = "import torch, diffusers; print(torch.__version__, diffusers.__version__)"
    command = [PYTORCH, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch, diffusers = said.split()
    return {"torch": torch, "diffusers": diffusers}


def time_in_turns(source: Path, settings: dict[str, dict]) -> dict[str, list[float]]:
    """Return the seconds of each program's calls after the first two, which compile and warm up."""
    flax = flax_pipeline(source)
    calls = {PIPELINE: lambda: time_call(flax)}
    for name, setting in settings.items():
        draw = plain_jax(source, setting["sampler"], setting["steps"], setting["unguided"])
        calls[name] = functools.partial(time_call, draw)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if PYTORCH.exists():
            write_for_pytorch(source, Path(folder))
            for name, how in {EAGER: [], COMPILED: ["compile"]}.items():
                pytorch = PyTorch(Path(folder), *how)
                stack.callback(pytorch.close)
                calls[name] = functools.partial(pytorch.draw, USUAL["sampler"], USUAL["steps"])
        seconds = {name: [] for name in calls}
        for turn in range(2 + ROUNDS):
            print(f"turn {turn + 1} of {2 + ROUNDS}", flush=True)
            for name, call in calls.items():
                seconds[name].append(call())
    return {name: times[2:] for name, times in seconds.items()}


def time_call(draw: Callable[[], None]) -> float:
    start = time.perf_counter()
    draw()
    return time.perf_counter() - start


def find_settings() -> dict[str, dict]:
    """Return the rungs of the ladder: each of the model's settings, with its score."""
    rows = read_record("score/sd")
    best = find_best(rows)["question"]
    steps, unguided = best["steps"], best["unguided"]
    settings = {
        MODEL: USUAL,
        f"{steps} steps": best | {"unguided": 0},
        f"{steps} steps, the last {unguided} without guidance": best,
    }
    found = {}
    for name, setting in settings.items():
        (right,) = (row["answer"]["right"] for row in rows if row["question"] == setting)
        found[name] = {key: setting[key] for key in ("sampler", "steps", "unguided")}
        found[name]["right"] = right
    return found


def median_ratio(slower: list[float], faster: list[float]) -> float:
    """Return how many times as fast, the median over neighbours in time."""
    return round(statistics.median(a / b for a, b in zip(slower, faster, strict=True)), 3)


def questions(rows: list[dict]) -> list[dict]:
    return [{"checkpoint": USUAL["checkpoint"], "batch": BATCH, "rounds": ROUNDS}]


def answer(checkpoint: str, **setting) -> dict:
    busy = psutil.cpu_percent(interval=5)
    if busy > 10:
        raise RuntimeError(
            f"The machine is busy, its cores at {busy:.0f} %: wait until it is idle."
        )
    settings = find_settings()
    seconds = time_in_turns(find_data("checkpoints") / checkpoint, settings)
    found = {
        "pictures": PICTURES,
        "settings": settings,
        "seconds": {name: [round(time, 4) for time in times] for name, times in seconds.items()},
        "times as fast as the pipeline": {
            name: median_ratio(seconds[PIPELINE], times) for name, times in seconds.items()
        },
    }
    if PYTORCH.exists():
        found["versions of PyTorch"] = pytorch_versions()
        found["this model, times as fast as PyTorch"] = {
            name: median_ratio(seconds[name], seconds[MODEL]) for name in (EAGER, COMPILED)
        }
    return found
