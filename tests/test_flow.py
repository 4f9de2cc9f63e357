"""Training the small FLUX.2 in JAX, in small, and the checkpoint that it gave."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import record_flow
from course import flux2
from course.shapes import judge, scenes
from tests.makers.files import edit_json
from training import export, flow

RECIPE = flow.Recipe(steps=6, cooldown=3, peak=1e-3, warmup=2, batch=8, edits=2, pool=64, pairs=16)


@pytest.fixture(scope="module")
def small():
    """A transformer and a text encoder of few channels, in the place of the checkpoint's."""
    transformer = dataclasses.replace(
        flow.CONFIG.transformer, num_attention_heads=2, num_single_layers=1
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "CONFIG", dataclasses.replace(flow.CONFIG, transformer=transformer))
        patch.setattr(flow, "JUDGED", 4)
        patch.setattr(flow, "SAVE_EVERY", 2)
        patch.setattr(flow, "Recipe", lambda: RECIPE)
        yield


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """A run from the beginning to the end: its folder, and the averaged parameters."""
    folder = tmp_path_factory.mktemp("flow")
    return folder, flow.train(folder, RECIPE)


def test_a_run_that_was_cut_off_takes_the_same_steps(whole, tmp_path, monkeypatch):
    folder, expected = whole
    data = next(folder.glob("data-*.npz"))
    (tmp_path / data.name).write_bytes(data.read_bytes())
    make_step = flow.make_step
    taken = []

    def make_cut_step(recipe, optimizer):
        step = make_step(recipe, optimizer)

        def cut_step(state, number, data):
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(number)
            return step(state, number, data)

        return cut_step

    monkeypatch.setattr(flow, "make_step", make_cut_step)
    with pytest.raises(KeyboardInterrupt):
        flow.train(tmp_path, RECIPE)
    monkeypatch.undo()
    assert taken == [0, 1, 2]
    resumed = flow.train(tmp_path, RECIPE)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_folder_with_another_training_is_refused(whole, tmp_path):
    folder, _ = whole
    (tmp_path / "run.json").write_bytes((folder / "run.json").read_bytes())
    flow.note_training(tmp_path, RECIPE)
    with pytest.raises(SystemExit, match="holds a training with another batch: remove it"):
        flow.note_training(tmp_path, dataclasses.replace(RECIPE, batch=16))
    edit_json(tmp_path / "run.json", lambda about: about | {"vae": "of another VAE"})
    with pytest.raises(SystemExit, match="holds a training with another vae"):
        flow.note_training(tmp_path, RECIPE)
    (tmp_path / "run.json").write_text('{"device": "cpu"}')
    with pytest.raises(SystemExit, match="holds a training by an older version: remove"):
        flow.note_training(tmp_path, RECIPE)


@pytest.fixture(scope="module")
def batch(whole):
    """A function that makes the batch of a key, from the data of the run."""
    folder, _ = whole
    data = {name: jnp.asarray(value) for name, value in flow.prepare(folder, RECIPE).items()}
    tokenize = flow.Tokenizer(flow.qwen.build(), flow.qwen.MAX_LENGTH)
    data["ids"], data["mask"] = map(jnp.asarray, tokenize(flow.all_captions()))
    return lambda seed: flow.random_batch(jax.random.key(seed), data, RECIPE)


def test_the_loss_is_that_of_the_velocity_from_data_to_noise(batch, monkeypatch):
    found = batch(0)
    target = found["noise"] - found["clean"]
    params = flow.initial_parameters(jax.random.key(0))
    # The last layer starts from zero, and so does the velocity.
    untrained = flow.loss_fn(params, found, RECIPE)
    assert float(untrained) == pytest.approx(float(jnp.square(target).mean()), rel=1e-6)

    seen = []

    def right(p, config, image, text, time, image_positions, text_positions):
        rows = slice(6, 8) if seen else slice(0, 6)  # first what is drawn, then the edits
        seen.append((image, time))
        more = image.shape[1] - target.shape[1]
        return jnp.pad(target[rows], ((0, 0), (0, more), (0, 0)))

    monkeypatch.setattr(flux2, "velocity", right)
    assert float(flow.loss_fn(params, found, RECIPE)) == 0
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


def test_the_log_has_what_was_judged(whole):
    folder, _ = whole
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == RECIPE.steps
    assert rows[-1]["drawn"].keys() == {"right", *scenes.ATTRIBUTES, "refused"}


def test_what_is_exported_loads_as_it_was_trained(whole, tmp_path):
    folder, expected = whole
    params, step = export.trained(folder)
    assert step == RECIPE.steps
    export.export(params, tmp_path)
    loaded, config, tokenize = flux2.load(tmp_path, jnp.bfloat16)
    assert config == flow.CONFIG
    assert tokenize(["a red heart"])[0].shape == (1, 20)
    for name, value in expected["transformer"].items():
        rounded = value.astype(jnp.bfloat16)
        np.testing.assert_array_equal(loaded["transformer"][name], rounded, name)


def test_the_learning_rate_rises_and_falls_to_zero():
    recipe = dataclasses.replace(RECIPE, steps=1000, cooldown=400, peak=2.0, warmup=100)
    rate = flow.learning_rate(recipe)
    rates = [float(rate(step)) for step in (50, 100, 600, 800, 1000)]
    assert rates == pytest.approx([1, 2, 2, 1, 0], abs=1e-3)


def test_edits_change_one_attribute_and_nothing_else():
    rng = np.random.default_rng(0)
    for scene in scenes.training_scenes(50, seed=5):
        changed, which = flow.edited(rng, scene)
        differs = [name for name in flow.OPTIONS if getattr(scene, name) != getattr(changed, name)]
        assert differs == [list(flow.OPTIONS)[which]]
        assert (changed.color, changed.shape, changed.background) not in scenes.held_out()
        (name,) = differs
        if name != "size":  # which may move the shape away from the edge
            assert dataclasses.replace(scene, **{name: getattr(changed, name)}) == changed


def test_captions_are_numbered_as_they_are_listed():
    captions = flow.all_captions()
    scene = scenes.Scene("small", "red", "heart", "white")
    attributes = jnp.array([flow.attribute_indices(scene)])
    for named in ((1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)):
        number = int(flow.caption_number(attributes, jnp.array([named], bool))[0])
        said = {
            name: getattr(scene, name) if is_named else None
            for name, is_named in zip(flow.OPTIONS, named, strict=True)
        }
        assert captions[number] == scenes.caption(**said)


def test_times_are_spread_over_all_of_the_distribution():
    recipe = dataclasses.replace(RECIPE, shift=1.0, spread=1.2)
    times = flow.random_times(jax.random.key(0), 1000, recipe)
    shares = jax.scipy.stats.norm.cdf(jax.scipy.special.logit(times) / 1.2)
    np.testing.assert_array_equal(jnp.floor(1000 * shares), np.arange(1000))
    times = flow.random_times(jax.random.key(0), 1000, dataclasses.replace(RECIPE, shift=1.0))
    assert float(jnp.median(times)) == pytest.approx(0.5, abs=0.01)
    shifted = flow.random_times(jax.random.key(0), 1000, dataclasses.replace(RECIPE, shift=3.0))
    assert float(jnp.median(shifted)) == pytest.approx(0.75, abs=0.01)


# The bundled checkpoint.


@pytest.fixture(scope="module")
def bundled():
    return flux2.load(record_flow.CHECKPOINT, jnp.float32)


def test_the_record_and_the_card_are_of_the_bundled_checkpoint():
    content = record_flow.recorded()
    assert content, "benchmarks/flow.json is of another checkpoint"
    card = (record_flow.CHECKPOINT / "README.md").read_text()
    assert record_flow.tables(content) in card
    drawn = record_flow.row_of(content, edit=False, **record_flow.USUAL)
    assert sum(count["right"] for count in content["shapes"].values()) == drawn["right"]
    assert content["wrong"]["pictures"] == content["pictures"] - drawn["right"]
    assert content["wrong"]["refused"] == drawn["refused"]


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
