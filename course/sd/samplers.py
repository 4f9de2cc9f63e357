"""Samplers: from noise to the latents of an image, in a few steps.

Each step splits the latents into image and noise by the model's answer, and mixes the two again
with less noise. Samplers differ in where they ask the model, and in how they improve its answer by
earlier ones. Latents have DDIM's variance, and are (batch, height, width, channels). All arithmetic
is in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course.sd.configs import ScheduleConfig


class Point(NamedTuple):
    """Where a step starts and ends: three float32 numbers."""

    timestep: jax.Array  # what the model is told
    alpha: jax.Array  # the image's share of the latents' variance before the step
    next_alpha: jax.Array  # and after it; the rest is noise


def alphas(schedule: ScheduleConfig) -> np.ndarray:
    """Return the image's share of the variance at each timestep of the training.

    This is diffusers' ``alphas_cumprod``, float32, (num_train_timesteps,).
    """
    power = {"linear": 1, "scaled_linear": 2}[schedule.beta_schedule]
    betas = np.linspace(
        schedule.beta_start ** (1 / power),
        schedule.beta_end ** (1 / power),
        schedule.num_train_timesteps,
        dtype=np.float32,
    )
    shares = np.cumprod(1 - betas**power)
    if not schedule.rescale_betas_zero_snr:
        return shares
    # Lin et al. (2023), algorithm 1: the roots, which are what an image is multiplied by, are moved
    # down until the last one is 0, and stretched so that the first one stays.
    roots = np.sqrt(shares)
    return ((roots - roots[-1]) * roots[0] / (roots[0] - roots[-1])) ** 2


SMALLEST_ALPHA = np.float32(2**-24)  # in place of 0, where it is divided by; as in diffusers


def alpha_at(schedule: ScheduleConfig, timestep: jax.Array) -> jax.Array:
    """Return alpha at any timestep, a whole one or not.

    Between two whole timesteps √((1 - alpha) / alpha) is interpolated, as by diffusers' Euler.
    """
    sigmas = jnp.asarray(np.sqrt(1 / np.maximum(alphas(schedule), SMALLEST_ALPHA) - 1))
    below = jnp.floor(timestep).astype(jnp.int32)
    sigma = sigmas[below]
    sigma_above = sigmas[jnp.minimum(below + 1, len(sigmas) - 1)]
    sigma += (timestep - below) * (sigma_above - sigma)
    return 1 / (1 + sigma**2)


def timestep_at(schedule: ScheduleConfig, points: jax.Array, i: jax.Array) -> jax.Array:
    """Return the ``i``-th of so many points in time, from the noisiest on, as a float32 number.

    How they are spaced is diffusers' ``timestep_spacing``.
    """
    total = schedule.num_train_timesteps
    left = points - 1 - i
    spacing = schedule.timestep_spacing
    if spacing == "leading":
        return jnp.float32(left * (total // points) + schedule.steps_offset)
    if spacing == "linspace":
        return jnp.float32((total - 1) * left) / jnp.maximum(points - 1, 1)
    if spacing == "trailing":
        return jnp.round(total - jnp.float32(total * i) / points) - 1
    raise ValueError(
        f"There is no timestep spacing {spacing!r}: choose leading, linspace or trailing."
    )


def ddim_point(
    schedule: ScheduleConfig, steps: jax.Array, i: jax.Array, start: jax.Array | None = None
) -> Point:
    """diffusers' ``DDIMScheduler``: each step goes down by the same number of timesteps.

    It starts at the timestep of which the model is told, unless ``start`` is another one.
    """
    timestep = jnp.round(timestep_at(schedule, steps, i))
    if start is None:
        start = timestep
    end = start - schedule.num_train_timesteps // steps
    last_alpha = 1 if schedule.set_alpha_to_one else alphas(schedule)[0]
    next_alpha = jnp.where(end < 0, last_alpha, alpha_at(schedule, jnp.maximum(end, 0)))
    alpha = alpha_at(schedule, start)
    if schedule.rescale_betas_zero_snr and schedule.prediction_type == "v_prediction":
        # DDIM divides by no alpha, so the last one may be 0.
        last = schedule.num_train_timesteps - 1
        alpha = jnp.where(start == last, alphas(schedule)[last], alpha)
    return Point(timestep, alpha, next_alpha)


def pndm_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array) -> Point:
    """diffusers' ``PNDMScheduler`` without Runge-Kutta steps, with one call more than steps.

    Call 0 takes the first step. Call 1 asks where that step ended, and takes it again from where it
    started. After that, call ``i`` takes step ``i - 1``. (The Flax pipeline leaves out the last.)
    """
    asked = jnp.where(i < 2, i, i - 1)
    one_step = schedule.num_train_timesteps // steps
    start = jnp.round(timestep_at(schedule, steps, asked)) + jnp.where(i == 1, one_step, 0)
    return ddim_point(schedule, steps, asked, start)


def euler_point(
    schedule: ScheduleConfig,
    steps: jax.Array,
    i: jax.Array,
    points: jax.Array | None = None,
    whole: bool = False,
) -> Point:
    """diffusers' ``EulerDiscreteScheduler``: each step ends where the next one starts.

    ``points`` is how many points in time there are, by default as many as steps. If ``whole``, they
    are rounded to whole timesteps.
    """
    if points is None:
        points = steps
    timestep = timestep_at(schedule, points, i)
    next_timestep = timestep_at(schedule, points, jnp.minimum(i + 1, steps - 1))
    if whole:
        timestep = jnp.round(timestep)
        next_timestep = jnp.round(next_timestep)
    next_alpha = jnp.where(i + 1 < steps, alpha_at(schedule, next_timestep), 1)
    return Point(timestep, alpha_at(schedule, timestep), next_alpha)


def dpm_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array) -> Point:
    """diffusers' ``DPMSolverMultistepScheduler``: Euler's points, at whole timesteps.

    They are spaced as if there were one step more, unless the spacing is "trailing".
    """
    points = steps if schedule.timestep_spacing == "trailing" else steps + 1
    return euler_point(schedule, steps, i, points, whole=True)


def split_image_noise(
    schedule: ScheduleConfig, x: jax.Array, output: jax.Array, alpha: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return image and noise in the latents ``x``, according to the model's output.

    Both have the shape of ``x`` and of ``output``.
    """
    a = jnp.sqrt(alpha)
    b = jnp.sqrt(1 - alpha)
    if schedule.prediction_type == "epsilon":  # the output is the noise
        return (x - b * output) / a, output
    return a * x - b * output, a * output + b * x  # "v_prediction" (Salimans and Ho, 2022)


def mix_noise(image: jax.Array, noise: jax.Array, alpha: jax.Array) -> jax.Array:
    """Return latents of which an image has the share ``alpha`` of the variance, and noise the rest.

    This is formula 12 of Song et al. (2020), without new noise.
    """
    return jnp.sqrt(alpha) * image + jnp.sqrt(1 - alpha) * noise


def plain_step(
    schedule: ScheduleConfig,
    x: jax.Array,
    output: jax.Array,
    point: Point,
    i: jax.Array,
    last: jax.Array,
    memory: tuple,
) -> tuple[jax.Array, tuple]:
    """Take the model's answer as it is: DDIM (Song et al., 2020), Euler (Karras et al., 2022).

    Every sampler's step has these arguments. It returns the latents after the step, and what it
    remembers for the next one.

    Parameters
    ----------
    schedule : ScheduleConfig
    x, output : jax.Array
        Latents and the model's output for them, of the same shape.
    point : Point
        Where the step starts and ends.
    i, last : jax.Array
        The number of this call, from 0 on, and that of the last one.
    memory : tuple
        What the step before returned.
    """
    image, noise = split_image_noise(schedule, x, output, point.alpha)
    return mix_noise(image, noise, point.next_alpha), memory


def no_memory(x: jax.Array) -> tuple:
    """Return what DDIM and Euler remember before the first step: nothing."""
    return ()


def dpm_step(
    schedule: ScheduleConfig,
    x: jax.Array,
    output: jax.Array,
    point: Point,
    i: jax.Array,
    last: jax.Array,
    memory: tuple,
) -> tuple[jax.Array, tuple]:
    """Let the image go on changing as since the last call: DPM-Solver++ 2M (Lu et al., 2022).

    It remembers the image of the last call, and the logarithm of image to noise there. The
    arguments are those of ``plain_step``.
    """
    image, _ = split_image_noise(schedule, x, output, point.alpha)
    ratio = jnp.log(point.alpha / (1 - point.alpha))
    next_ratio = jnp.log(point.next_alpha / (1 - point.next_alpha))
    image_before, ratio_before = memory
    ahead = (next_ratio - ratio) / (ratio - ratio_before) / 2
    ahead = jnp.where((i == 0) | (i == last), 0, ahead)
    better = image + ahead * (image - image_before)
    noise = (x - jnp.sqrt(point.alpha) * better) / jnp.sqrt(1 - point.alpha)
    return mix_noise(better, noise, point.next_alpha), (image, ratio)


def dpm_memory(x: jax.Array) -> tuple:
    """Return what DPM-Solver++ remembers before the first step, which makes no use of it."""
    return jnp.zeros_like(x), jnp.float32(0)


# How much PNDM takes of the last four answers, the newest first, in each of the first four calls
# and in all that follow: in 24ths.
PNDM_WEIGHTS = [
    [24, 0, 0, 0],
    [12, 12, 0, 0],
    [36, -12, 0, 0],
    [46, -32, 10, 0],
    [55, -59, 37, -9],
]


def pndm_step(
    schedule: ScheduleConfig,
    x: jax.Array,
    output: jax.Array,
    point: Point,
    i: jax.Array,
    last: jax.Array,
    memory: tuple,
) -> tuple[jax.Array, tuple]:
    """Take a weighted sum of the last four answers: PNDM (Liu et al., 2022).

    It remembers three of them, (3, batch, height, width, channels), the newest first, and the
    latents before the first step. The arguments are those of ``plain_step``.
    """
    answers, first = memory
    answers = jnp.concatenate([output[None], answers])
    weights = jnp.float32(PNDM_WEIGHTS)[jnp.minimum(i, 4)] / 24
    better = jnp.tensordot(weights, answers, 1)
    first = jnp.where(i == 0, x, first)
    x = jnp.where(i == 1, first, x)  # the first step again, from where it started
    answers = jnp.where(i == 1, answers[1:], answers[:3])  # of that step, only the first answer
    image, noise = split_image_noise(schedule, x, better, point.alpha)
    return mix_noise(image, noise, point.next_alpha), (answers, first)


def pndm_memory(x: jax.Array) -> tuple:
    """Return what PNDM remembers before the first step."""
    nothing = jnp.zeros_like(x)  # made of x, so that it lies where x lies
    return jnp.stack([nothing] * 3), nothing


class Sampler(NamedTuple):
    """Where to ask the model, and what to make of its answers."""

    point: Callable[[ScheduleConfig, jax.Array, jax.Array], Point]
    step: Callable[..., tuple[jax.Array, tuple]]  # as ``plain_step``
    memory: Callable[[jax.Array], tuple] = no_memory  # what the first step gets
    more_calls: int = 0  # than steps, if there are at least two steps


SAMPLERS = {
    "ddim": Sampler(ddim_point, plain_step),
    "euler": Sampler(euler_point, plain_step),
    "dpm++": Sampler(dpm_point, dpm_step, dpm_memory),
    "pndm": Sampler(pndm_point, pndm_step, pndm_memory, more_calls=1),
}


def sample(
    model: Callable[[jax.Array, jax.Array], jax.Array],
    schedule: ScheduleConfig,
    noise: jax.Array,
    steps: int | jax.Array,
    sampler: str | None = None,
    first: int | jax.Array = 0,
    image: jax.Array | None = None,
    after: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Take all steps, from noise to the latents of an image.

    Numbers of steps are inputs of a compiled program, so nothing can be differentiated through the
    loop.

    Parameters
    ----------
    model : callable
        Takes latents and a timestep, and gives its output, all for one call.
    schedule : ScheduleConfig
        That of the model's training.
    noise : jax.Array
        Of variance 1, float32, (batch, height, width, channels).
    steps : int or jax.Array
        How many.
    sampler : str, optional
        A name in ``SAMPLERS``; by default the schedule's own.
    first : int or jax.Array
        The step to begin with: those before are left out.
    image : jax.Array, optional
        Latents of an image, of the noise's shape, to start from: they are put under as much noise
        as the first step expects.
    after : callable, optional
        Gets the latents after each step and their alpha, and gives the latents to go on with.

    Returns
    -------
    jax.Array
        Latents, of the noise's shape.

    Raises
    ------
    ValueError
        If there is no sampler of this name, or it cannot start from an image.
    """
    name = sampler or schedule.sampler
    if name not in SAMPLERS:
        raise ValueError(f"There is no sampler {name!r}: choose one of {', '.join(SAMPLERS)}.")
    point_at, take_step, memory_before, more_calls = SAMPLERS[name]
    if image is not None:
        if more_calls:
            raise ValueError(
                f"The sampler {name!r} cannot start from an image: choose ddim, euler or dpm++."
            )
        x = mix_noise(image, noise, point_at(schedule, steps, first).alpha)
    elif name == "euler" and schedule.timestep_spacing != "leading":
        # With the other spacings, diffusers' Euler starts with a little less noise.
        x = noise * jnp.sqrt(1 - euler_point(schedule, steps, 0).alpha)
    else:
        x = noise
    calls = steps + jnp.where(steps > 1, more_calls, 0)

    def body(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        x, memory = carry
        point = point_at(schedule, steps, i)
        output = model(x, point.timestep).astype(jnp.float32)
        x, memory = take_step(schedule, x, output, point, i - first, calls - 1 - first, memory)
        if after is not None:
            x = after(x, point.next_alpha)
        return x, memory

    x, _ = jax.lax.fori_loop(first, calls, body, (x, memory_before(x)))
    return x
