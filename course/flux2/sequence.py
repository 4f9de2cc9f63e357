"""Sequence parallelism: the transformer with its tokens split over the devices of a mesh.

Each device has all parameters and some tokens of text and image, and all layers but attention look
at each token by itself. `split_tokens` does it by hand: `jax.shard_map` says what is exchanged, and
nothing else is. `keep_tokens` leaves that to the partitioner, which can split parameters, too.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.flux2 import transformer
from course.flux2.configs import TransformerConfig
from course.model.attention import find_way


def split_tokens(
    mesh: Mesh, way: str = "ulysses", tokens: str = "tokens", images: str | None = None
) -> Callable:
    """Return a function that takes and gives what ``flux2.velocity`` does, with its tokens split.

    Give it to ``flux2.denoise`` or ``flux2.generate`` as ``velocity``. Where the devices do not
    divide the tokens of the text or of the image, padding is added, at which nothing looks.

    Parameters
    ----------
    mesh : jax.sharding.Mesh
    way : str
        How attention gets at the tokens of other devices: ``ulysses`` by all-to-alls, or ``ring``.
    tokens : str
        The axis of the mesh over which tokens are split.
    images : str, optional
        The axis over which the batch is split: images, or the two halves of guidance.

    Raises
    ------
    ValueError
        If there is no such way, or, by the function that is returned, if the devices do not divide
        the heads, which Ulysses needs.
    """
    attention = find_way(way)
    devices = mesh.shape[tokens]

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
        length = image.shape[1]
        is_padded = length % devices or text.shape[1] % devices

        def share(
            p: dict,
            image: jax.Array,
            text: jax.Array,
            times: tuple[jax.Array, jax.Array | None],
            image_places: tuple,
            text_places: tuple,
        ) -> jax.Array:
            *rotation, is_real = jax.tree.map(
                lambda text, image: jnp.concatenate([text, image]), text_places, image_places
            )
            attend = functools.partial(
                attention, axis=tokens, is_real=is_real if is_padded else None
            )
            time, until = times
            return transformer.predict(p, config, image, text, time, rotation, attend, until=until)

        along, whole = P(images, tokens), P(tokens)
        run = jax.shard_map(
            share,
            mesh=mesh,
            in_specs=(P(), along, along, P(images), whole, whole),
            out_specs=along,
            check_vma=False,
        )
        moved = run(
            p,
            pad_to_multiple(image, devices, axis=1),
            pad_to_multiple(text, devices, axis=1),
            (time, until),
            places_of(image_positions, config, devices),
            places_of(text_positions, config, devices),
        )
        return moved[:, :length]

    return velocity


def keep_tokens(mesh: Mesh, tokens: str | None = None, images: str | None = None) -> Callable:
    """Return a function that takes and gives what ``flux2.velocity`` does, with its tokens placed.

    The partitioner adds what devices exchange, also where parameters are split, as by
    ``TENSOR_PARALLEL``. Only for ``jax.jit``.

    Parameters
    ----------
    mesh : jax.sharding.Mesh
    tokens : str, optional
        The axis of the mesh over which tokens are split, whose devices divide those of the text and
        of the image.
    images : str, optional
        The axis over which the batch is split: images, or the two halves of guidance.
    """
    where = NamedSharding(mesh, P(images, tokens))

    def velocity(
        p: dict,
        config: TransformerConfig,
        image: jax.Array,
        text: jax.Array,
        *others: jax.Array,
        **second: jax.Array,
    ) -> jax.Array:
        image, text = jax.lax.with_sharding_constraint((image, text), where)
        moved = transformer.velocity(p, config, image, text, *others, **second)
        return jax.lax.with_sharding_constraint(moved, where)

    return velocity


def places_of(
    positions: np.ndarray, config: TransformerConfig, devices: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rotary positions of tokens, and which of them are no padding, filled up."""
    cos, sin = transformer.rotary(positions, config)
    is_real = np.ones(len(positions), bool)
    return tuple(pad_to_multiple(jnp.asarray(x), devices, axis=0) for x in (cos, sin, is_real))


def pad_to_multiple(x: jax.Array, devices: int, axis: int) -> jax.Array:
    """Add zeros at the end of an axis, so that the devices divide it."""
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, -x.shape[axis] % devices)
    return jnp.pad(x, padding)
