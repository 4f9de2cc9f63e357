"""Record what chips hold, compute and exchange in a step of Stable Diffusion XL, by its sharding.

The TPU compiler answers for eight v5e chips, from shapes alone, at 1024 × 1024 pixels in bfloat16,
for one whole step of denoising, with the work split in different ways. Each takes two to five
minutes on two cores. It goes into ``benchmarks/shardings.json``, which chapter 9 shows. What is
recorded is left out: delete the file to ask anew.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import FOLDER, make_parser, read_json, work_through, write_json
from course.sd import (
    DATA_PARALLEL,
    FULLY_SHARDED,
    TENSOR_PARALLEL,
    denoise_step,
    encode_condition,
    parameter_shapes,
    shardings,
)
from course.sd.unet import Condition
from course.tpu import ask_compiler, tpu_devices
from course.tpu.hlo import Collective
from course.tpu.pieces import load_config
from course.tpu.records import Exchange
from helpers import quiet_warnings

TARGET = FOLDER / "shardings.json"
MODEL = "sdxl"
CHIP = "v5e"


class Way(NamedTuple):
    """How the work is split."""

    mesh: dict[str, int]  # the sizes of its axes
    rules: dict[str, str]  # for the parameters
    latents: P
    images: int  # drawn at a time by all chips together


WAYS = {
    "data": Way({"data": 8}, DATA_PARALLEL, P("data"), images=8),
    # XL has 10 and 20 heads, which neither 4 nor 8 divide: so two chips share an image.
    "tensor": Way({"data": 4, "model": 2}, TENSOR_PARALLEL, P("data"), images=4),
    "fully sharded": Way({"data": 8}, FULLY_SHARDED, P("data"), images=8),
    "sequence": Way({"rows": 8}, DATA_PARALLEL, P(None, "rows"), images=1),
}


def make_mesh(way: Way) -> Mesh:
    """A mesh of chips that are not there."""
    return Mesh(np.array(tpu_devices(CHIP, 8)).reshape(*way.mesh.values()), tuple(way.mesh))


def place(shapes, sharding):
    """Shapes with a sharding for all of them, or a tree with one for each."""
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, shapes)
    return jax.tree.map(lambda shape, where: shape.update(sharding=where), shapes, sharding)


def place_step(way: Way) -> tuple:
    """A mesh, a step of denoising, and its arguments: shapes that say where they lie."""
    mesh = make_mesh(way)
    config = load_config(MODEL)
    side = config.unet.sample_size
    pixels = config.pixels_per_latent * side
    params = parameter_shapes(config, jnp.bfloat16)
    tokens = config.text[0].max_position_embeddings
    ids = jax.ShapeDtypeStruct((way.images, len(config.text), tokens), jnp.int32)
    encode = functools.partial(encode_condition, config=config, height=pixels, width=pixels)
    condition = jax.eval_shape(lambda p, ids: encode(p, ids=ids, negative_ids=ids), params, ids)

    def where(*spec):
        return NamedSharding(mesh, P(*spec))

    batch = way.latents[0]  # the axis over which images are split; None if there is but one
    heads = "model" if "model" in way.mesh else None
    condition = Condition(
        place(condition.words, where(None, batch, None, heads)),
        place(condition.whole, where(batch)),
    )
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=where())
    latents = jax.ShapeDtypeStruct((way.images, side, side, config.unet.in_channels), jnp.float32)

    # The compiler does not split a kernel, so attention is the plain one.
    def step(p, latents, timestep, condition, guidance):
        p = {"unet": p}
        return denoise_step(p, config, latents, timestep, condition, guidance, attention="plain")

    function = jax.jit(step, out_shardings=where(*way.latents))
    params = place(params["unet"], shardings(config, mesh, way.rules)["unet"])
    return mesh, function, (params, place(latents, where(*way.latents)), number, condition, number)


def count_parameters(way: Way) -> int:
    """Bytes of the UNet's parameters on each chip."""
    config = load_config(MODEL)
    total = 0
    placed = shardings(config, make_mesh(way), way.rules)["unet"]
    for name, shape in parameter_shapes(config, jnp.bfloat16)["unet"].items():
        total += math.prod(placed[name].shard_shape(shape.shape)) * shape.dtype.itemsize
    return total


def add_up(collectives: Iterable[Collective]) -> list[dict]:
    """What devices exchange by each kind of collective, with how often a loop goes round."""
    found = {}
    for each in collectives:
        before = found.get((each.kind, each.is_async), Exchange(each.kind, each.is_async, 0, 0, 0))
        found[each.kind, each.is_async] = Exchange(
            each.kind,
            each.is_async,
            number=before.number + 1,
            runs=before.runs + each.runs,
            bytes=before.bytes + each.runs * each.bytes,
        )
    return [dataclasses.asdict(exchange) for exchange in found.values()]


def record(name: str) -> None:
    """Ask about a step, split in one way, and write down the answer."""
    way = WAYS[name]
    mesh, function, arguments = place_step(way)
    with jax.set_mesh(mesh):
        report = ask_compiler(function, *arguments, chip=CHIP)
    exchanges = add_up(report.collectives)
    report = dataclasses.replace(report, collectives=(), copies=None, text="")
    found = read_json(TARGET, {})  # read again: another recorder may have written to it
    found[name] = {
        "mesh": way.mesh,
        "images": way.images,
        "parameters": count_parameters(way),
        "report": dataclasses.asdict(report),
        "exchanges": exchanges,
    }
    write_json(TARGET, found)


def find_left() -> dict:
    """The ways that are not recorded yet, and what records each."""
    recorded = read_json(TARGET, {})
    return {name: functools.partial(record, name) for name in WAYS if name not in recorded}


def main() -> int:
    options = make_parser(__doc__).parse_args()
    quiet_warnings()
    jax.config.update("jax_platforms", "cpu")
    return work_through(find_left, options)


if __name__ == "__main__":
    sys.exit(main())
