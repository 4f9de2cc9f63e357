"""Attention of the UNet over pixels that are split over the devices of a mesh, by hand.

Each device has some rows of the latents, and so of the pixels on every level. What convolutions and
norms exchange, the partitioner adds; how attention gets at the pixels of other devices, this says.
"""

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from course.model.attention import find_way, plain


def split_pixels(
    mesh: Mesh, way: str = "ring", tokens: str = "tokens", images: str | None = None
) -> Callable:
    """Return an attention for ``generate`` or ``denoise_step``, where pixels look at pixels.

    Give these the latents with their rows split: ``NamedSharding(mesh, P(images, tokens))``. Where
    pixels look at the text, and in the decoder with its one head, attention is ``plain``.

    Parameters
    ----------
    mesh : jax.sharding.Mesh
    way : str
        How attention gets at the pixels of other devices: ``ulysses`` by all-to-alls, or ``ring``.
    tokens : str
        The axis of the mesh over which rows of pixels are split.
    images : str, optional
        The axis over which the UNet's batch is split: images, or the two halves of guidance.

    Raises
    ------
    ValueError
        If there is no such way, or, by the function that is returned, if the devices do not divide
        the pixels of a level, or for Ulysses the heads.
    """
    attention = functools.partial(find_way(way), axis=tokens)
    devices = mesh.shape[tokens]
    split = P(images, tokens)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        pixels, heads = query.shape[1:3]
        if key.shape[1] != pixels or heads == 1:
            return plain(query, key, value)
        if pixels % devices:
            raise ValueError(
                f"Attention over {pixels} pixels cannot be divided by {devices} devices: choose "
                "fewer devices, or larger images."
            )
        share = jax.shard_map(
            attention, mesh=mesh, in_specs=split, out_specs=split, check_vma=False
        )
        return share(query, key, value)

    return attend
