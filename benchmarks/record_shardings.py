"""Record what chips compute and exchange if Stable Diffusion XL is split over them: ``benchmarks/shardings.json``.

The TPU compiler answers for four v5e chips, from shapes alone: for the parameters of the whole pipeline, for one of
its transformer blocks, and for the collectives of a whole pipeline for the bundled one. That takes a few minutes.
"""

import copy
import dataclasses
import datetime
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers
from diffusers.models.attention_flax import FlaxBasicTransformerBlock
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.collectives import find_collectives
from course.shardings import split_guidance, split_pairs
from course.tpu import find_chip, tpu_devices
from course.tpu.compiler import versions, write_json
from course.tpu.pipelines import load_shapes

TARGET = Path(__file__).with_name("shardings.json")
CHIP, CHIPS = "v5e", 4
# Bytes in a second that a link to a neighbour carries each way: 400 GB/s for both ways of a chip's four links together
# (docs.cloud.google.com/tpu/docs/v5e), and 5e10 in the table of jax-ml.github.io/scaling-book/tpus.
LINK = 400e9 / 4 / 2


def make_mesh(devices: list, columns: int, name: str = "model") -> Mesh:
    """A mesh of rows, each of so many chips; each row has images of its own."""
    return Mesh(np.array(devices).reshape(-1, columns), ("data", name))


def placed(shapes, shardings):
    """Shapes with a sharding for each."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings
    )


def placed_alike(shapes, mesh: Mesh, spec: P):
    """Shapes with the same sharding for all."""
    return placed(shapes, jax.tree.map(lambda _: NamedSharding(mesh, spec), shapes))


def parameter_bytes(params, mesh: Mesh) -> int:
    """Bytes that parameters take on each device, by the compiler: with what its layouts add to fill up tiles."""
    takes_all = jax.jit(lambda params: jnp.zeros(()), keep_unused=True)
    compiled = takes_all.lower(placed(params, split_pairs(params, mesh))).compile()
    return compiled.memory_analysis().argument_size_in_bytes


def answer_of(lowered: jax.stages.Lowered) -> dict:
    """What each chip computes, and the collectives, by the compiler."""
    compiled = lowered.compile()
    collectives = [dataclasses.asdict(collective) for collective in find_collectives(compiled)]
    return {"flops": compiled.cost_analysis()["flops"], "collectives": collectives}


def compile_block(config, mesh: Mesh, by_guidance: bool = False) -> dict:
    """Compile a block of the UNet's lowest level, with an image for each row of the mesh.

    The chips of a row share the block's parameters; or, by guidance, each has all of them and half of the batch.
    """
    channels, heads = config.block_out_channels[-1], config.attention_head_dim[-1]
    block = FlaxBasicTransformerBlock(channels, heads, channels // heads, split_head_dim=True, dtype=jnp.bfloat16)
    split = NamedSharding(mesh, P(mesh.axis_names) if by_guidance else P("data"))
    side = config.sample_size // 2 ** (len(config.block_out_channels) - 1)
    pairs = 2 * mesh.shape["data"]  # guidance: without the prompt, and with it
    states = jax.ShapeDtypeStruct((pairs, side * side, channels), jnp.bfloat16, sharding=split)
    context = jax.ShapeDtypeStruct((pairs, 77, config.cross_attention_dim), jnp.bfloat16, sharding=split)
    params = jax.eval_shape(block.init, jax.random.key(0), states, context)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), params)
    params = placed_alike(params, mesh, P()) if by_guidance else placed(params, split_pairs(params, mesh))
    return answer_of(jax.jit(block.apply, out_shardings=split).lower(params, states, context))


def compile_guidance(devices: list) -> dict:
    """Compile the bundled pipeline with one half of guidance on each of two chips, as chapter 9 does."""
    pipeline, params, *_ = load_shapes("shapes-sd")
    mesh = make_mesh(devices, 2, "half")
    by_halves = copy.copy(pipeline)
    by_halves.unet = split_guidance(pipeline.unet, "half")
    pixels = 8 * pipeline.unet.config.sample_size

    def draw(prompt_ids, params, keys, guidance_scale):
        return by_halves._generate(prompt_ids, params, keys[0], 20, pixels, pixels, guidance_scale)

    rows = mesh.shape["data"]
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    arguments = (jax.ShapeDtypeStruct((rows, 77), jnp.int32), params, keys, scale)
    specs = (P("data"), P(), P("data"), P())
    mapped = jax.jit(jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False))
    return answer_of(mapped.lower(*(placed_alike(a, mesh, spec) for a, spec in zip(arguments, specs, strict=True))))


def main() -> None:
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    devices = tpu_devices(CHIP, CHIPS)
    pipeline, params, *_ = load_shapes("sdxl")
    config = pipeline.unet.config
    # Down and up there are layers_per_block and one more of these, and one in the middle.
    blocks = (2 * config.layers_per_block + 2) * config.transformer_layers_per_block[-1]
    meshes = {size: make_mesh(devices, size) for size in (1, 2, 4)}
    found = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "work": {"pipeline": "sdxl", "dtype": "bfloat16", "blocks": blocks, "latents": config.sample_size},
        "chip": {"name": CHIP, "peak": find_chip(CHIP).peak, "link": LINK},
        "parameters": {str(size): parameter_bytes(params, mesh) for size, mesh in meshes.items()},
        "block": {str(size): compile_block(config, mesh) for size, mesh in meshes.items()},
        "block by guidance": compile_block(config, meshes[2], by_guidance=True),
        "pipeline by guidance": compile_guidance(devices),
    }
    write_json(TARGET, found)


if __name__ == "__main__":
    main()
