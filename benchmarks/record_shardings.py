"""Record what chips compute and exchange if Stable Diffusion XL is split over them.

The TPU compiler answers for four v5e chips, from shapes alone: for the parameters of the whole
pipeline, for one of its transformer blocks, and for the collectives of a whole pipeline for the
bundled one. That takes a few minutes, and goes into ``benchmarks/shardings.json``, which chapter 9
shows.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.common import FOLDER, origin, write_json
from course.shardings import split_guidance, split_pairs
from course.tpu import Report, ask_compiler, find_chip, tpu_devices
from helpers import quiet_warnings

TARGET = FOLDER / "shardings.json"
CHIP = "v5e"
CHIPS = 4
# Bytes in a second that a link to a neighbour carries each way: 400 GB/s for both ways of a chip's
# four links together (docs.cloud.google.com/tpu/docs/v5e), and 5e10 in the table of
# jax-ml.github.io/scaling-book/tpus.
LINK = 400e9 / 4 / 2


def make_mesh(columns: int, name: str = "model") -> Mesh:
    """A mesh of rows, each of so many chips; each row has images of its own."""
    devices = np.array(tpu_devices(CHIP, CHIPS))
    return Mesh(devices.reshape(-1, columns), ("data", name))


def placed(shapes, shardings):
    """Shapes with a sharding for each."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def placed_alike(shapes, mesh: Mesh, spec: P):
    """Shapes with the same sharding for all."""
    return placed(shapes, jax.tree.map(lambda _: NamedSharding(mesh, spec), shapes))


def count_parameters(params, mesh: Mesh) -> int:
    """Bytes that parameters take on each device, with what the compiler's layouts add.

    They fill up tiles. A program that reads none of its arguments keeps them all the same.
    """
    reads_none = jax.jit(lambda params: jnp.zeros(()), keep_unused=True)
    report = ask_compiler(reads_none, placed(params, split_pairs(params, mesh)), chip=CHIP)
    return report.memory.arguments


def answer_of(report: Report) -> dict:
    """What each chip computes, and the collectives."""
    collectives = [dataclasses.asdict(collective) for collective in report.collectives]
    return {"flops": report.work.flops, "collectives": collectives}


def ask_about_block(config, mesh: Mesh, by_guidance: bool = False) -> dict:
    """Ask about a block of the UNet's lowest level, with an image for each row of the mesh.

    The chips of a row share the block's parameters; or, by guidance, each has all of them and half
    of the batch.
    """
    from diffusers.models.attention_flax import FlaxBasicTransformerBlock

    channels = config.block_out_channels[-1]
    heads = config.attention_head_dim[-1]
    block = FlaxBasicTransformerBlock(
        channels, heads, channels // heads, split_head_dim=True, dtype=jnp.bfloat16
    )
    split = NamedSharding(mesh, P(mesh.axis_names) if by_guidance else P("data"))
    side = config.sample_size // 2 ** (len(config.block_out_channels) - 1)
    batch = 2 * mesh.shape["data"]  # guidance: without the prompt, and with it
    states = jax.ShapeDtypeStruct((batch, side * side, channels), jnp.bfloat16, sharding=split)
    context = jax.ShapeDtypeStruct(
        (batch, 77, config.cross_attention_dim), jnp.bfloat16, sharding=split
    )
    params = jax.eval_shape(block.init, jax.random.key(0), states, context)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    if by_guidance:
        params = placed_alike(params, mesh, P())
    else:
        params = placed(params, split_pairs(params, mesh))
    apply = jax.jit(block.apply, out_shardings=split)
    return answer_of(ask_compiler(apply, params, states, context, chip=CHIP))


def ask_about_guidance(pipeline, params) -> dict:
    """Ask about a pipeline with one half of guidance on each of two chips, as in chapter 9."""
    mesh = make_mesh(2, "half")
    by_halves = copy.copy(pipeline)
    by_halves.unet = split_guidance(pipeline.unet, "half")
    pixels = 8 * pipeline.unet.config.sample_size

    def draw(prompt_ids, params, keys, guidance_scale):
        return by_halves._generate(prompt_ids, params, keys[0], 20, pixels, pixels, guidance_scale)

    rows = mesh.shape["data"]
    prompt_ids = jax.ShapeDtypeStruct((rows, 77), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    guidance_scale = jax.ShapeDtypeStruct((), jnp.float32)
    specs = (P("data"), P(), P("data"), P())
    mapped = jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)
    arguments = [
        placed_alike(argument, mesh, spec)
        for argument, spec in zip((prompt_ids, params, keys, guidance_scale), specs, strict=True)
    ]
    return answer_of(ask_compiler(mapped, *arguments, chip=CHIP))


def main() -> None:
    quiet_warnings()
    from course.tpu.pipelines import load_shapes

    jax.config.update("jax_platforms", "cpu")
    pipeline, params = load_shapes("sdxl")
    config = pipeline.unet.config
    # Down and up there are layers_per_block and one more of these, and one in the middle.
    blocks = (2 * config.layers_per_block + 2) * config.transformer_layers_per_block[-1]
    parameters = {}
    block = {}
    for columns in (1, 2, 4):
        mesh = make_mesh(columns)
        parameters[str(columns)] = count_parameters(params, mesh)
        block[str(columns)] = ask_about_block(config, mesh)
    found = origin() | {
        "work": {
            "pipeline": "sdxl",
            "dtype": "bfloat16",
            "blocks": blocks,
            "latents": config.sample_size,
        },
        "chip": {"name": CHIP, "peak": find_chip(CHIP).peak, "link": LINK},
        "parameters": parameters,
        "block": block,
        "block by guidance": ask_about_block(config, make_mesh(2), by_guidance=True),
        "pipeline by guidance": ask_about_guidance(*load_shapes("shapes-sd")),
    }
    write_json(TARGET, found)


if __name__ == "__main__":
    main()
