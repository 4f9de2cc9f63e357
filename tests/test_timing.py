"""time_calls and count_compilations."""

import jax
import jax.numpy as jnp
import pytest

from helpers import count_compilations, time_calls


def test_the_first_call_is_kept_apart():
    calls = []
    timing = time_calls(lambda x: calls.append(x), 3, repeats=4)
    assert calls == [3] * 5
    assert len(timing.later) == 4
    assert min(timing.later) <= timing.steady <= max(timing.later)
    assert "first call" in str(timing) and "median of 4" in str(timing)


def test_results_are_waited_for():
    waited = []

    class Slow:
        def block_until_ready(self):
            waited.append(True)
            return self

    time_calls(lambda: {"nested": [Slow()]}, repeats=1)
    assert len(waited) == 2


def test_a_result_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match="needs a function"):
        time_calls(jnp.ones(3))


def test_no_later_calls_are_refused():
    with pytest.raises(ValueError, match="repeats is 0"):
        time_calls(len, [], repeats=0)


def test_compilations_are_counted_once_for_each_shape():
    double = jax.jit(lambda x: 2 * x)
    inputs = [jnp.ones(3), jnp.zeros(3), jnp.ones(4)]
    counts = []
    for x in inputs:
        with count_compilations() as compiled:
            double(x)
        counts.append(len(compiled))
    assert counts == [1, 0, 1]


def test_nothing_is_counted_outside_the_block():
    with count_compilations() as compiled:
        pass
    jax.jit(lambda x: x - 1)(1.0)
    assert len(compiled) == 0
