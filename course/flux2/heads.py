"""Tensor parallelism by hand: each device has some heads of attention and channels of each block.

The partitioner can be asked for the same by ``TENSOR_PARALLEL``. But some matrices of this model
are several in one: that of a single-stream block makes queries, keys, values and both halves of the
feed-forward layer. Cut by columns into equal pieces, it gives each device pieces of one and of the
other, and what a device needs has to come from others. So `sort_columns` puts next to one another
what one device needs, once after loading. Then the devices exchange nothing but sums.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from course.flux2 import transformer
from course.flux2.configs import TransformerConfig
from course.flux2.parameters import TENSOR_PARALLEL
from course.flux2.transformer import DOUBLE, SINGLE, transformer_parameters
from course.model.attention import check_whole_heads
from course.model.sharding import declared_shardings


def split_heads(mesh: Mesh, images: str | None = None) -> Callable:
    """Return a function that takes and gives what ``flux2.velocity`` does, with its heads split.

    They are split over the axis "model" of the mesh. Give the function to ``flux2.denoise`` or
    ``flux2.generate`` as ``velocity``, with parameters from `sort_columns`.

    Parameters
    ----------
    mesh : jax.sharding.Mesh
    images : str, optional
        The axis over which the batch is split: images, or the two halves of guidance.

    Raises
    ------
    ValueError
        By the function that is returned, if the devices do not divide the heads.
    """
    devices = mesh.shape["model"]

    def velocity(
        p: dict,
        config: TransformerConfig,
        image: jax.Array,
        text: jax.Array,
        time: jax.Array,
        image_positions: np.ndarray,
        text_positions: np.ndarray,
        until: jax.Array | None = None,
    ) -> jax.Array:
        check_whole_heads(config.num_attention_heads, devices, "Tensor parallelism")
        # A device has blocks as a narrower model has them, but for what goes in and comes out.
        own = dataclasses.replace(config, num_attention_heads=config.num_attention_heads // devices)
        rotation = transformer.rotary(np.concatenate([text_positions, image_positions]), config)

        def add_up(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, "model")

        def share(
            p: dict,
            image: jax.Array,
            text: jax.Array,
            time: jax.Array,
            until: jax.Array | None,
        ) -> jax.Array:
            return transformer.predict(
                p, own, image, text, time, rotation, add_up=add_up, until=until
            )

        declared = {"transformer": transformer_parameters(config)}
        places = declared_shardings(declared, mesh, TENSOR_PARALLEL)["transformer"]
        batch = P(images)
        run = jax.shard_map(
            share,
            mesh=mesh,
            in_specs=({name: place.spec for name, place in places.items()}, *[batch] * 4),
            out_specs=batch,
            check_vma=False,
        )
        return run(p, image, text, time, until)

    return velocity


def sort_columns(p: dict, config: TransformerConfig, devices: int) -> dict:
    """Return the transformer's parameters in the order of columns that `split_heads` needs.

    Other programs, and ``flux2.velocity``, need them as they were.

    Parameters
    ----------
    p : dict
        The transformer's parameters.
    config : TransformerConfig
    devices : int
        Over which heads are split.

    Raises
    ------
    ValueError
        If the devices do not divide the heads.
    """
    check_whole_heads(config.num_attention_heads, devices, "Tensor parallelism")
    width = config.width
    hidden = int(width * config.mlp_ratio)
    gated = ((hidden, hidden), 2)  # sizes of the parts, and the axis along which they lie
    several_in_one = {
        f"{DOUBLE}.*.ff.linear_in.weight": gated,
        f"{DOUBLE}.*.ff_context.linear_in.weight": gated,
        f"{SINGLE}.*.attn.to_qkv_mlp_proj.weight": ((width, width, width, hidden, hidden), 2),
        f"{SINGLE}.*.attn.to_out.weight": ((width, hidden), 1),
    }
    changed = {}
    for name, (sizes, axis) in several_in_one.items():
        changed[name] = jnp.take(p[name], order_by_device(sizes, devices), axis=axis)
    return p | changed


def order_by_device(sizes: Sequence[int], devices: int) -> np.ndarray:
    """Return the places of what lies in parts of these sizes, in the order of who needs it.

    Of each part, each device needs an equal piece.

    >>> order_by_device([4, 2], devices=2).tolist()
    [0, 1, 4, 2, 3, 5]
    """
    starts = np.cumsum([0, *sizes[:-1]])
    pieces = []
    for device in range(devices):
        for start, size in zip(starts, sizes, strict=True):
            share = size // devices
            pieces.append(start + device * share + np.arange(share))
    return np.concatenate(pieces)
