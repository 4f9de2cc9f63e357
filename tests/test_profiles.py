"""A profile says where the time of a call goes, by the parts that a program names."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import pytest

from course import profiles

PARTS = {"heavy": "a product", "light": "a sine"}


@pytest.fixture(scope="module")
def events():
    """What the profiler noted of a program with much work in one part, and little in another."""

    def work(x):
        with jax.named_scope("heavy"):
            x = jax.lax.fori_loop(0, 20, lambda i, y: y @ x, x)
        with jax.named_scope("light"):
            return jnp.sin(x[0])

    program = jax.jit(work).lower(jnp.zeros((300, 300))).compile()
    return profiles.profile_call(program, jnp.zeros((300, 300)))


def test_time_is_that_of_the_parts(events):
    spent = profiles.time_by_part(events, PARTS)
    assert spent["a product"] > spent["a sine"] > 0
    assert spent.total() == pytest.approx(sum(event.duration for event in events))


def test_events_are_in_order_and_none_contains_others(events):
    assert [event.start for event in events] == sorted(event.start for event in events)
    assert events[0].start == 0
    assert not any(event.origin.endswith("/while") for event in events)


def test_the_first_pattern_that_is_found_decides():
    assert profiles.find_part("jit(work)/light/heavy/dot", PARTS) == "a product"
    assert profiles.find_part("jit(work)/copy", PARTS) == "others"


def test_a_timeline_has_a_colour_for_each_part_that_ran(events):
    figure, axes = plt.subplots()
    profiles.draw_timeline(axes, events, PARTS, 0, events[-1].start + 1)
    labels = {text.get_text() for text in axes.get_legend().get_texts()}
    assert {"a product", "a sine"} <= labels
    assert axes.get_yticklabels()
    plt.close(figure)
