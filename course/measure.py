"""Run the model on the hardware that is here, and write down how long it took: ``python -m course.measure``.

The time does not depend on what the weights are, so those of a real model are made up, and nothing is downloaded. The
files in ``benchmarks/measured`` come from this command; chapter 12 shows each beside what the TPU compiler says.
"""

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import stable_diffusion
from course.tpu.chips import CHIPS
from course.tpu.compiler import from_json, versions, write_json
from course.tpu.model import Drawing, find_recorded, load_config
from helpers.places import find_data


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program that ran: what, where, and how long it took."""

    model: str  #: ``sd``, ``sdxl``, or a bundled checkpoint
    attention: str  #: a name from ``stable_diffusion.ATTENTION``
    batch: int  #: images at a time, on one device
    height: int  #: of an image, in pixels
    width: int  #: likewise
    steps: int
    dtype: str  #: of parameters and computation
    platform: str  #: ``tpu``, ``gpu`` or ``cpu``
    device_kind: str  #: as JAX names it
    versions: dict[str, str]
    date: str
    compile_seconds: float
    seconds: tuple[float, ...]  #: of each later call, from token ids to images
    bound: float | None = None  #: seconds, of the recorded answers for this chip; None if nobody asked
    estimate: float | None = None  #: likewise

    @property
    def steady(self) -> float:
        """Median of the calls, in seconds."""
        return statistics.median(self.seconds)


def make_up(config: stable_diffusion.Config, dtype) -> dict:
    """Parameters of the right shapes, made of small random numbers. (Of zeros, chips may be faster.)"""
    shapes, random = stable_diffusion.parameter_shapes(config, dtype), np.random.default_rng(0)
    return jax.tree.map(lambda of: jnp.asarray(random.standard_normal(of.shape, np.float32) * 0.02, dtype), shapes)


def measure(model="shapes-sd", steps=20, batch=1, attention="auto", height=None, width=None, calls=5) -> Measured:
    """Compile ``stable_diffusion.generate`` for one device, call it, and say how long that took.

    Raises
    ------
    ValueError
        If there is no such model, or a size, a number of steps or an attention is impossible.
    """
    for name, value in {"steps": steps, "batch": batch, "calls": calls}.items():
        if value < 1:
            raise ValueError(f"{name} is {value}: give at least 1.")
    device, config = jax.devices()[0], load_config(model)
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    usual = config.unet.sample_size * config.pixels_per_latent
    height, width = height or usual, width or usual
    params = make_up(config, dtype)
    ids = jnp.zeros((batch, len(config.text), config.text[0].max_position_embeddings), jnp.int32)
    draw = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    inputs, static = (ids, jax.random.key(0), ids[:1], steps), {"height": height, "width": width}
    start = time.perf_counter()
    compiled = draw.lower(params, config, *inputs, attention=attention, **static).compile()
    compile_seconds, seconds = time.perf_counter() - start, []
    for _ in range(1 + calls):
        start = time.perf_counter()
        compiled(params, *inputs).block_until_ready()
        seconds.append(time.perf_counter() - start)
    chip = next((name for name, kind in CHIPS.items() if device.device_kind in kind.device_kinds), "")
    times = find_recorded(Drawing(model, attention, chip, batch, height, width, steps))
    return Measured(
        model, attention, batch, height, width, steps, jnp.dtype(dtype).name, device.platform, device.device_kind,
        versions("jax", "jaxlib", "libtpu"),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        round(compile_seconds, 1), tuple(round(second, 4) for second in seconds[1:]),
        *((times.bound, times.estimate) if times else (None, None)),
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m course.measure", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="shapes-sd", help="sd, sdxl or a bundled checkpoint (%(default)s)")
    for name, default in {"steps": 20, "batch": 1, "calls": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="by default %(default)s")
    for name in ("height", "width"):
        parser.add_argument(f"--{name}", type=int, help="in pixels; by default what the model was trained for")
    parser.add_argument("--attention", default="auto", help=", ".join(stable_diffusion.ATTENTION))
    parser.add_argument("--to", type=Path, default=Path(), help="the folder to write the file into (the current one)")
    options = vars(parser.parse_args(arguments))
    folder = options.pop("to")
    try:
        found = measure(**options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    name = f"{found.model}-{found.device_kind}-{found.attention}-{found.date}".replace(" ", "-").lower()
    write_json(folder / f"{name}.json", dataclasses.asdict(found))
    print(f"{found.model}, {found.steps} steps, batch {found.batch}, on {found.device_kind}: {found.steady:.3g} s.")
    print(f"Written to {folder / name}.json. A pull request that adds it to benchmarks/measured is welcome.")
    return 0


def measured_runs() -> list[Measured]:
    """What is in ``benchmarks/measured``."""
    files = sorted(find_data("benchmarks/measured").glob("*.json"))
    return [from_json(Measured, json.loads(file.read_text())) for file in files]


if __name__ == "__main__":
    sys.exit(main())
