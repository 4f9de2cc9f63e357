"""Attention: the kernel for TPUs, and the choice between it and the plain one."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pallas_tpu

from course.model import attention


def made_up(*shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(0), (3, *shape)).astype(dtype)


def lowered(function, tokens, keys, platform):
    """The text of a program for a platform that need not be here."""
    query, key = (jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (tokens, keys))
    return jax.jit(function).trace(query, key, key).lower(lowering_platforms=(platform,)).as_text()


# 200 tokens fill no block, and heads of 160 do not fill the width of a register.
@pytest.mark.parametrize(("tokens", "size"), [(200, 40), (128, 160)])
def test_the_kernel_gives_what_plain_attention_gives(tokens, size):
    query, key, value = made_up(1, tokens, 1, size)
    with pallas_tpu.force_tpu_interpret_mode():
        found = attention.flash_kernel(query, key, value)
    assert jnp.abs(found - attention.plain(query, key, value)).max() < 2e-6


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


def test_the_kernel_is_refused_by_name_where_there_is_no_tpu():
    with pytest.raises(ValueError, match="runs on TPUs only, and this is a cpu: choose the"):
        attention.find_attention("flash")


def test_an_attention_that_does_not_exist_is_refused_with_those_that_do():
    with pytest.raises(
        ValueError, match=r"no attention 'fast': choose one of plain, dot_product, flash"
    ):
        attention.find_attention("fast")


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
