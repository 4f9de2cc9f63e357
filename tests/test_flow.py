"""What is the small FLUX.2's own in its training, and the checkpoint that it gave."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import flux2
from course.shapes import judge, scenes
from helpers import read_record
from lab.cards import flux2 as cards
from lab.record import find_left
from lab.score import flux2 as scores
from lab.train import data, flow, tokenizers

RECIPE = flow.Recipe(steps=6, cooldown=3, peak=1e-3, warmup=2, batch=8, edits=2, pool=64, pairs=16)
CONFIG = dataclasses.replace(
    flow.CONFIG,
    transformer=dataclasses.replace(
        flow.CONFIG.transformer, num_attention_heads=2, num_single_layers=1
    ),
)


@pytest.fixture(scope="module")
def batch():
    """A function that makes the batch of a key, from random tokens."""
    rng = np.random.default_rng(0)
    pool, pairs = RECIPE.pool, RECIPE.pairs
    arrays = {
        "tokens": rng.normal(size=(pool, 16, 16)),
        "attributes": rng.integers(3, size=(pool, 4)),
        "before": rng.normal(size=(pairs, 16, 16)),
        "after": rng.normal(size=(pairs, 16, 16)),
        "afterwards": rng.integers(3, size=(pairs, 4)),
        "changed": rng.integers(4, size=pairs),
    }
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    tokenize = flow.Tokenizer(tokenizers.learn_qwen(), tokenizers.QWEN_LENGTH)
    arrays["ids"], arrays["mask"] = map(jnp.asarray, tokenize(data.all_captions()))
    return lambda seed: flow.random_batch(jax.random.key(seed), arrays, RECIPE)


def test_the_loss_is_that_of_the_velocity_from_data_to_noise(batch, monkeypatch):
    found = batch(0)
    target = found["noise"] - found["clean"]
    params = flow.make_task(RECIPE, CONFIG).start(jax.random.key(0))
    # The last layer starts from zero, and so does the velocity.
    untrained = flow.loss_fn(params, found, CONFIG)
    assert float(untrained) == pytest.approx(float(jnp.square(target).mean()), rel=1e-6)

    seen = []

    def right(p, config, image, text, time, image_positions, text_positions):
        rows = slice(6, 8) if seen else slice(0, 6)  # first what is drawn, then the edits
        seen.append((image, time))
        more = image.shape[1] - target.shape[1]
        return jnp.pad(target[rows], ((0, 0), (0, more), (0, 0)))

    monkeypatch.setattr(flux2, "velocity", right)
    assert float(flow.loss_fn(params, found, CONFIG)) == 0
    (drawn, times), (edits, edit_times) = seen
    expected = (1 - times[:, None, None]) * found["clean"][:6]
    expected += times[:, None, None] * found["noise"][:6]
    np.testing.assert_allclose(drawn, expected, atol=1e-5)
    np.testing.assert_array_equal(edits[:, 16:], found["reference"])
    np.testing.assert_array_equal(jnp.concatenate([times, edit_times]), found["times"])


def test_edits_get_all_times(batch):
    times = np.concatenate([batch(seed)["times"][-RECIPE.edits :] for seed in range(20)])
    assert times.min() < 0.3
    assert times.max() > 0.8
    assert 0.4 < np.median(times) < 0.75


def test_edits_change_one_attribute_and_nothing_else():
    rng = np.random.default_rng(0)
    for scene in scenes.training_scenes(50, seed=5):
        changed, which = flow.edited(rng, scene)
        differs = [name for name in data.OPTIONS if getattr(scene, name) != getattr(changed, name)]
        assert differs == [list(data.OPTIONS)[which]]
        assert (changed.color, changed.shape, changed.background) not in scenes.held_out()
        (name,) = differs
        if name != "size":  # which may move the shape away from the edge
            assert dataclasses.replace(scene, **{name: getattr(changed, name)}) == changed


def test_times_are_spread_over_all_of_the_distribution():
    recipe = dataclasses.replace(RECIPE, batch=1000, shift=1.0, spread=1.2)
    times = flow.random_times(jax.random.key(0), recipe)
    shares = jax.scipy.stats.norm.cdf(jax.scipy.special.logit(times) / 1.2)
    np.testing.assert_array_equal(jnp.floor(1000 * shares), np.arange(1000))
    times = flow.random_times(jax.random.key(1), recipe)
    assert float(jnp.median(times)) == pytest.approx(0.5, abs=0.01)
    shifted = flow.random_times(jax.random.key(0), dataclasses.replace(recipe, shift=3.0))
    assert float(jnp.median(shifted)) == pytest.approx(0.75, abs=0.01)


# The bundled checkpoint.


@pytest.fixture(scope="module")
def bundled():
    return flux2.load(flow.CHECKPOINT, jnp.float32)


def test_the_record_and_the_card_are_of_the_bundled_checkpoint():
    left = find_left(scores, read_record("score/flux2"))
    assert not left, "the record score/flux2 is of another checkpoint"
    assert cards.tables() in cards.CARD.read_text()
    drawn = cards.own_score()
    assert sum(count["right"] for count in drawn["shapes"].values()) == drawn["right"]
    assert sum(count["asked"] for count in drawn["shapes"].values()) == drawn["pictures"]


def test_the_bundled_checkpoint_draws_what_captions_say(bundled):
    params, config, tokenize = bundled
    asked = scenes.held_out_captions(32)
    ids, mask = tokenize([scenes.caption(**named) for named in asked])
    draw = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    noise = flux2.random_tokens(jax.random.key(0), config, len(asked), 64, 64)
    images = draw(
        params,
        config,
        ids,
        mask,
        noise,
        height=64,
        width=64,
        steps=8,
        guidance=3.0,
        empty=tokenize([""]),
    )
    images = np.asarray(images)
    # Far below the score of the card, so that a broken model fails and chance does not.
    assert judge.count_right(asked, images) / len(asked) >= 0.8
    assert judge.count_right(asked[1:] + asked[:1], images) / len(asked) <= 0.15
