"""A step of Stable Diffusion XL over the eight chips of a v5e-8, split in different ways.

It has 1024 × 1024 pixels and bfloat16. Each answer takes two to five minutes on two cores.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

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
from course.tpu.pieces import load_config
from lab.ask import Way, ask_split, make_mesh, place

CHIP = "v5e"
WAYS = {
    "data": Way({"data": 8}, DATA_PARALLEL, P("data"), images=8),
    # XL has 10 and 20 heads, which neither 4 nor 8 divide: so two chips share an image.
    "tensor": Way({"data": 4, "model": 2}, TENSOR_PARALLEL, P("data"), images=4),
    "fully sharded": Way({"data": 8}, FULLY_SHARDED, P("data"), images=8),
    "sequence": Way({"rows": 8}, DATA_PARALLEL, P(None, "rows"), images=1),
}


def place_step(way: Way) -> tuple:
    """Return a mesh, a step of denoising, and its arguments: shapes that say where they lie."""
    mesh = make_mesh(way, CHIP)
    config = load_config("sdxl")
    side = config.unet.sample_size
    pixels = config.pixels_per_latent * side
    params = parameter_shapes(config, jnp.bfloat16)
    tokens = config.text[0].max_position_embeddings
    ids = jax.ShapeDtypeStruct((way.images, len(config.text), tokens), jnp.int32)
    encode = functools.partial(encode_condition, config=config, height=pixels, width=pixels)
    condition = jax.eval_shape(lambda p, ids: encode(p, ids=ids, negative_ids=ids), params, ids)

    def where(*spec):
        return NamedSharding(mesh, P(*spec))

    batch = way.spec[0]  # the axis over which images are split; None if there is but one
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

    params = place(params["unet"], shardings(config, mesh, way.rules)["unet"])
    return mesh, step, (params, place(latents, where(*way.spec)), number, condition, number)


def questions(rows: list[dict]) -> list[dict]:
    return [{"way": way} for way in WAYS]


def answer(way: str) -> dict:
    mesh, step, arguments = place_step(WAYS[way])
    return ask_split(step, arguments, WAYS[way], mesh, CHIP)
