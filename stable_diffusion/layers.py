"""The layers of which the text encoders, the UNet and the VAE are made.

A layer is a function. It takes ``p``, the dictionary of one part's parameters, the layer's name in
it, and an input ``x``. Channels come last: images are (batch, height, width, channels). A layer
computes in the dtype of its parameters.
"""

import jax
import jax.numpy as jnp


class ShapeRecorder(dict):
    """Stands in for a part's parameters, and records the shape of each that is asked for."""


def parameter(p: dict, name: str, *shape: int) -> jax.Array:
    """Look up a parameter.

    If it is missing or has a different shape, a ``ValueError`` names it. A ``ShapeRecorder`` gives
    zeros.
    """
    if isinstance(p, ShapeRecorder):
        p[name] = shape
        return jnp.zeros(shape)
    if name not in p:
        found = "is missing"
    elif p[name].shape != shape:
        found = f"has the shape {p[name].shape}"
    else:
        return p[name]
    raise ValueError(
        f"The parameter {name} {found}: give parameters of this model, which has it as {shape}."
    )


def linear(p: dict, name: str, x: jax.Array, features: int, bias: bool = True) -> jax.Array:
    """``torch.nn.Linear``: from (..., channels) to (..., features).

    The weight is (channels, features).
    """
    weight = parameter(p, f"{name}.weight", x.shape[-1], features)
    y = x.astype(weight.dtype) @ weight
    if bias:
        y += parameter(p, f"{name}.bias", features)
    return y


def conv(
    p: dict,
    name: str,
    x: jax.Array,
    features: int,
    size: int = 3,
    stride: int = 1,
    padding: tuple[int, int] | None = None,
) -> jax.Array:
    """``torch.nn.Conv2d`` with a square kernel.

    From (batch, height, width, channels) to (batch, height / stride, width / stride, features). The
    weight is (size, size, channels, features). ``padding`` is how many zeros come before and after
    the pixels, in both directions; by default half of ``size``.
    """
    weight = parameter(p, f"{name}.weight", size, size, x.shape[-1], features)
    bias = parameter(p, f"{name}.bias", features)
    x = x.astype(weight.dtype)
    if size == 1:  # the same as a linear layer
        return x @ weight[0, 0] + bias
    if padding is None:
        padding = (size // 2, size // 2)
    with jax.named_scope("convolution"):
        y = jax.lax.conv_general_dilated(
            x,
            weight,
            window_strides=(stride, stride),
            padding=(padding, padding),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return y + bias


def group_norm(p: dict, name: str, x: jax.Array, groups: int, epsilon: float) -> jax.Array:
    """``torch.nn.GroupNorm``: each group of channels gets the mean 0 and the variance 1.

    ``x`` and the result are (batch, height, width, channels).
    """
    batch, _, _, channels = x.shape
    weight = parameter(p, f"{name}.weight", channels).reshape(groups, -1)
    bias = parameter(p, f"{name}.bias", channels).reshape(groups, -1)
    wide = x.astype(jnp.float32).reshape(batch, -1, channels)  # (batch, pixels, channels)
    # First the mean over pixels, which is fast, then over the channels of each group.
    over_pixels = jnp.stack([wide.mean(axis=1), (wide**2).mean(axis=1)])  # (2, batch, channels)
    by_group = over_pixels.reshape(2, batch, groups, -1)
    mean, square = by_group.mean(axis=-1, keepdims=True)  # each (batch, groups, 1)
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
    weight = parameter(p, f"{name}.weight", x.shape[-1])
    bias = parameter(p, f"{name}.bias", x.shape[-1])
    wide = x.astype(jnp.float32)
    mean = wide.mean(axis=-1, keepdims=True)
    variance = jnp.maximum((wide**2).mean(axis=-1, keepdims=True) - mean**2, 0)
    y = (wide - mean) * jax.lax.rsqrt(variance + epsilon) * weight + bias
    return y.astype(x.dtype)


def gelu(x: jax.Array) -> jax.Array:
    """``torch.nn.GELU``, exactly: the Flax pipelines of diffusers approximate it by tanh."""
    # jax.nn.gelu computes it by erfc, which takes twice as long on a CPU.
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))


def quick_gelu(x: jax.Array) -> jax.Array:
    """transformers' ``QuickGELUActivation``, which approximates GELU by a sigmoid."""
    return x * jax.nn.sigmoid(1.702 * x)


def upsample(x: jax.Array) -> jax.Array:
    """Make four pixels of each one.

    From (batch, height, width, channels) to (batch, 2 height, 2 width, channels).
    """
    return x.repeat(2, axis=1).repeat(2, axis=2)


def residual(
    p: dict,
    name: str,
    x: jax.Array,
    features: int,
    groups: int,
    epsilon: float,
    time: jax.Array | None = None,
) -> jax.Array:
    """diffusers' ``ResnetBlock2D``: two convolutions, whose result is added to the input.

    From (batch, height, width, channels) to (batch, height, width, features). ``time`` is the
    embedded timestep, (batch or 1, width); the VAE has none.
    """
    y = jax.nn.silu(group_norm(p, f"{name}.norm1", x, groups, epsilon))
    y = conv(p, f"{name}.conv1", y, features)
    if time is not None:
        shift = linear(p, f"{name}.time_emb_proj", jax.nn.silu(time), features)
        y += shift[:, None, None]  # the same for all pixels
    y = jax.nn.silu(group_norm(p, f"{name}.norm2", y, groups, epsilon))
    y = conv(p, f"{name}.conv2", y, features)
    if x.shape[-1] != features:
        x = conv(p, f"{name}.conv_shortcut", x, features, size=1)
    return x + y
