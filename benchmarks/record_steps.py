"""Record how many held-out captions a bundled checkpoint draws right in how many steps: ``benchmarks/steps.json``.

The judge of ``training`` decides. Picture ``k`` starts from the noise of ``jax.random.key(k)``, and none is dropped.
What is recorded is left out; all of it takes about ten minutes on 2 cores.
"""

import datetime
import json
import sys
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import stable_diffusion
from course.tpu.compiler import versions, write_json
from helpers import find_data
from stable_diffusion.samplers import SAMPLERS
from training import fidelity, scenes

TARGET = Path(__file__).with_name("steps.json")
PICTURES, BATCH, GUIDANCE = 96, 32, 3.0
MANY = (2, 4, 6, 8, 10, 12, 15, 20, 30)
STEPS = {
    ("shapes-sd", "ddim"): MANY,
    ("shapes-sd", "dpm++"): MANY,
    ("shapes-sd-bf16", "ddim"): (15, 30),
    ("shapes-sdxl", "euler"): (8, 15, 30),
}
# Of the last steps, how many have no guidance: for each of shapes-sd's samplers with this many steps.
UNGUIDED = {("ddim", 30): (6, 12, 15, 18, 21, 24, 27, 30), ("dpm++", 10): (2, 3, 4, 5, 6, 7, 8, 9, 10)}
UNGUIDED[("ddim", 8)] = (1, 2, 3, 4, 5, 6, 7, 8)


def settings() -> list[dict]:
    """What to draw with: checkpoint, sampler, steps, and how many of the last steps have no guidance."""
    names = ("checkpoint", "sampler", "steps", "unguided")
    found = [(*pair, steps, 0) for pair, numbers in STEPS.items() for steps in numbers]
    found += [("shapes-sd", *pair, last) for pair, numbers in UNGUIDED.items() for last in numbers]
    return [dict(zip(names, values, strict=True)) for values in found]


def find_threshold(schedule, sampler: str, steps: int, unguided: int) -> float:
    """The timestep below which no step but the last so many is."""
    if unguided == steps:
        return float(schedule.num_train_timesteps)
    return float(SAMPLERS[sampler].point(schedule, jnp.int32(steps), jnp.int32(steps - unguided - 1)).timestep)


def find_best(record: dict) -> dict:
    """shapes-sd's setting with the least work, of those that score within one point of 30 steps of its own DDIM."""
    rows, pictures = [row for row in record["rows"] if row["checkpoint"] == "shapes-sd"], record["pictures"]
    own = next(row for row in rows if (row["sampler"], row["steps"], row["unguided"]) == ("ddim", 30, 0))
    equal = [row for row in rows if own["right"] - row["right"] <= 0.01 * pictures]
    return min(equal, key=lambda row: 2 * row["steps"] - row["unguided"])  # how often the UNet computes an image


@cache
def load(checkpoint: str) -> tuple:
    dtype = jnp.bfloat16 if checkpoint.endswith("bf16") else jnp.float32
    return stable_diffusion.load(find_data("checkpoints") / checkpoint, dtype)


def main() -> None:
    draw = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    asked, keys = scenes.held_out_captions(PICTURES), jax.vmap(jax.random.key)(jnp.arange(PICTURES))
    rows = json.loads(TARGET.read_text())["rows"] if TARGET.exists() else []
    for setting in settings():
        if any(setting.items() <= row.items() for row in rows):
            continue
        checkpoint, sampler, steps, unguided = setting.values()
        params, config, tokenize = load(checkpoint)
        ids, empty = tokenize([scenes.caption(**named) for named in asked]), tokenize([""])
        below = find_threshold(config.schedule, sampler, steps, unguided) if unguided else None
        images = np.concatenate([
            draw(params, config, ids[k : k + BATCH], keys[k : k + BATCH], empty, steps, GUIDANCE,
                 sampler=sampler, unguided_below=below)
            for k in range(0, PICTURES, BATCH)
        ])  # fmt: skip
        images = np.float32(images)
        answers = (fidelity.right_attributes(n, fidelity.read(i)) for n, i in zip(asked, images, strict=True))
        rows.append(setting | {"right": sum(all(answer.values()) for answer in answers)})
        print(rows[-1], flush=True)
        content = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions("jax", "jaxlib", "numpy", "scipy"),
            "pictures": PICTURES, "guidance": GUIDANCE, "rows": rows,
        }  # fmt: skip
        write_json(TARGET, content)


if __name__ == "__main__":
    sys.exit(main())
