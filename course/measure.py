"""Run the model on the hardware that is here, and write down how long it took.

``python -m course.measure`` starts it. The time does not depend on what the weights are, so those
of a real model are made up, and nothing is downloaded. The files in ``lab/records/measured`` come
from this command; chapter 12 shows each beside what the TPU compiler says.
"""

import argparse
import dataclasses
import datetime
import json
import re
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course import sd
from course.commands import check_writable, make_parser, run
from course.model.attention import find_attention
from course.model.files import write_bytes
from course.tpu.chips import CHIPS
from course.tpu.compiler import versions
from course.tpu.pieces import take_piece
from course.tpu.programs import WHOLE, make_program
from course.tpu.records import recorded_times
from helpers.places import find_data

MOST_CALLS = 10_000


@dataclasses.dataclass(frozen=True)
class Measured:
    """A program that ran: what, where, and how long it took."""

    model: str  #: as ``course.tpu.programs.Program`` has it
    attention: str  #: a name from ``course.sd.ATTENTION``
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
    bound: float | None = None  #: seconds, by the recorded answers for this chip; None without any
    mfu: float | None = None  #: model FLOPs utilization, by the same answers

    @property
    def steady(self) -> float:
        """Return the median of the calls, in seconds."""
        return statistics.median(self.seconds)


def make_up(shapes: tuple, steps: int) -> tuple:
    """Return arguments of the right shapes, made of a million small random numbers in turn.

    Of zeros, chips may be faster. Token ids are zeros, and a whole number alone is that of steps.
    """
    pool = 0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)

    def draw(shape: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.asarray(np.resize(pool, shape.shape), shape.dtype)
        return jnp.full(shape.shape, 0 if shape.shape else steps, shape.dtype)

    return jax.tree.map(draw, shapes)


def find_chip_name(device: jax.Device) -> str:
    """Return the key of ``CHIPS`` for a device; empty if it is none of these."""
    for name, kind in CHIPS.items():
        if device.device_kind in kind.device_kinds:
            return name
    return ""


def measure(
    model: str = "shapes-sd",
    steps: int | None = None,
    batch: int = 1,
    attention: str = "automatic",
    height: int | None = None,
    width: int | None = None,
    calls: int = 5,
) -> Measured:
    """Compile a model's ``generate`` for one device, call it, and say how long that took.

    Raises
    ------
    ValueError
        If there is no such model, or a size, a number of steps or an attention is impossible.
    """
    if not 1 <= calls <= MOST_CALLS:
        raise ValueError(f"calls is {calls}: give at least 1, and at most {MOST_CALLS}.")
    find_attention(attention)  # which raises ValueError, too
    device = jax.devices()[0]
    dtype = jnp.float32 if device.platform == "cpu" else jnp.bfloat16
    program = make_program(
        model,
        find_chip_name(device),
        batch=batch,
        height=height,
        width=width,
        steps=steps,
        dtype=jnp.dtype(dtype).name,
        attention=attention,
    )
    piece = take_piece(program, WHOLE)
    arguments = make_up(piece.arguments, program.steps)
    start = time.perf_counter()
    compiled = jax.jit(piece.function).lower(*arguments).compile()
    compile_seconds = time.perf_counter() - start
    seconds = []
    for _ in range(1 + calls):
        start = time.perf_counter()
        compiled(*arguments).block_until_ready()
        seconds.append(round(time.perf_counter() - start, 4))
    times = recorded_times(program)
    steady = statistics.median(seconds[1:])
    return Measured(
        model=model,
        attention=attention,
        batch=batch,
        height=program.height,
        width=program.width,
        steps=program.steps,
        dtype=program.dtype,
        platform=device.platform,
        device_kind=device.device_kind,
        versions=versions("jax", "jaxlib", "libtpu"),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        compile_seconds=round(compile_seconds, 1),
        seconds=tuple(seconds[1:]),
        bound=times.bound if times else None,
        mfu=times.utilization(steady) if times else None,
    )


def read_measured(file: Path) -> Measured:
    """Read a file of ``lab/records/measured``; a TypeError if its fields are not these."""
    content = json.loads(file.read_text(encoding="utf-8"))
    content["seconds"] = tuple(content["seconds"])
    return Measured(**content)


def measured_runs() -> list[Measured]:
    """Read what is in ``lab/records/measured``."""
    files = sorted(find_data("lab/records/measured").glob("*.json"))
    return [read_measured(file) for file in files]


def file_name(measured: Measured) -> str:
    """Return what the file of a measurement is called; of a model's path, its last name counts."""
    name = f"{Path(measured.model).name}-{measured.device_kind}-{measured.attention}"
    return f"{re.sub(r'[^a-z0-9.]+', '-', name.lower())}-{measured.date}.json"


def write_measured(options: argparse.Namespace) -> None:
    """Do what the command does."""
    choices = vars(options)
    to = choices.pop("to")
    is_file = to.suffix == ".json" and not to.is_dir()
    folder = to.parent if is_file else to
    check_writable(folder)
    measured = measure(**choices)
    file = to if is_file else folder / file_name(measured)
    content = json.dumps(dataclasses.asdict(measured), indent=1) + "\n"
    try:
        write_bytes(file, content.encode())
    except OSError:  # what was measured must not be lost
        print(content)
        raise
    print(
        f"{measured.model}, {measured.steps} steps, batch {measured.batch}, on "
        f"{measured.device_kind}: {measured.steady:.3g} s."
    )
    print(f"Written to {file}. A pull request that adds it to lab/records/measured is welcome.")


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("course.measure", __doc__)
    parser.add_argument(
        "model",
        nargs="?",
        default="shapes-sd",
        help="sd, sdxl, flux2, a bundled checkpoint, a folder or a Hub id (%(default)s)",
    )
    parser.add_argument("--steps", type=int, help="by default 50, or 4 of a distilled model")
    for name, default in {"batch": 1, "calls": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="by default %(default)s")
    for name in ("height", "width"):
        parser.add_argument(f"--{name}", type=int, help="in pixels; by default as in training")
    parser.add_argument("--attention", default="automatic", help=", ".join(sd.ATTENTION))
    parser.add_argument(
        "--to",
        type=Path,
        default=Path(),
        help="the folder for the file (this one), or NAME.json",
    )
    return run(parser, write_measured, arguments)


if __name__ == "__main__":
    sys.exit(main())
