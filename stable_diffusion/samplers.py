"""Samplers: from noise to latents of an image, in a few steps.

All split the latents into image and noise by the model's answer, and mix the two with less noise. They differ in where
they ask, and in how they improve an answer by earlier ones. Latents have DDIM's variance; the arithmetic is float32.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from stable_diffusion.configs import ScheduleConfig


class Point(NamedTuple):
    """Where a call of the model stands: three float32 numbers."""

    timestep: jax.Array  # what the model is told
    alpha: jax.Array  # the image's share of the latents' variance before the step; the rest is noise
    next_alpha: jax.Array  # and after it


def alphas(schedule: ScheduleConfig) -> np.ndarray:
    """The image's share of the variance at each timestep of the training: diffusers' ``alphas_cumprod``, float32."""
    power = {"linear": 1, "scaled_linear": 2}[schedule.beta_schedule]
    ends = schedule.beta_start ** (1 / power), schedule.beta_end ** (1 / power)
    return np.cumprod(1 - np.linspace(*ends, schedule.num_train_timesteps, dtype=np.float32) ** power)


def alpha_at(schedule: ScheduleConfig, timestep: jax.Array) -> jax.Array:
    """Alpha at any timestep: between two whole ones √((1 - alpha) / alpha) is interpolated, as by diffusers' Euler."""
    sigmas = jnp.asarray(np.sqrt(1 / alphas(schedule) - 1))
    below = jnp.floor(timestep).astype(jnp.int32)
    sigma, above = sigmas[below], sigmas[jnp.minimum(below + 1, len(sigmas) - 1)]
    return 1 / (1 + (sigma + (timestep - below) * (above - sigma)) ** 2)


def timestep_at(schedule: ScheduleConfig, points: jax.Array, i: jax.Array) -> jax.Array:
    """The ``i``-th of so many timesteps, from the noisiest on, float32: diffusers' ``timestep_spacing``."""
    total, left = schedule.num_train_timesteps, points - 1 - i
    match schedule.timestep_spacing:
        case "leading":
            return jnp.float32(left * (total // points) + schedule.steps_offset)
        case "linspace":
            return jnp.float32((total - 1) * left) / jnp.maximum(points - 1, 1)
        case "trailing":
            return jnp.round(total - jnp.float32(total * i) / points) - 1


def ddim_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array, start=None) -> Point:
    """diffusers' ``DDIMScheduler``: each step goes down by the same number of timesteps."""
    timestep = jnp.round(timestep_at(schedule, steps, i))
    start = timestep if start is None else start
    end = start - schedule.num_train_timesteps // steps
    last = 1 if schedule.set_alpha_to_one else alphas(schedule)[0]
    next_alpha = jnp.where(end < 0, last, alpha_at(schedule, jnp.maximum(end, 0)))
    return Point(timestep, alpha_at(schedule, start), next_alpha)


def pndm_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array) -> Point:
    """diffusers' ``PNDMScheduler`` without Runge-Kutta steps: it asks where the first step ends, and takes it again.

    So there is one call more than steps. The Flax pipeline leaves out the last.
    """
    place = jnp.where(i == 0, 0, jnp.maximum(i - 1, 1))
    back = jnp.where(i == 1, schedule.num_train_timesteps // steps, 0)
    return ddim_point(schedule, steps, place, start=jnp.round(timestep_at(schedule, steps, place)) + back)


def euler_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array, points=None, whole=False) -> Point:
    """diffusers' ``EulerDiscreteScheduler``: each step ends where the next one starts."""
    points = steps if points is None else points
    now, then = (timestep_at(schedule, points, n) for n in (i, jnp.minimum(i + 1, steps - 1)))
    now, then = (jnp.round(now), jnp.round(then)) if whole else (now, then)
    return Point(now, alpha_at(schedule, now), jnp.where(i + 1 < steps, alpha_at(schedule, then), 1))


def dpm_point(schedule: ScheduleConfig, steps: jax.Array, i: jax.Array) -> Point:
    """diffusers' ``DPMSolverMultistepScheduler``: Euler's points, but of one step more, which it does not take."""
    points = steps if schedule.timestep_spacing == "trailing" else steps + 1
    return euler_point(schedule, steps, i, points, whole=True)


def split(schedule: ScheduleConfig, x: jax.Array, output: jax.Array, alpha: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Image and noise in the latents ``x``, if the model is right: each of the latents' shape."""
    a, b = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
    if schedule.prediction_type == "epsilon":
        return (x - b * output) / a, output
    return a * x - b * output, a * output + b * x  # "v_prediction" (Salimans and Ho, 2022)


def move(image: jax.Array, noise: jax.Array, alpha: jax.Array) -> jax.Array:
    """Mix image and noise: formula 12 of Song et al. (2020), without new noise."""
    return jnp.sqrt(alpha) * image + jnp.sqrt(1 - alpha) * noise


def plain_step(schedule, x, output, point: Point, i, last, memory) -> tuple:
    """DDIM (Song et al., 2020) and Euler (Karras et al., 2022): the answer as it is."""
    return move(*split(schedule, x, output, point.alpha), point.next_alpha), memory


def dpm_step(schedule, x, output, point: Point, i, last, memory) -> tuple:
    """DPM-Solver++ 2M (Lu et al., 2022): the image goes on changing as it did since the last answer."""
    image, _ = split(schedule, x, output, point.alpha)
    now, then = (jnp.log(alpha / (1 - alpha)) for alpha in (point.alpha, point.next_alpha))
    image_before, before = memory
    ahead = jnp.where((i == 0) | (i == last), 0, (then - now) / (now - before) / 2)
    better = image + ahead * (image - image_before)
    noise = (x - jnp.sqrt(point.alpha) * better) / jnp.sqrt(1 - point.alpha)
    return move(better, noise, point.next_alpha), (image, now)


def pndm_step(schedule, x, output, point: Point, i, last, memory) -> tuple:
    """PNDM (Liu et al., 2022): a weighted sum of the last four answers."""
    rows = [[24, 0, 0, 0], [12, 12, 0, 0], [36, -12, 0, 0], [46, -32, 10, 0], [55, -59, 37, -9]]  # / 24, call by call
    answers, first = memory  # (3, *latents), the last one first
    answers = jnp.concatenate([output[None], answers])
    better = jnp.tensordot(jnp.float32(rows)[jnp.minimum(i, 4)] / 24, answers, 1)
    first = jnp.where(i == 0, x, first)
    x = jnp.where(i == 1, first, x)  # the first step again, from where it started
    answers = jnp.where(i == 1, answers[1:], answers[:3])
    return move(*split(schedule, x, better, point.alpha), point.next_alpha), (answers, first)


class Sampler(NamedTuple):
    """Where to ask the model, and what to make of its answers."""

    point: Callable
    step: Callable
    memory: Callable = lambda x: ()  # what is carried from step to step, before the first
    more_calls: int = 0  # than steps, if there are at least two


SAMPLERS = {
    "ddim": Sampler(ddim_point, plain_step),
    "euler": Sampler(euler_point, plain_step),
    "dpm++": Sampler(dpm_point, dpm_step, lambda x: (jnp.zeros_like(x), jnp.float32(0))),
    "pndm": Sampler(pndm_point, pndm_step, lambda x: (jnp.zeros((3, *x.shape)), jnp.zeros_like(x)), 1),
}


def sample(model, schedule, noise, steps, sampler=None, first=0, image=None, after=lambda x, alpha: x) -> jax.Array:
    """Take all steps from noise, of variance 1 and float32, to latents of an image.

    ``model`` takes latents and a timestep, and gives its output in the latents' shape. The number of steps is an input,
    so nothing can be differentiated through the loop. ``sampler`` is one of ``SAMPLERS``, or does all of this itself.
    With latents of an ``image``, put this under noise, and take the steps from the ``first`` on. ``after`` gets latents
    after each step, with their alpha, and gives what to go on with.
    """
    if callable(sampler):
        return sampler(model, schedule, noise, steps)
    name = sampler or schedule.sampler
    if name not in SAMPLERS:
        raise ValueError(f"There is no sampler {name!r}: choose one of {', '.join(SAMPLERS)}.")
    point_at, take_step, memory, more = SAMPLERS[name]
    if image is not None:
        if more:
            raise ValueError(f"The sampler {name!r} cannot start from an image: choose ddim, euler or dpm++.")
        noise = move(image, noise, point_at(schedule, steps, first).alpha)
    # If the spacing is linspace or trailing, diffusers' Euler starts with a little less noise.
    elif point_at is euler_point and schedule.timestep_spacing != "leading":
        noise = noise * jnp.sqrt(1 - euler_point(schedule, steps, 0).alpha)
    calls = steps + jnp.where(steps > 1, more, 0)

    def body(i, carry):
        x, memory = carry
        point = point_at(schedule, steps, i)
        output = model(x, point.timestep).astype(jnp.float32)
        x, memory = take_step(schedule, x, output, point, i - first, calls - 1 - first, memory)
        return after(x, point.next_alpha), memory

    return jax.lax.fori_loop(first, calls, body, (noise, memory(noise)))[0]
