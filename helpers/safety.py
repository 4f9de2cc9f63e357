"""A repair of diffusers' safety checker for new versions of JAX."""

import importlib

import jax
import jax.numpy as jnp


def repair_safety_checker() -> None:
    """Let the safety checker of Flax pipelines run with JAX 0.10 and newer.

    Its ``jax_cosine_distance`` passes ``jnp.clip`` an argument by a name that JAX 0.10 removed, and
    diffusers mends its Flax code no more. This puts a function in its place that computes the same.
    """
    module = "diffusers.pipelines.stable_diffusion.safety_checker_flax"
    importlib.import_module(module).jax_cosine_distance = cosine_similarity


def cosine_similarity(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the cosines between the rows of ``a``, (n, size), and of ``b``, (m, size): (n, m).

    Examples
    --------
    >>> print(cosine_similarity(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 2.0], [6.0, 8.0]])))
    [[0.8 1. ]]
    """
    a = a / jnp.linalg.norm(a, axis=1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=1, keepdims=True)
    return a @ b.T
