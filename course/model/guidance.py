"""Classifier-free guidance (Ho and Salimans, 2022): beyond what the empty prompt gives.

As in diffusers, there is none at a scale of 1 or less: the prompt alone decides, and the model runs
once in a step, not twice.
"""

import jax
import jax.numpy as jnp
import numpy as np


def is_guided(scale: float | jax.Array) -> bool:
    """Say whether there is guidance at a scale, or at one of several.

    While a program is traced, its value is not known, and there may be. So a compiled program that
    has the scale as an input runs the model twice, whatever comes; to save that, leave guidance out
    of the program.

    >>> is_guided(3.0), is_guided(1.0), is_guided(np.float32([0, 7.5]))
    (True, False, True)
    """
    return isinstance(scale, jax.core.Tracer) or not np.all(np.asarray(scale) <= 1)


def pair(negative: jax.Array, positive: jax.Array) -> jax.Array:
    """Return two batches in turns, (2 batch, ...), for one run of the model.

    So both halves of an image's guidance are on the device that draws the image: one batch behind
    the other would be moved between devices.
    """
    return jnp.stack([negative, positive], axis=1).reshape(-1, *positive.shape[1:])


def unpair(both: jax.Array) -> jax.Array:
    """Return the two batches that ``pair`` took: (2, batch, ...)."""
    return jnp.moveaxis(both.reshape(-1, 2, *both.shape[1:]), 1, 0)


def guide(scale: float | jax.Array, without: jax.Array, prompted: jax.Array) -> jax.Array:
    """Go from the answer without the prompt towards the one for the prompt, and beyond.

    Parameters
    ----------
    scale : float or jax.Array
        How far: one number for all, or one for each, (batch,). At 1 or less, the answer for the
        prompt stays as it is.
    without, prompted : jax.Array
        The two answers, (batch, ...).
    """
    scale = jnp.reshape(scale, (-1, *[1] * (prompted.ndim - 1)))
    guided = without + scale * (prompted - without)
    return jnp.where(scale <= 1, prompted, guided)
