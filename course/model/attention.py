"""Attention: each query looks at all keys, and takes a weighted mean of their values.

There are several functions for it, which compute the same. Each takes a query, (batch, queries,
heads, size), a key and a value, both (batch, keys, heads, size), and returns (batch, queries,
heads, size). Where a function of this package has an argument ``attention``, it is one of the names
in ``ATTENTION``, or any function of this kind.

The default is ``automatic``: ``plain``, but on GPUs, where the compiler would keep all scores in
memory. On TPUs the compiler replaces ``plain`` by a kernel of its own, which keeps none, and with
which the decoder of Stable Diffusion XL needs as little memory as with JAX's kernel, ``flash``.
By what the compiler schedules, ``flash`` takes fewer cycles for Stable Diffusion XL, and another
kernel of JAX's, ``splash``, for FLUX.2-klein (``python -m lab.record ask/kernels``), but nobody has
measured them on a chip with these models.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from course.model.layers import (
    Parameter,
    linear,
    linear_parameters,
    matrix_parameters,
    split_batch,
    within,
)

CHUNK_BYTES = 2**27  # of scores, in ``chunked``


def plain(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: jax.Array | None = None,
    score_dtype: Any = None,
) -> jax.Array:
    """Attention as Vaswani et al. (2017) write it: softmax(query keyᵀ / √size) value.

    ``query`` and the result are (batch, queries, heads, size), ``key`` and ``value`` (batch, keys,
    heads, size). ``mask`` says which keys a query sees: bool, (batch or 1, heads or 1, queries or
    1, keys). Scores have the dtype of the queries and keys, or ``score_dtype``.
    """
    size = query.shape[-1]
    # With heads first, and the scale on the queries, the TPU compiler fuses the products with the
    # softmax, so that the scores of all heads are never in memory.
    query = (query * size**-0.5).swapaxes(1, 2)  # (batch, heads, queries, size)
    key = key.swapaxes(1, 2)  # (batch, heads, keys, size)
    value = value.swapaxes(1, 2)  # (batch, heads, keys, size)
    # (batch, heads, queries, keys)
    scores = jnp.matmul(query, key.swapaxes(2, 3), preferred_element_type=score_dtype)
    if mask is not None:
        scores = jnp.where(mask, scores, -jnp.inf)
    weights = jax.nn.softmax(scores).astype(value.dtype)
    return (weights @ value).swapaxes(1, 2)


def chunked(
    query: jax.Array, key: jax.Array, value: jax.Array, score_dtype: Any = None
) -> jax.Array:
    """``plain`` for some queries at a time, so that the scores of all are never in memory.

    Those of a chunk take up to ``CHUNK_BYTES``. Arguments as in ``plain``.
    """
    batch, queries, heads, size = query.shape
    bytes_of_a_query = batch * heads * key.shape[1] * jnp.dtype(score_dtype or query.dtype).itemsize
    chunk = max(1, CHUNK_BYTES // bytes_of_a_query)
    if queries <= chunk:
        return plain(query, key, value, score_dtype=score_dtype)
    count = math.ceil(queries / chunk)
    query = jnp.pad(query, ((0, 0), (0, count * chunk - queries), (0, 0), (0, 0)))
    chunks = query.reshape(batch, count, chunk, heads, size).swapaxes(0, 1)

    @jax.checkpoint  # which computes a chunk's scores again for its gradients
    def attend_some(some: jax.Array) -> jax.Array:
        return plain(some, key, value, score_dtype=score_dtype)

    y = jax.lax.map(attend_some, chunks)
    return y.swapaxes(0, 1).reshape(batch, count * chunk, heads, size)[:, :queries]


def has_cudnn_kernel(query: jax.Array, key: jax.Array) -> bool:
    """Return whether cuDNN has a kernel for such queries and keys on the GPU that is here.

    It has one for heads of up to 128 channels in 16 bits, from the generation Ampere on, and with
    gradients for even numbers of tokens only.
    """
    return (
        query.dtype == key.dtype
        and query.dtype in (jnp.bfloat16, jnp.float16)
        and query.shape[-1] <= 128
        and query.shape[-1] % 8 == query.shape[1] % 2 == key.shape[1] % 2 == 0
        and float(jax.devices()[0].compute_capability) >= 8
    )


def automatic(
    query: jax.Array, key: jax.Array, value: jax.Array, score_dtype: Any = None
) -> jax.Array:
    """``plain``; on GPUs, cuDNN's kernel, or ``chunked`` where it has none.

    Arguments as in ``plain``. cuDNN adds up in float32, whatever ``score_dtype`` is.
    """
    if jax.default_backend() != "gpu":
        return plain(query, key, value, score_dtype=score_dtype)
    if has_cudnn_kernel(query, key):
        return jax.nn.dot_product_attention(query, key, value, implementation="cudnn")
    return chunked(query, key, value, score_dtype)


def ulysses(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis: str,
    is_real: jax.Array | None = None,
    score_dtype: Any = None,
) -> jax.Array:
    """Attention over tokens that are split over devices (Jacobs et al., 2023), by all-to-alls.

    Each device has some tokens of all heads. It gives them away for all tokens of some heads, so
    that attention is as on one device, and gets its tokens back. Only inside of ``jax.shard_map``.

    Parameters
    ----------
    query, key, value : jax.Array
        This device's tokens, as in ``plain``; its axis of heads is divided by the devices.
    axis : str
        The axis of the mesh over which tokens are split.
    is_real : jax.Array, optional
        Which of this device's tokens are no padding: bool, (tokens,).
    score_dtype : dtype, optional
        As in ``plain``.

    Raises
    ------
    ValueError
        If the devices do not divide the heads.
    """
    check_whole_heads(query.shape[2], jax.lax.axis_size(axis))
    query, key, value = (
        jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True)
        for x in (query, key, value)
    )
    mask = None
    if is_real is not None:
        mask = jax.lax.all_gather(is_real, axis, tiled=True)[None, None, None]
    y = plain(query, key, value, mask, score_dtype)
    return jax.lax.all_to_all(y, axis, split_axis=1, concat_axis=2, tiled=True)


def check_whole_heads(heads: int, devices: int, way: str = "Ulysses") -> None:
    """Raise ``ValueError`` unless each device gets the same number of heads."""
    if heads % devices:
        other = ", or the way 'ring'" if way == "Ulysses" else ""
        raise ValueError(
            f"{way} gives each device whole heads, and {heads} heads cannot be divided by "
            f"{devices} devices: choose a number that divides {heads}{other}."
        )


def ring(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    axis: str,
    is_real: jax.Array | None = None,
    score_dtype: Any = None,
) -> jax.Array:
    """Attention over tokens that are split over devices (Liu et al., 2023), by passing keys on.

    Keys and values go round from device to device, and each device adds what its queries find. As
    in the flash kernel, sums are scaled anew where a larger score turns up. Only inside of
    ``jax.shard_map``; the arguments are those of ``ulysses``, with any number of heads.
    """
    devices = jax.lax.axis_size(axis)
    onward = [(device, (device + 1) % devices) for device in range(devices)]
    batch, queries, heads, size = query.shape
    lowest = -1e30  # not -inf, of which differences are no numbers
    largest = jnp.full((batch, heads, queries, 1), lowest)
    total = jnp.zeros((batch, heads, queries, 1))
    y = jnp.zeros((batch, heads, queries, size))
    query = (query * size**-0.5).swapaxes(1, 2)
    key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
    for turn in range(devices):
        scores = jnp.matmul(query, key.swapaxes(2, 3), preferred_element_type=score_dtype)
        scores = scores.astype(jnp.float32)
        if is_real is not None:
            scores = jnp.where(is_real, scores, lowest)
        before, largest = largest, jnp.maximum(largest, scores.max(-1, keepdims=True))
        weights, shrink = jnp.exp(scores - largest), jnp.exp(before - largest)
        total = shrink * total + weights.sum(-1, keepdims=True)
        found = jnp.matmul(weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
        y = shrink * y + found
        if turn < devices - 1:
            key, value = jax.lax.ppermute((key, value), axis, onward)
            if is_real is not None:
                is_real = jax.lax.ppermute(is_real, axis, onward)
    return (y / total).astype(value.dtype).swapaxes(1, 2)


# How devices get at one another's tokens, inside of ``jax.shard_map``.
OVER_DEVICES = {"ulysses": ulysses, "ring": ring}


def find_way(way: str) -> Callable:
    """Return the function of this name in ``OVER_DEVICES``; others raise ``ValueError``."""
    if way not in OVER_DEVICES:
        raise ValueError(f"There is no way {way!r}: choose one of {', '.join(OVER_DEVICES)}.")
    return OVER_DEVICES[way]


def dot_product(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """``jax.nn.dot_product_attention``, as XLA computes it; shapes as in ``plain``."""
    return jax.nn.dot_product_attention(query.astype(value.dtype), key.astype(value.dtype), value)


def block_sizes(tokens: int, limit: int) -> tuple[int, int]:
    """Return how many queries and how many keys the kernel has on the chip at a time.

    Both are multiples of 128, and one divides the other. Keys and values are read again for each
    block of queries, so blocks are large: up to about ``limit`` queries with twice as many keys,
    for which every chip from v4 on has room. Tokens are spread evenly over the blocks, so that
    little has to be added to fill up the last one.
    """
    blocks = math.ceil(tokens / (2 * limit))
    keys = 128 * math.ceil(tokens / blocks / 128)
    if keys <= limit + limit // 4:
        return keys, keys
    keys = 256 * math.ceil(keys / 256)
    return keys // 2, keys


def flash_kernel(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """JAX's Pallas kernel for TPUs (Dao et al., 2022): it holds one block of scores at a time.

    All three and the result are (batch, tokens, heads, size).
    """
    from jax.experimental.pallas.ops.tpu import flash_attention as pallas  # slow to import

    batch, tokens, _, size = query.shape
    # The kernel takes whole blocks of tokens, and of heads with more than 128 channels multiples of
    # 128. With larger blocks, wide heads in float32 would not fit into the memory on a v4 chip.
    width = size if size <= 128 else 128 * math.ceil(size / 128)
    queries, keys = block_sizes(tokens, limit=512 if width < 512 else 256)
    total = keys * math.ceil(tokens / keys)
    padding = ((0, 0), (0, 0), (0, total - tokens), (0, width - size))
    query = jnp.pad(query.swapaxes(1, 2), padding)  # (batch, heads, total, width)
    key = jnp.pad(key.swapaxes(1, 2), padding)
    value = jnp.pad(value.swapaxes(1, 2), padding)
    segments = None
    if total > tokens:  # the tokens that were added are a segment that no real token looks at
        is_real = jnp.int32(jnp.arange(total) < tokens)
        is_real = jnp.broadcast_to(is_real, (batch, total))
        segments = pallas.SegmentIds(q=is_real, kv=is_real)
    blocks = pallas.BlockSizes(
        block_b=1,
        block_q=queries,
        block_k_major=keys,
        block_k=keys,
        # For the gradients, all blocks have the smaller size.
        block_q_major_dkv=queries,
        block_k_major_dkv=queries,
        block_k_dkv=queries,
        block_q_dkv=queries,
        block_k_major_dq=queries,
        block_k_dq=queries,
        block_q_dq=queries,
    )
    y = pallas.flash_attention(
        query, key, value, segment_ids=segments, sm_scale=size**-0.5, block_sizes=blocks
    )
    return y[:, :, :tokens, :size].swapaxes(1, 2).astype(value.dtype)


def splash(
    query: jax.Array, key: jax.Array, value: jax.Array, score_dtype: Any = None
) -> jax.Array:
    """JAX's other Pallas kernel for TPUs, splash attention, with a mask that hides nothing.

    All three and the result are (batch, tokens, heads, size). Scores are float32, whatever
    ``score_dtype`` is. It has no gradients here. On several devices it has to be inside of
    ``jax.shard_map``, as ``flash``.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as pallas  # slow to import

    tokens, heads, size = query.shape[1:]
    block = min(512, 128 * math.ceil(tokens / 128))
    total = block * math.ceil(tokens / block)
    padding = ((0, 0), (0, 0), (0, total - tokens), (0, 0))
    query = jnp.pad((query * size**-0.5).swapaxes(1, 2), padding)  # (batch, heads, total, size)
    key = jnp.pad(key.swapaxes(1, 2), padding)
    value = jnp.pad(value.swapaxes(1, 2), padding)
    segments = None
    if total > tokens:
        is_real = jnp.int32(jnp.arange(total) < tokens)
        segments = pallas.SegmentIds(q=is_real, kv=is_real)
    mask = pallas.MultiHeadMask([pallas.FullMask((total, total))] * heads)
    blocks = pallas.BlockSizes(block_q=block, block_kv=block)
    kernel = pallas.make_splash_mha_single_device(mask, block_sizes=blocks)
    y = jax.vmap(lambda *inputs: kernel(*inputs, segments))(query, key, value)
    return y[:, :, :tokens].swapaxes(1, 2)


def flash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """``flash_kernel`` where pixels look at pixels, and ``plain`` where they look at a text.

    A text has few tokens, so its scores are small. On several devices it has to be inside of
    ``jax.shard_map``, because the compiler cannot split a kernel.
    """
    if query.shape[1] != key.shape[1]:
        return plain(query, key, value)
    return flash_kernel(query, key, value)


ATTENTION = {
    "automatic": automatic,
    "plain": plain,
    "chunked": chunked,
    "dot_product": dot_product,
    "flash": flash,
}


def find_attention(
    attention: str | Callable, functions: dict[str, Callable] = ATTENTION
) -> Callable:
    """Return the function of this name; a function is returned as it is.

    A name that is not there raises ``ValueError``, and so does that of a kernel where there is no
    TPU.
    """
    if callable(attention):
        return attention
    if attention not in functions:
        names = ", ".join(functions)
        raise ValueError(
            f"There is no attention {attention!r}: choose one of {names}, or a function."
        )
    if attention in ("flash", "splash") and jax.default_backend() != "tpu":
        raise ValueError(
            f"The {attention} kernel runs on TPUs only, and this is a {jax.default_backend()}: "
            f"choose the attention 'automatic', or give the function "
            f"course.model.attention.{attention} to compile it for a TPU that is not here."
        )
    return functions[attention]


def attention_parameters(channels: int, context: int | None = None) -> dict[str, Parameter]:
    """Declare diffusers' ``Attention``; ``context`` is how many channels a text's vectors have."""
    query = matrix_parameters(channels, channels, ("embed", "heads"))
    key = query
    if context is not None:
        key = matrix_parameters(context, channels, ("context", "heads"))
    return {
        **within("to_q", query),
        **within("to_k", key),
        **within("to_v", key),
        **within("to_out.0", linear_parameters(channels, channels, ("heads", "embed"))),
    }


def keys_and_values(p: dict, name: str, x: jax.Array, heads: int) -> tuple[jax.Array, jax.Array]:
    """Return the keys and values that queries find in ``x``, (batch, tokens, any number).

    Both are (batch, tokens, heads, size of a head).
    """
    batch, tokens, _ = x.shape
    key = linear(p, f"{name}.to_k", x).reshape(batch, tokens, heads, -1)
    value = linear(p, f"{name}.to_v", x).reshape(batch, tokens, heads, -1)
    return split_batch(key), split_batch(value)


def attend(
    p: dict,
    name: str,
    x: jax.Array,
    key: jax.Array,
    value: jax.Array,
    attention: str | Callable = "automatic",
    upcast: bool = False,
) -> jax.Array:
    """diffusers' ``Attention``: from (batch, queries, channels) to the same shape.

    ``key`` and ``value`` come from ``keys_and_values``. With ``upcast``, scores are float32.
    """
    batch, queries, _ = x.shape
    heads, size = key.shape[-2:]
    query = split_batch(linear(p, f"{name}.to_q", x).reshape(batch, queries, heads, size))
    if upcast:
        query = query.astype(jnp.float32)
        key = key.astype(jnp.float32)
    with jax.named_scope("attention"):
        y = find_attention(attention)(query, key, value)
    return linear(p, f"{name}.to_out.0", y.reshape(batch, queries, -1))
