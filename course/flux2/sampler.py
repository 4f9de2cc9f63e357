"""Flow matching's sampler: Euler's method along the predicted velocity, from noise to data.

Training mixes data and noise on a straight line, ``x = (1 - t) * data + t * noise``, and teaches
the model the velocity ``noise - data`` with which ``x`` moves along it as ``t`` grows. To draw, one
follows it back from ``t = 1``, where ``x`` is noise, to ``t = 0``.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

MOST_STEPS = 10_000  # ten times what the model was trained in


def shift_by_size(tokens: int, steps: int) -> float:
    """Return FLUX.2's shift of the times towards noise, by the number of tokens and of steps.

    Neighbouring pixels say nearly the same, so a large image shows through the noise for longer
    than a small one. These are the lines of ``compute_empirical_mu`` in diffusers, and the number
    is the exponential of what it gives. Above 4,300 tokens another line holds, whatever the steps:
    there the shift of four steps falls from 10.1 to 3.3, and rises again.

    >>> round(shift_by_size(tokens=4096, steps=4), 2)
    9.89
    """
    if tokens > 4300:
        return float(np.exp(0.00016927 * tokens + 0.45666666))
    at_200 = 0.00016927 * tokens + 0.45666666
    at_10 = 8.73809524e-05 * tokens + 1.89833333
    slope = (at_200 - at_10) / 190
    return float(np.exp(slope * steps + at_200 - 200 * slope))


def times(steps: int, shift: float = 1.0) -> np.ndarray:
    """Return the times of all steps and the end, from 1 to 0: float32, (steps + 1,).

    ``shift`` moves them towards the noise, at 1; by 1 they are evenly spaced.

    >>> times(4).tolist()
    [1.0, 0.75, 0.5, 0.25, 0.0]
    >>> times(2, shift=3).tolist()
    [1.0, 0.75, 0.0]

    Raises
    ------
    ValueError
        If the number of steps is none, or the shift is no finite number above 0.
    """
    if not isinstance(steps, int | np.integer) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"There are {steps} steps: take a whole number from 1 to {MOST_STEPS}.")
    if not 0 < shift < np.inf:  # which is false for NaN
        raise ValueError(f"The shift is {shift}: take a finite number above 0; 1 is none.")
    even = np.linspace(1, 0, steps + 1)
    return np.float32(shift * even / (1 + (shift - 1) * even))


def euler(
    velocity: Callable[[jax.Array, jax.Array], jax.Array],
    noise: jax.Array,
    at: np.ndarray | jax.Array,
) -> jax.Array:
    """Follow the velocity from time to time, in straight pieces.

    Parameters
    ----------
    velocity : callable
        A function of ``x``, which has the shape of the noise, and of a time, a scalar.
    noise : jax.Array
        Where to start from.
    at : array
        The times, falling from 1 to 0: (steps + 1,).

    Examples
    --------
    >>> to_data = lambda x, t: x / t  # the velocity if all data is 0
    >>> float(euler(to_data, jnp.float32(2), times(4)))
    0.0
    """

    def step(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        now, then = pair
        return x + (then - now) * velocity(x, now), None

    at = jnp.asarray(at, jnp.float32)
    x, _ = jax.lax.scan(step, noise, (at[:-1], at[1:]))
    return x


def follow_map(
    average_velocity: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    noise: jax.Array,
    at: np.ndarray | jax.Array,
) -> jax.Array:
    """Follow a flow map from time to time: each step goes by the average velocity of its way.

    Parameters
    ----------
    average_velocity : callable
        A function of ``x``, which has the shape of the noise, of the time now, and of the time that
        the step goes to, both scalars.
    noise, at
        As of ``euler``.

    Examples
    --------
    >>> to_data = lambda x, t, until: x / t  # the same at each time on the way, if all data is 0
    >>> float(follow_map(to_data, jnp.float32(2), times(1)))
    0.0
    """

    def step(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        now, then = pair
        return x + (then - now) * average_velocity(x, now, then), None

    at = jnp.asarray(at, jnp.float32)
    x, _ = jax.lax.scan(step, noise, (at[:-1], at[1:]))
    return x
