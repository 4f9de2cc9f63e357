"""The layers that everything else is made of: functions of a dictionary of parameters, a name in it, and an input.

Channels come last: images are (batch, height, width, channels). A layer computes in the dtype of its parameters.
"""

import jax
import jax.numpy as jnp


class Shapes(dict):
    """Stands in for parameters that are not there, and notes the name and shape of each that is asked for."""


def parameter(p: dict, name: str, *shape: int) -> jax.Array:
    """Look up a parameter; a ``ValueError`` names it if it is missing or has a different shape."""
    if isinstance(p, Shapes):
        p[name] = shape
        return jnp.zeros(shape)
    if name not in p or p[name].shape != shape:
        found = f"has the shape {p[name].shape}" if name in p else "is missing"
        raise ValueError(f"The parameter {name} {found}: give parameters of this model, which has it as {shape}.")
    return p[name]


def linear(p: dict, name: str, x: jax.Array, features: int, bias: bool = True) -> jax.Array:
    """``torch.nn.Linear``: (..., channels) to (..., features). The weight is (channels, features)."""
    weight = parameter(p, f"{name}.weight", x.shape[-1], features)
    y = x.astype(weight.dtype) @ weight
    return y + parameter(p, f"{name}.bias", features) if bias else y


def conv(p: dict, name: str, x: jax.Array, features: int, size: int = 3, stride: int = 1, padding=None) -> jax.Array:
    """``torch.nn.Conv2d``: (batch, height, width, channels) to (batch, height / stride, width / stride, features).

    The weight is (size, size, channels, features). ``padding`` is (before, after), by default half of ``size``.
    """
    weight = parameter(p, f"{name}.weight", size, size, x.shape[-1], features)
    bias = parameter(p, f"{name}.bias", features)
    x = x.astype(weight.dtype)
    if size == 1:
        return x @ weight[0, 0] + bias
    with jax.named_scope("convolution"):
        padding, layout = [padding or (size // 2, size // 2)] * 2, ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, weight, (stride, stride), padding, dimension_numbers=layout) + bias


def group_norm(p: dict, name: str, x: jax.Array, groups: int, epsilon: float) -> jax.Array:
    """``torch.nn.GroupNorm`` of (batch, ..., channels): each group of channels gets mean 0 and variance 1."""
    batch, channels = len(x), x.shape[-1]
    scale, bias = (parameter(p, f"{name}.{part}", channels).reshape(groups, -1) for part in ("weight", "bias"))
    wide = x.astype(jnp.float32).reshape(batch, -1, channels)  # (batch, pixels, channels)
    # The mean over pixels, which is fast, and then over the channels of each group: (2, batch, groups, 1).
    over_pixels = jnp.stack([wide.mean(1), (wide**2).mean(1)])
    mean, square = over_pixels.reshape(2, batch, groups, -1).mean(-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.maximum(square - mean**2, 0) + epsilon) * scale  # (batch, groups, channels of each)
    summand = bias - mean * factor
    each = (batch, *[1] * (x.ndim - 2), channels)
    return (x * factor.reshape(each) + summand.reshape(each)).astype(x.dtype)


def layer_norm(p: dict, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """``torch.nn.LayerNorm`` of (..., channels): each vector of channels gets mean 0 and variance 1."""
    scale, bias = (parameter(p, f"{name}.{part}", x.shape[-1]) for part in ("weight", "bias"))
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    variance = jnp.maximum((wide**2).mean(-1, keepdims=True) - mean**2, 0)
    return ((wide - mean) * jax.lax.rsqrt(variance + epsilon) * scale + bias).astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """``torch.nn.GELU``: exact, where the Flax pipelines of diffusers had an approximation by tanh."""
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))  # jax.nn.gelu has erfc, which takes twice as long on a CPU


def upsample(x: jax.Array) -> jax.Array:
    """Each pixel becomes four: (batch, height, width, channels) to (batch, 2 height, 2 width, channels)."""
    return x.repeat(2, axis=1).repeat(2, axis=2)


def residual(p: dict, name: str, x: jax.Array, features: int, groups: int, epsilon: float, time=None) -> jax.Array:
    """diffusers' ``ResnetBlock2D``: (batch, height, width, channels) to (batch, height, width, features).

    ``time`` is the embedded timestep, (batch or 1, width), which the VAE does not have.
    """
    y = conv(p, f"{name}.conv1", jax.nn.silu(group_norm(p, f"{name}.norm1", x, groups, epsilon)), features)
    if time is not None:
        y += linear(p, f"{name}.time_emb_proj", jax.nn.silu(time), features)[:, None, None]
    y = conv(p, f"{name}.conv2", jax.nn.silu(group_norm(p, f"{name}.norm2", y, groups, epsilon)), features)
    return (x if x.shape[-1] == features else conv(p, f"{name}.conv_shortcut", x, features, size=1)) + y
