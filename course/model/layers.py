"""The layers of which text encoders, UNet, transformer and VAE are made.

A layer is a function. It takes ``p``, the dictionary of one part's parameters, the layer's name in
it, and an input ``x``. Channels come last: images are (batch, height, width, channels). A layer
computes in the dtype of its parameters.

What parameters a layer has is declared by a second function beside it, ``linear_parameters`` for
``linear``: their shapes, and a *logical name* for each axis. ``course.model.sharding`` has rules
that say over which devices the axes of a name are split.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from course.model.quantize import Quantized


class Parameter(NamedTuple):
    """What a parameter is, before it has numbers."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]  # a logical name for each axis; None for one that is never split


def within(name: str, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
    """Name a layer's parameters as a part does: the layer's name comes first."""
    return {f"{name}.{key}": parameter for key, parameter in parameters.items()}


def stack_parameters(
    name: str, depth: int, parameters: dict[str, Parameter]
) -> dict[str, Parameter]:
    """Stack the parameters of so many equal layers along a new first axis.

    In their names, ``*`` stands for the layer's number.
    """
    stacked = {}
    for key, (shape, axes) in parameters.items():
        stacked[f"{name}.*.{key}"] = Parameter((depth, *shape), ("layers", *axes))
    return stacked


def stacked_layers(p: dict, name: str) -> dict:
    """Return the parameters of equal layers, by their names in one, for ``jax.lax.scan``."""
    prefix = f"{name}.*."
    return {k.removeprefix(prefix): value for k, value in p.items() if k.startswith(prefix)}


def split_batch(x: jax.Array) -> jax.Array:
    """Keep images on the devices that draw them: the batch is split over the mesh's axis "data".

    It does nothing unless ``jax.set_mesh`` has set a mesh with such an axis. Without it, the
    compiler may move images to where parameters lie, which it cannot know to be more work.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if automatic.get("data") != AxisType.Auto:
        return x
    free = [P.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, P("data", *free))


def matrix_parameters(
    inputs: int, outputs: int, axes: tuple[str | None, str | None] = ("inputs", "outputs")
) -> dict[str, Parameter]:
    """Declare a linear layer without a bias."""
    return {"weight": Parameter((inputs, outputs), axes)}


def linear_parameters(
    inputs: int, outputs: int, axes: tuple[str | None, str | None] = ("inputs", "outputs")
) -> dict[str, Parameter]:
    """Declare a linear layer with a bias."""
    return {
        "weight": Parameter((inputs, outputs), axes),
        "bias": Parameter((outputs,), axes[1:]),
    }


def linear(p: dict, name: str, x: jax.Array) -> jax.Array:
    """``torch.nn.Linear``: from (..., inputs) to (..., outputs).

    The weight is (inputs, outputs). Some layers have a bias, (outputs,), and some have none.
    """
    weight = p[f"{name}.weight"]
    y = x.astype(weight.dtype) @ weight
    if f"{name}.bias" in p:
        y += p[f"{name}.bias"]
    return y


def conv_parameters(
    inputs: int,
    outputs: int,
    size: int = 3,
    axes: tuple[str | None, str | None] = ("inputs", "outputs"),
) -> dict[str, Parameter]:
    """Declare a convolution with a bias."""
    return {
        "weight": Parameter((size, size, inputs, outputs), (None, None, *axes)),
        "bias": Parameter((outputs,), axes[1:]),
    }


def conv(
    p: dict,
    name: str,
    x: jax.Array,
    stride: int = 1,
    padding: tuple[int, int] | None = None,
) -> jax.Array:
    """``torch.nn.Conv2d`` with a square kernel.

    From (batch, height, width, inputs) to (batch, height / stride, width / stride, outputs). The
    weight is (size, size, inputs, outputs). ``padding`` is how many zeros come before and after the
    pixels, in both directions; by default half of ``size``.
    """
    weight = p[f"{name}.weight"]
    bias = p[f"{name}.bias"]
    size = weight.shape[0]
    x = x.astype(weight.dtype)
    if size == 1:  # the same as a linear layer
        return x @ weight[0, 0] + bias
    if padding is None:
        padding = (size // 2, size // 2)
    with jax.named_scope("convolution"):
        if isinstance(weight, Quantized):
            return weight.convolve(x, stride, padding) + bias
        y = jax.lax.conv_general_dilated(
            x,
            weight,
            window_strides=(stride, stride),
            padding=(padding, padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + bias


def norm_parameters(channels: int) -> dict[str, Parameter]:
    """Declare a group norm or a layer norm."""
    return {
        "weight": Parameter((channels,), (None,)),
        "bias": Parameter((channels,), (None,)),
    }


def group_norm(p: dict, name: str, x: jax.Array, groups: int, epsilon: float) -> jax.Array:
    """``torch.nn.GroupNorm``: each group of channels gets the mean 0 and the variance 1.

    ``x`` and the result are (batch, height, width, channels).
    """
    batch, _, _, channels = x.shape
    weight = p[f"{name}.weight"].reshape(groups, -1)
    bias = p[f"{name}.bias"].reshape(groups, -1)
    wide = x.astype(jnp.float32).reshape(batch, -1, channels)  # (batch, pixels, channels)
    # First the mean over pixels, which is fast, then over the channels of each group.
    over_pixels = jnp.stack([wide.mean(axis=1), (wide**2).mean(axis=1)])  # (2, batch, channels)
    by_group = over_pixels.reshape(2, batch, groups, -1)
    mean, square = by_group.mean(axis=-1, keepdims=True)  # each (batch, groups, 1)
    # Where the mean is large beside the variance, this difference loses digits, of which float32
    # has enough here. It needs one pass over the pixels; the mean of (x - mean)² needs two.
    variance = jnp.maximum(square - mean**2, 0)
    # The weight and the bias for each image and channel: (batch, groups, channels / groups).
    factor = jax.lax.rsqrt(variance + epsilon) * weight
    summand = bias - mean * factor
    factor = factor.reshape(batch, 1, 1, channels)
    summand = summand.reshape(batch, 1, 1, channels)
    return (x * factor + summand).astype(x.dtype)


def layer_norm(p: dict, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """``torch.nn.LayerNorm``: each vector of channels gets the mean 0 and the variance 1.

    ``x`` and the result are (..., channels).
    """
    weight = p[f"{name}.weight"]
    bias = p[f"{name}.bias"]
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    variance = jnp.maximum((wide**2).mean(axis=-1, keepdims=True) - mean**2, 0)
    y = (wide - mean) * jax.lax.rsqrt(variance + epsilon) * weight + bias
    return y.astype(x.dtype)


def rms_norm_parameters(channels: int) -> dict[str, Parameter]:
    """Declare an RMS norm, which has no bias."""
    return {"weight": Parameter((channels,), (None,))}


def rms_norm(p: dict, name: str, x: jax.Array, epsilon: float) -> jax.Array:
    """``torch.nn.RMSNorm``: the mean square 1, then a factor for each channel.

    ``x`` and the result are (..., channels).
    """
    wide = x.astype(jnp.float32)
    mean_square = jnp.square(wide).mean(axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean_square + epsilon)).astype(x.dtype) * p[f"{name}.weight"]


def gelu(x: jax.Array) -> jax.Array:
    """``torch.nn.GELU``, exactly: the Flax pipelines of diffusers approximate it by tanh."""
    # jax.nn.gelu computes it by erfc, which takes twice as long on a CPU.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def swiglu(gate: jax.Array, value: jax.Array) -> jax.Array:
    """SwiGLU (Shazeer, 2020): one half of the channels decides how much passes of the other."""
    return jax.nn.silu(gate) * value


def upsample(x: jax.Array) -> jax.Array:
    """Make four pixels of each one.

    From (batch, height, width, channels) to (batch, 2 height, 2 width, channels).
    """
    return x.repeat(2, axis=1).repeat(2, axis=2)


def residual_parameters(inputs: int, outputs: int, time: int | None = None) -> dict[str, Parameter]:
    """Declare a residual block; ``time`` is how many channels the embedded timestep has."""
    declared = within("norm1", norm_parameters(inputs))
    declared |= within("conv1", conv_parameters(inputs, outputs))
    if time is not None:
        declared |= within("time_emb_proj", linear_parameters(time, outputs))
    declared |= within("norm2", norm_parameters(outputs))
    declared |= within("conv2", conv_parameters(outputs, outputs))
    if inputs != outputs:
        declared |= within("conv_shortcut", conv_parameters(inputs, outputs, size=1))
    return declared


def residual(
    p: dict,
    name: str,
    x: jax.Array,
    groups: int,
    epsilon: float,
    time: jax.Array | None = None,
) -> jax.Array:
    """diffusers' ``ResnetBlock2D``: two convolutions, whose result is added to the input.

    From (batch, height, width, inputs) to (batch, height, width, outputs). ``time`` is the embedded
    timestep, (batch or 1, channels); the VAE has none.
    """
    y = jax.nn.silu(group_norm(p, f"{name}.norm1", x, groups, epsilon))
    y = conv(p, f"{name}.conv1", y)
    if time is not None:
        shift = linear(p, f"{name}.time_emb_proj", jax.nn.silu(time))
        y += shift[:, None, None]  # the same for all pixels
    y = jax.nn.silu(group_norm(p, f"{name}.norm2", y, groups, epsilon))
    y = conv(p, f"{name}.conv2", y)
    if x.shape[-1] != y.shape[-1]:
        x = conv(p, f"{name}.conv_shortcut", x)
    return x + y
