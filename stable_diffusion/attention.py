"""Attention: every query looks at all keys, and takes a weighted mean of their values.

The argument ``attention`` says how: a name from ``ATTENTION``, or a function that takes and gives what ``plain`` does.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from stable_diffusion.layers import linear


def plain(query: jax.Array, key: jax.Array, value: jax.Array, causal: bool = False) -> jax.Array:
    """Attention as Vaswani et al. (2017) write it: softmax(query keyᵀ / √size) value.

    ``query`` and the result are (batch, queries, heads, size), ``key`` and ``value`` (batch, keys, heads, size). If
    ``causal``, a query sees only the keys up to its own place, as in the text encoder.
    """
    query, key, value = (x.swapaxes(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))  # heads first
    scores = query @ key.swapaxes(2, 3)  # (batch, heads, queries, keys)
    if causal:
        scores = jnp.where(jnp.tri(*scores.shape[2:], dtype=bool), scores, -jnp.inf)
    return (jax.nn.softmax(scores).astype(value.dtype) @ value).swapaxes(1, 2)


def dot_product(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """``jax.nn.dot_product_attention``, which computes by XLA; shapes as in ``plain``."""
    return jax.nn.dot_product_attention(query.astype(value.dtype), key.astype(value.dtype), value)


def flash_kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's Pallas kernel for TPUs (Dao et al., 2022): it holds one block of scores at a time."""
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas  # slow to import

    batch, tokens, _, size = query.shape
    total, wide = tokens + -tokens % 128, size + (-size % 128 if size > 128 else 0)
    fill = ((0, 0), (0, 0), (0, total - tokens), (0, wide - size))
    query, key, value = (jnp.pad(x.swapaxes(1, 2), fill) for x in (query, key, value))
    real = jnp.broadcast_to(jnp.int32(jnp.arange(total) < tokens), (batch, total))
    fits = 512 if wide < 512 else 256  # wide heads in float32 take all the memory on a v4 chip otherwise
    rows, columns = (max(n for n in range(128, most + 1, 128) if total % n == 0) for most in (fits, 2 * fits))
    ids = pallas.SegmentIds(real, real) if total > tokens else None
    blocks = pallas.BlockSizes(rows, columns, columns, 1, *[rows] * 7)  # of queries, keys twice, images; of gradients
    y = pallas.flash_attention(query, key, value, segment_ids=ids, sm_scale=size**-0.5, block_sizes=blocks)
    return y[:, :, :tokens, :size].swapaxes(1, 2).astype(value.dtype)


def refuse(*_):
    raise ValueError("The flash kernel runs on TPUs only: choose the attention 'auto', which uses it on TPUs only.")


needs_tpu = Primitive("needs_tpu")  # only while a program is lowered does JAX know for which platform it is
needs_tpu.def_abstract_eval(lambda query, key, value: query.update(dtype=value.dtype))
needs_tpu.def_impl(refuse)
mlir.register_lowering(needs_tpu, refuse)


def flash(query: jax.Array, key: jax.Array, value: jax.Array, otherwise=needs_tpu.bind) -> jax.Array:
    """``flash_kernel`` for pixels that look at pixels; ``plain`` for a text, of whose tokens there are few."""
    if query.shape[1] != key.shape[1]:
        return plain(query, key, value)
    return jax.lax.platform_dependent(query, key, value, tpu=flash_kernel, default=otherwise)


def auto(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """On TPUs ``flash`` from 1,024 tokens on, where it accesses the fewest bytes; else ``plain``."""
    return flash(query, key, value, plain) if query.shape[1] >= 1024 else plain(query, key, value)


ATTENTION = {"auto": auto, "plain": plain, "dot_product": dot_product, "flash": flash}


def find_attention(attention: str | Callable) -> Callable:
    """The function that ``attention`` names, or is; a ``ValueError`` if there is none of that name."""
    if not callable(attention) and attention not in ATTENTION:
        raise ValueError(f"There is no attention {attention!r}: choose one of {', '.join(ATTENTION)}, or a function.")
    return attention if callable(attention) else ATTENTION[attention]


def keys_and_values(p: dict, name: str, x: jax.Array, channels: int, heads: int, bias: bool = False) -> tuple:
    """What there is to look at in ``x``, (batch, n, any number): both (batch, n, heads, channels / heads)."""
    shape = (*x.shape[:-1], heads, channels // heads)
    return tuple(linear(p, f"{name}.{part}", x, channels, bias).reshape(shape) for part in ("to_k", "to_v"))


def attend(p: dict, name: str, x: jax.Array, key, value, attention="auto", bias=False, upcast=False) -> jax.Array:
    """diffusers' ``Attention``: (batch, queries, channels) to the same; with ``upcast``, scores are float32."""
    query = linear(p, f"{name}.to_q", x, x.shape[-1], bias).reshape(*x.shape[:-1], *key.shape[-2:])
    if upcast:
        query, key = query.astype(jnp.float32), key.astype(jnp.float32)
    with jax.named_scope("attention"):
        y = find_attention(attention)(query, key, value)
    return linear(p, f"{name}.to_out.0", y.reshape(x.shape), x.shape[-1])
