"""The layers of which transformer, text encoder and VAE are made.

A layer is a function of ``p``, a dictionary of parameters by the names that files have, of the
layer's name in it, and of an input. A weight is (inputs, outputs), and a convolution's (height,
width, inputs, outputs): channels come last, as TPUs like it.

What parameters a layer has is declared beside it: their shapes, and a *logical name* for each axis,
from which ``course.flux2.parameters`` makes shardings.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Parameter(NamedTuple):
    """What a parameter is, before it has numbers."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # a logical name for each axis; None for one that is never split


def within(name: str, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Parameters of a layer by their names in a part, which begin with the layer's name."""
    return {f"{name}.{key}": parameter for key, parameter in parameters.items()}


def stack_parameters(
    name: str, depth: int, parameters: dict[str, Parameter]
) -> dict[str, Parameter]:
    """Parameters of so many equal blocks, one above the other along a new first axis.

    In their names, ``*`` stands for the block's number.
    """
    stacked = {}
    for key, (shape, axes) in parameters.items():
        stacked[f"{name}.*.{key}"] = Parameter((depth, *shape), ("layers", *axes))
    return stacked


def stacked(p: dict, name: str) -> dict[str, jax.Array]:
    """The parameters of equal blocks by their names in one, each with an axis for the blocks."""
    prefix = f"{name}.*."
    return {k.removeprefix(prefix): v for k, v in p.items() if k.startswith(prefix)}


Arrays = jax.Array | tuple[jax.Array, ...]


def scan_blocks(block: Callable[[dict, Arrays], Arrays], p: dict, name: str, x: Arrays) -> Arrays:
    """Apply equal blocks one after another, by ``jax.lax.scan``, which compiles one of them.

    ``block`` takes the parameters of one block by their names in it, and an input: an array, or a
    tuple of arrays.
    """
    x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, stacked(p, name))
    return x


def linear_parameters(
    inputs: int, outputs: int, axes: tuple[str | None, str | None] = (None, None)
) -> dict[str, Parameter]:
    return {"weight": Parameter((inputs, outputs), axes)}


def linear(p: dict, name: str, x: jax.Array) -> jax.Array:
    """``torch.nn.Linear``: from (..., inputs) to (..., outputs). It computes in its own dtype."""
    weight = p[f"{name}.weight"]
    y = x.astype(weight.dtype) @ weight
    if f"{name}.bias" in p:
        y += p[f"{name}.bias"]
    return y


def layer_norm(x: jax.Array, epsilon: float) -> jax.Array:
    """``torch.nn.LayerNorm`` without parameters: the mean 0 and the variance 1, in float32."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    variance = jnp.square(centred).mean(axis=-1, keepdims=True)
    return (centred * jax.lax.rsqrt(variance + epsilon)).astype(x.dtype)


def rms_norm(p: dict, name: str, x: jax.Array, epsilon: float) -> jax.Array:
    """``torch.nn.RMSNorm``: the mean square 1, then a factor for each channel."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype) * p[f"{name}.weight"]


def swiglu(gate: jax.Array, value: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, 2020): one half of the channels decides how much passes of the other."""
    return jax.nn.silu(gate) * value


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
) -> jax.Array:
    """Softmax attention of several heads.

    Parameters
    ----------
    query, key, value : jax.Array
        (batch, tokens, heads, channels). Where there are fewer heads of keys and values, several
        heads of queries share one (grouped-query attention).
    mask : jax.Array, optional
        Which keys a query sees: bool, (batch or 1, 1, queries or 1, keys).

    Returns
    -------
    jax.Array
        (batch, queries, heads * channels).
    """
    batch, tokens, heads, channels = query.shape
    if key.shape[2] != heads:
        key = key.repeat(heads // key.shape[2], axis=2)
        value = value.repeat(heads // value.shape[2], axis=2)
    # With heads first, and the scale on the queries, the TPU compiler fuses the products with the
    # softmax, so that the scores of all heads are never in memory.
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    query = query * channels**-0.5
    scores = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    y = jnp.einsum("bhqk,bhkd->bhqd", weights, value)
    return y.swapaxes(1, 2).reshape(batch, tokens, -1)


def conv_parameters(inputs: int, outputs: int, size: int = 3) -> dict[str, Parameter]:
    return {
        "weight": Parameter((size, size, inputs, outputs), (None, None, None, None)),
        "bias": Parameter((outputs,), (None,)),
    }


def conv(
    p: dict, name: str, x: jax.Array, stride: int = 1, padding: tuple[int, int] | None = None
) -> jax.Array:
    """``torch.nn.Conv2d``: from (batch, height, width, inputs) to (batch, ..., outputs).

    ``padding`` is how many zeros come before and after the pixels, in both directions; by default
    half of the kernel's size.
    """
    weight = p[f"{name}.weight"]
    size = weight.shape[0]
    if padding is None:
        padding = (size // 2, size // 2)
    y = jax.lax.conv_general_dilated(
        x.astype(weight.dtype),
        weight,
        window_strides=(stride, stride),
        padding=(padding, padding),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + p[f"{name}.bias"]


def group_norm_parameters(channels: int) -> dict[str, Parameter]:
    return {
        "weight": Parameter((channels,), (None,)),
        "bias": Parameter((channels,), (None,)),
    }


def group_norm(p: dict, name: str, x: jax.Array, groups: int, epsilon: float = 1e-6) -> jax.Array:
    """``torch.nn.GroupNorm`` of (batch, height, width, channels)."""
    batch, height, width, channels = x.shape
    y = x.astype(jnp.float32).reshape(batch, height * width, groups, channels // groups)
    y -= y.mean(axis=(1, 3), keepdims=True)
    y *= jax.lax.rsqrt(jnp.square(y).mean(axis=(1, 3), keepdims=True) + epsilon)
    y = y.reshape(x.shape) * p[f"{name}.weight"] + p[f"{name}.bias"]
    return y.astype(x.dtype)
