"""Record how fast the bundled checkpoint draws on this CPU, by three programs in turn: ``benchmarks/cpu.json``.

They are diffusers' Flax pipeline, the model of ``stable_diffusion``, and, if there is a ``.venv-train``, PyTorch's
diffusers. The fewest steps come from ``benchmarks/steps.json``. It takes about five minutes on 2 cores.
"""

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import diffusers
import jax
import transformers

import stable_diffusion
from benchmarks.record_steps import GUIDANCE, TARGET, find_best, find_threshold
from course import convert
from course.tpu.compiler import versions, write_json
from helpers import find_data

ROOT, BATCH, ROUNDS, USUAL = Path(__file__).resolve().parents[1], 8, 5, ("ddim", 30, 0)
PYTORCH = ROOT / ".venv-train" / "bin" / "python"
PROMPTS = ["a small red heart on a white background"] * BATCH


def time_flax(folder: Path):
    """A function that draws with diffusers' Flax pipeline."""
    pipeline, params = diffusers.FlaxStableDiffusionPipeline.from_pretrained(
        folder, safety_checker=None, feature_extractor=None
    )
    generate, ids = jax.jit(pipeline._generate, static_argnums=(3, 4, 5)), pipeline.prepare_inputs(PROMPTS)
    return lambda: generate(ids, params, jax.random.key(0), USUAL[1], 64, 64, GUIDANCE).block_until_ready()


def time_ours(folder: Path, sampler: str, steps: int, unguided: int):
    """A function that draws with the model in plain JAX."""
    params, config, tokenize = stable_diffusion.load(folder)
    below = find_threshold(config.schedule, sampler, steps, unguided) if unguided else None
    draw = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    ids, empty, options = tokenize(PROMPTS), tokenize([""]), {"sampler": sampler, "unguided_below": below}
    return lambda: draw(params, config, ids, jax.random.key(0), empty, steps, GUIDANCE, **options).block_until_ready()


def write_for_pytorch(source: Path, target: Path) -> None:
    """Write the bundled pipeline as PyTorch has it."""
    params, _, _ = stable_diffusion.load(source)
    convert.save(params, source, target)


def main() -> None:
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    best = find_best(json.loads(TARGET.read_text()))
    source = find_data("checkpoints") / best["checkpoint"]
    settings = best["sampler"], best["steps"], best["unguided"]
    calls = {"diffusers, Flax": time_flax(source), "this model": time_ours(source, *USUAL)}
    calls["this model, best settings"] = time_ours(source, *settings)
    with tempfile.TemporaryDirectory() as folder:
        worker = None
        if PYTORCH.exists():
            write_for_pytorch(source, Path(folder))
            command = [PYTORCH, "-m", "benchmarks.draw_with_pytorch", folder, str(BATCH)]
            # Threads that wait busily take the cores from whatever else runs on the machine.
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "passive"}
            worker = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            asked = {"diffusers, PyTorch": USUAL[:2], "diffusers, PyTorch, best sampler and steps": settings[:2]}
        seconds = {}
        for _ in range(1 + ROUNDS):  # the first call compiles
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                seconds.setdefault(name, []).append(time.perf_counter() - start)
            for name, what in asked.items() if worker else ():
                print(*what, file=worker.stdin, flush=True)
                seconds.setdefault(name, []).append(float(worker.stdout.readline()))
        if worker:
            worker.stdin.close()
            worker.wait()
    per_second = {name: BATCH / statistics.median(times[1:]) for name, times in seconds.items()}
    content = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions("jax", "jaxlib", "flax", "diffusers", "transformers"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "checkpoint": best["checkpoint"],
        "batch": BATCH,
        "best": best,
        "seconds": {name: [round(t, 4) for t in times[1:]] for name, times in seconds.items()},
        "images in a second": {name: round(rate, 2) for name, rate in per_second.items()},
    }
    if worker:
        script = "import torch, diffusers; print(torch.__version__, diffusers.__version__)"
        found = subprocess.run([PYTORCH, "-c", script], capture_output=True, text=True, check=True).stdout.split()
        content["versions of PyTorch"] = dict(zip(("torch", "diffusers"), found, strict=True))
    write_json(ROOT / "benchmarks" / "cpu.json", content)
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    sys.exit(main())
