"""Record what Stable Diffusion XL needs on each chip when its parameters are split: ``benchmarks/shardings.json``.

The TPU compiler answers for four v5e chips, from shapes alone. A transformer block takes it seconds; the whole
pipeline, for each number of chips given on the command line, a quarter of an hour on 2 cores or more. Each answer is
written as soon as it is there.
"""

import argparse
import ast
import datetime
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers
from diffusers.models.attention_flax import FlaxBasicTransformerBlock
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import tpu
from helpers.tpu.compiler import versions, write_json

TARGET = Path(__file__).with_name("shardings.json")
CHAPTER = Path(__file__).parents[1] / "notebooks" / "09_shardings.ipynb"
CHIP, CHIPS, PIXELS, STEPS = "v5e", 4, 1024, 20


def from_chapter(*names: str) -> list:
    """Functions as chapter 9 defines them, so that what is recorded is what it shows."""
    known = {"jax": jax, "re": re, "Counter": Counter, "NamedSharding": NamedSharding, "P": P}
    for cell in json.loads(CHAPTER.read_text())["cells"]:
        body = ast.parse("".join(cell["source"])).body if cell["cell_type"] == "code" else []
        chosen = [node for node in body if isinstance(node, ast.FunctionDef) and node.name in names]
        exec(compile(ast.Module(chosen, []), str(CHAPTER), "exec"), known)
    return [known[name] for name in names]


def make_mesh(devices: list, model: int) -> Mesh:
    return Mesh(np.array(devices).reshape(-1, model), ("data", "model"))


split_pairs, count_collectives = from_chapter("split_pairs", "count_collectives")


def placed(shapes, shardings):
    """Shapes with a sharding for each."""
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes, shardings
    )


def parameter_bytes(params, mesh: Mesh) -> int:
    """Bytes that parameters take on each device, by the compiler: with what its layouts add to fill up tiles."""
    takes_all = jax.jit(lambda params: jnp.zeros(()), keep_unused=True)
    compiled = takes_all.lower(placed(params, split_pairs(params, mesh))).compile()
    return compiled.memory_analysis().argument_size_in_bytes


def answer_of(lowered: jax.stages.Lowered) -> dict:
    """What a chip holds, in bytes, and does, and the collectives, by the compiler."""
    start = time.monotonic()
    compiled = lowered.compile()
    return {
        "arguments": compiled.memory_analysis().argument_size_in_bytes,
        "flops": compiled.cost_analysis()["flops"],
        "collectives": count_collectives(compiled),
        "compile_seconds": round(time.monotonic() - start),
    }


def compile_block(config, mesh: Mesh) -> dict:
    """Compile a block of the UNet's lowest level, with a picture for each row of the mesh."""
    channels, heads = config.block_out_channels[-1], config.attention_head_dim[-1]
    block = FlaxBasicTransformerBlock(channels, heads, channels // heads, split_head_dim=True, dtype=jnp.bfloat16)
    split = NamedSharding(mesh, P("data"))
    side = config.sample_size // 2 ** (len(config.block_out_channels) - 1)
    pairs = 2 * mesh.shape["data"]  # guidance: with the prompt, and without
    states = jax.ShapeDtypeStruct((pairs, side * side, channels), jnp.bfloat16, sharding=split)
    context = jax.ShapeDtypeStruct((pairs, 77, config.cross_attention_dim), jnp.bfloat16, sharding=split)
    params = jax.eval_shape(block.init, jax.random.key(0), states, context)
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), params)
    params = placed(params, split_pairs(params, mesh))
    return answer_of(jax.jit(block.apply, out_shardings=split).lower(params, states, context))


def compile_split(pipeline, params, mesh: Mesh) -> dict:
    """Compile ``_generate`` with a picture for each row of the mesh."""
    rows = mesh.shape["data"]
    split, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    def draw(prompt_ids, negative_ids, params, keys, guidance_scale):
        def draw_one(prompt_ids, negative_ids, key):
            size = (STEPS, PIXELS, PIXELS)
            rest = (guidance_scale, None, negative_ids[None])
            return pipeline._generate(prompt_ids[None], params, key, *size, *rest)[0]

        return jax.vmap(draw_one)(prompt_ids, negative_ids, keys)

    ids = jax.ShapeDtypeStruct((rows, 2, 77), jnp.int32, sharding=split)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    arguments = (ids, ids, placed(params, split_pairs(params, mesh)), placed(keys, split))
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=everywhere)
    return answer_of(jax.jit(draw, out_shardings=split).lower(*arguments, scale))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", type=int, help="numbers of chips that share the parameters: 1, 2 or 4")
    arguments = parser.parse_args()
    if unfit := [size for size in arguments.model if size < 1 or CHIPS % size]:
        parser.error(f"{CHIPS} chips cannot be split by {unfit[0]}: give 1, 2 or 4")
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    devices = tpu.tpu_devices(CHIP, CHIPS)
    pipeline, params = tpu.load_shapes("sdxl")
    work = {"pipeline": "sdxl", "dtype": "bfloat16", "chip": CHIP, "chips": CHIPS, "pixels": PIXELS, "steps": STEPS}
    found = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    if found.get("work") != work or found.get("versions") != versions():
        found = {"work": work, "versions": versions(), "compiled": {}}
    meshes = {size: make_mesh(devices, size) for size in (1, 2, 4)}
    found["block"] = {str(size): compile_block(pipeline.unet.config, mesh) for size, mesh in meshes.items()}
    found["parameters"] = {str(size): parameter_bytes(params, mesh) for size, mesh in meshes.items()}
    write_json(TARGET, found)
    for size in arguments.model:
        print(f"compiling for {CHIPS // size} row(s) of {size} chip(s) …", file=sys.stderr, flush=True)
        answer = compile_split(pipeline, params, meshes[size])
        found["compiled"][str(size)] = answer | {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        write_json(TARGET, found)
        print(answer, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
