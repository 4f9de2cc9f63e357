"""Record how fast the bundled checkpoint draws on this CPU: ``benchmarks/cpu.json``.

Three programs draw in turn: diffusers' Flax pipeline, the model of ``stable_diffusion``, and, if
there is a ``.venv-train``, PyTorch's diffusers. The fewest steps come from
``benchmarks/steps.json``. It takes about five minutes on 2 cores, and chapter 12 shows it.
"""

import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax

import stable_diffusion
from benchmarks import record_steps
from benchmarks.common import FOLDER, ROOT, machine, origin, read_json, write_json
from helpers import find_data, quiet_warnings
from stable_diffusion import convert

TARGET = FOLDER / "cpu.json"
PYTORCH = ROOT / ".venv-train" / "bin" / "python"
BATCH = 8
ROUNDS = 5
SAMPLER = "ddim"  # what is usual here
STEPS = 30
PROMPTS = ["a small red heart on a white background"] * BATCH


def flax_pipeline(folder: Path) -> Callable[[], None]:
    """A function that draws with diffusers' Flax pipeline."""
    import diffusers

    pipeline, params = diffusers.FlaxStableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None
    )
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))
    ids = pipeline.prepare_inputs(PROMPTS)
    key = jax.random.key(0)

    def draw() -> None:
        images = generate(ids, params, key, STEPS, 64, 64, record_steps.GUIDANCE)
        images.block_until_ready()

    return draw


def plain_jax(folder: Path, sampler: str, steps: int, unguided: int = 0) -> Callable[[], None]:
    """A function that draws with the model in plain JAX."""
    params, config, tokenize = stable_diffusion.load(folder)
    generate = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    ids = tokenize(PROMPTS)
    empty = tokenize([""])
    key = jax.random.key(0)
    below = record_steps.find_threshold(config.schedule, sampler, steps, unguided)

    def draw() -> None:
        images = generate(
            params,
            config,
            ids,
            key,
            empty,
            steps,
            record_steps.GUIDANCE,
            sampler=sampler,
            unguided_below=below,
        )
        images.block_until_ready()

    return draw


class PyTorch:
    """A process that draws with PyTorch's diffusers, `benchmarks.draw_with_pytorch`."""

    def __init__(self, folder: Path):
        self.process = subprocess.Popen(
            [PYTORCH, "-m", "benchmarks.draw_with_pytorch", str(folder), str(BATCH)],
            cwd=ROOT,
            # Threads that wait busily take the cores from whatever else runs on the machine.
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"},
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
    params, _, _ = stable_diffusion.load(source)
    convert.save(params, source, target)


def pytorch_versions() -> dict[str, str]:
    """The versions of torch and diffusers in PyTorch's environment."""
    script = "import torch, diffusers; print(torch.__version__, diffusers.__version__)"
    command = [PYTORCH, "-c", script]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    torch, diffusers = said.split()
    return {"torch": torch, "diffusers": diffusers}


def time_in_turns(source: Path, best: dict) -> dict[str, list[float]]:
    """Seconds of each program's calls after the first, which compiles."""
    calls = {
        "diffusers, Flax": flax_pipeline(source),
        "this model": plain_jax(source, SAMPLER, STEPS),
        "this model, best settings": plain_jax(
            source, best["sampler"], best["steps"], best["unguided"]
        ),
    }
    pytorch_calls = {}
    with tempfile.TemporaryDirectory() as folder:
        pytorch = None
        if PYTORCH.exists():
            write_for_pytorch(source, Path(folder))
            pytorch = PyTorch(Path(folder))
            pytorch_calls = {
                "diffusers, PyTorch": (SAMPLER, STEPS),
                "diffusers, PyTorch, best sampler and steps": (best["sampler"], best["steps"]),
            }
        seconds = {name: [] for name in [*calls, *pytorch_calls]}
        for _ in range(1 + ROUNDS):
            for name, draw in calls.items():
                start = time.perf_counter()
                draw()
                seconds[name].append(time.perf_counter() - start)
            for name, (sampler, steps) in pytorch_calls.items():
                seconds[name].append(pytorch.draw(sampler, steps))
        if pytorch:
            pytorch.close()
    return {name: times[1:] for name, times in seconds.items()}


def main() -> None:
    quiet_warnings()
    best = record_steps.find_best(read_json(record_steps.TARGET, default=None))
    seconds = time_in_turns(find_data("checkpoints") / best["checkpoint"], best)
    rates = {name: BATCH / statistics.median(times) for name, times in seconds.items()}
    content = origin("jax", "jaxlib", "flax", "diffusers", "transformers") | {
        "machine": f"{machine()['cores']} cores, {platform.machine()}",
        "checkpoint": best["checkpoint"],
        "batch": BATCH,
        "best": best,
        "seconds": {name: [round(time, 4) for time in times] for name, times in seconds.items()},
        "images in a second": {name: round(rate, 2) for name, rate in rates.items()},
    }
    if PYTORCH.exists():
        content["versions of PyTorch"] = pytorch_versions()
    write_json(TARGET, content)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
