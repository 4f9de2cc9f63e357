"""How long a step of the small FLUX.2's trainings takes on this machine's CPU.

``score/trainings`` names the trainings, which may have run elsewhere. The data is random, since
time does not depend on it.
"""

import time
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from course.flux2.configs import TransformerConfig
from course.flux2.tokenizer import Tokenizer
from lab.record import read_rows
from lab.train import data, flow, loop
from lab.train.tokenizers import QWEN_LENGTH, learn_qwen

STEPS = 10


def questions(rows: list[dict]) -> list[dict]:
    return [row["question"] for row in read_rows("score/trainings")]


def answer(transformer: dict, batch: int) -> dict:
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in transformer.items()}
    sizes = TransformerConfig(**values)
    task = flow.make_task(
        replace(flow.RECIPE, batch=batch, edits=batch // 8),
        replace(flow.CONFIG, transformer=sizes),
    )
    step = loop.make_step(task)
    state = loop.initial_state(task)
    arrays = random_data(sizes.in_channels)
    seconds, cpu_seconds = [], []
    for number in range(3 + STEPS):
        started, cpu = time.perf_counter(), time.process_time()
        state, loss = step(state, number, arrays)
        loss.block_until_ready()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu)
    return {
        "seconds": round(float(np.median(seconds[3:])), 3),
        "cpu_seconds": round(float(np.median(cpu_seconds[3:])), 3),
    }


def random_data(channels: int) -> dict:
    """Return what a training reads."""
    rng = np.random.default_rng(0)
    count = 1_000
    tokens = jnp.float16(rng.normal(size=(count, 16, channels)))
    attributes = jnp.zeros((count, len(data.OPTIONS)), jnp.int32)
    ids, mask = Tokenizer(learn_qwen(), QWEN_LENGTH)(data.all_captions())
    return {
        "tokens": tokens,
        "attributes": attributes,
        "before": tokens,
        "after": tokens,
        "afterwards": attributes,
        "changed": jnp.zeros(count, jnp.int32),
        "ids": jnp.asarray(ids),
        "mask": jnp.asarray(mask),
    }
