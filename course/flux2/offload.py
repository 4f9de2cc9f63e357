"""Weights that wait in the host's memory, where a device has no room for all of a model.

JAX calls it the memory kind ``pinned_host``. A program reads from it as from the device's own, but
has to say when numbers come over: here that is inside the loop over blocks, so that the device
holds the weights of the block at work, and perhaps of the next.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from course.model.quantize import Quantized

HOST = "pinned_host"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Waiting:
    """A matrix in the host's memory, which comes to the device when something is multiplied by it.

    It may be that of stacked layers, whose leaves ``jax.lax.scan`` slices.
    """

    weight: jax.Array | Quantized  # (..., inputs, outputs)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return ``x @ self``: from (..., inputs) to (..., outputs)."""
        return x @ jax.device_put(self.weight, jax.memory.Space.Device)


def find_host_memory(device: jax.Device) -> SingleDeviceSharding:
    """Return where arrays lie that wait in the host's memory for a device.

    Raises
    ------
    ValueError
        If the device knows no such memory.
    """
    if HOST not in {memory.kind for memory in device.addressable_memories()}:
        raise ValueError(
            f"Through {device.platform} this JAX keeps no arrays in the host's memory for "
            f"{device}: leave out offload."
        )
    return SingleDeviceSharding(device, memory_kind=HOST)


def blocks_on_host(
    p: dict[str, jax.Array | Quantized], device: jax.Device
) -> dict[str, jax.Array | Waiting]:
    """Place a part of the model for a device, the matrices of its blocks in the host's memory.

    All else is small and goes to the device: the compiler for TPUs takes no slices of vectors in
    the host's memory.

    Parameters
    ----------
    p : dict
        The part's parameters, by name, as they lie on the host's CPU. They are taken out one by
        one, so that the host never holds all of them twice.
    device : jax.Device

    Returns
    -------
    dict
        The same names and shapes, for the functions that take ``p``.

    Raises
    ------
    ValueError
        As ``find_host_memory`` does.
    """
    on_host = find_host_memory(device)
    placed = {}
    for name in list(p):
        value = p.pop(name)
        if not is_block_matrix(name, value.shape):
            placed[name] = jax.device_put(value, device)
        elif isinstance(value, Quantized):
            values = jax.device_put(np.asarray(value.values), on_host)
            scale = jax.device_put(value.scale, device)
            placed[name] = Waiting(Quantized(values, scale, value.dtype))
        else:
            placed[name] = Waiting(jax.device_put(np.asarray(value), on_host))
        jax.block_until_ready(placed[name])
    return placed


def is_block_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a parameter is the stacked matrices of blocks: (blocks, inputs, outputs)."""
    return "*" in name and len(shape) == 3
