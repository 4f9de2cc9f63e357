"""Attention: what all functions for it give, the kernel for TPUs, and the choice among them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pallas_tpu
from jax.experimental.pallas.ops.tpu import splash_attention as pallas

from course.model import attention
from tests.makers.common import made_up_input


def made_up(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (3, *shape)).astype(dtype)


def lowered(function, tokens, keys, platform):
    """The text of a program for a platform that need not be here."""
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (tokens, keys))
    return jax.jit(function).trace(query, key, key).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("name", attention.ATTENTION)
def test_every_attention_is_softmax_of_scores_times_values(name):
    query = made_up_input("query", 2, 5, 3, 8)
    key = made_up_input("key", 2, 7, 3, 8)
    value = made_up_input("value", 2, 7, 3, 8)
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8))
    weights /= weights.sum(axis=-1, keepdims=True)
    expected = np.einsum("bhqk,bkhd->bqhd", weights, value)
    found = attention.ATTENTION[name](query, key, value)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1e-5


# 200 tokens fill no block, and heads of 160 do not fill the width of a register.
@pytest.mark.parametrize(("tokens", "size"), [(200, 40), (128, 160)])
def test_the_kernel_gives_what_plain_attention_gives(tokens, size):
    query, key, value = made_up(1, tokens, 1, size)
    with pallas_tpu.force_tpu_interpret_mode():
        found = attention.flash_kernel(query, key, value)
    assert jnp.abs(found - attention.plain(query, key, value)).max() < 2e-6


# 200 tokens do not fill their block.
@pytest.mark.parametrize("tokens", [200, 128])
def test_the_splash_kernel_gives_what_plain_attention_gives(monkeypatch, tokens):
    """By Pallas' own interpreter: that for TPUs has none for a batch of this kernel."""
    make = functools.partial(pallas.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(pallas, "make_splash_mha_single_device", make)
    query, key, value = made_up(2, tokens, 2, 128)
    found = attention.splash(query, key, value, score_dtype=jnp.float32)
    assert jnp.abs(found - attention.plain(query, key, value)).max() < 4e-6


# 50 queries are one chunk, several, or one each.
@pytest.mark.parametrize("limit", [2**27, 6 * 200 * 4 * 8, 1])
def test_chunks_of_queries_give_what_all_at_once_give(monkeypatch, limit):
    monkeypatch.setattr(attention, "CHUNK_BYTES", limit)
    query = made_up_input("query", 2, 50, 3, 8)
    key, value = made_up_input("key", 2, 200, 3, 8), made_up_input("value", 2, 200, 3, 8)

    def squares(attend):
        return lambda *inputs: jnp.square(attend(*inputs)).sum()

    expected = attention.plain(query, key, value)
    assert np.abs(attention.chunked(query, key, value) - expected).max() < 1e-6
    gradients = [
        jax.grad(squares(attend), argnums=(0, 1, 2))(query, key, value)
        for attend in (attention.plain, attention.chunked)
    ]
    for whole, chunks in zip(*gradients, strict=True):
        assert np.abs(whole - chunks).max() < 1e-5


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
def test_chunks_leave_most_scores_out_of_memory(gradient):
    """24 heads of 4,608 tokens: FLUX.2-klein's, for 1024 x 1024 pixels."""

    def total(*inputs):
        return attention.chunked(*inputs).astype(jnp.float32).sum()

    shape = jax.ShapeDtypeStruct((1, 4608, 24, 128), jnp.bfloat16)
    function = jax.grad(total) if gradient else attention.chunked
    memory = jax.jit(function).lower(shape, shape, shape).compile().memory_analysis()
    all_scores = 24 * 4608**2 * shape.dtype.itemsize
    assert memory.temp_size_in_bytes < all_scores * (1 if gradient else 0.3)


def test_gpus_get_the_kernel_of_cudnn_where_it_has_one(monkeypatch):
    class GPU:
        compute_capability = "8.9"

    def kernel(query, key, value, implementation):
        return implementation

    monkeypatch.setattr(jax, "devices", lambda: [GPU])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    query, key = jnp.zeros((1, 4608, 24, 128), jnp.bfloat16), jnp.zeros((1, 77, 24, 128))
    assert attention.has_cudnn_kernel(query, query)
    assert attention.automatic(query, query, query) == "cudnn"
    assert not attention.has_cudnn_kernel(query, query.astype(jnp.float32))
    assert not attention.has_cudnn_kernel(query, key.astype(jnp.bfloat16))  # an odd number
    wide = jnp.zeros((1, 64, 1, 512), jnp.bfloat16)
    assert not attention.has_cudnn_kernel(wide, wide)
    GPU.compute_capability = "7.5"  # a T4
    assert not attention.has_cudnn_kernel(query, query)
    monkeypatch.setattr(attention, "chunked", lambda *inputs: "chunked")
    assert attention.automatic(query, query, query) == "chunked"


def test_the_kernel_has_gradients():
    def gradient(*inputs):
        return jax.grad(lambda *inputs: attention.flash(*inputs).astype(jnp.float32).sum())(*inputs)

    assert lowered(gradient, 1024, 1024, "tpu").count("stablehlo.custom_call @tpu_custom_call") == 3


@pytest.mark.parametrize("limit", [256, 512])
@pytest.mark.parametrize("tokens", [1, 128, 200, 988, 1200, 3952, 4096, 4800, 16384])
def test_blocks_are_large_and_hardly_more_than_full(tokens, limit):
    queries, keys = attention.block_sizes(tokens, limit)
    assert queries % 128 == keys % 128 == keys % queries == 0
    assert queries * keys <= 2 * limit**2
    total = keys * -(-tokens // keys)
    assert total < 1.3 * tokens + 128
    assert queries >= min(total, limit // 2)


REFUSALS = {
    "flash": "runs on TPUs only, and this is a cpu: choose the",
    "fast": "no attention 'fast': choose one of automatic, plain, chunked, dot_product, flash",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_attention_that_cannot_be_is_refused_with_what_to_choose(name):
    with pytest.raises(ValueError, match=REFUSALS[name]):
        attention.find_attention(name)


def test_texts_stay_with_plain_attention():
    assert "tpu_custom_call" in lowered(attention.flash, 1024, 1024, "tpu")
    assert "tpu_custom_call" not in lowered(attention.flash, 1024, 77, "tpu")


@pytest.mark.parametrize("name", ["plain", "flash"])
def test_scores_in_float32_leave_values_in_bfloat16(name):
    """As Stable Diffusion 2.1 asks for, whose ``upcast_attention`` is on."""
    wide, value = (
        jax.ShapeDtypeStruct((1, 1024, 2, 64), dtype) for dtype in (jnp.float32, jnp.bfloat16)
    )
    traced = jax.jit(attention.ATTENTION[name]).trace(wide, wide, value)
    assert traced.out_info.dtype == jnp.bfloat16
