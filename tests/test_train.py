"""Training in small: the loop, what each model has of its own, and the folders that are written."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import flux2, sd
from course.model.autoencoder import decode_latents, encode_latents
from course.model.layers import Parameter
from course.shapes import scenes
from lab.cards import sd as cards
from lab.train import data, export, few_steps, flow, loop, unet, vae
from lab.train.__main__ import main
from lab.train.data import CHECKPOINTS

RECIPE = loop.Recipe(steps=6, cooldown=3, peak=2e-3, warmup=2, batch=4, pool=40)
FLOW = flow.Recipe(steps=6, cooldown=3, peak=1e-3, warmup=2, batch=8, edits=2, pool=64, pairs=16)
FLOW_CONFIG = replace(
    flow.CONFIG,
    transformer=replace(flow.CONFIG.transformer, num_attention_heads=2, num_single_layers=1),
)
FEW = few_steps.Recipe(
    steps=6,
    cooldown=3,
    peak=1e-3,
    warmup=2,
    batch=8,
    edits=2,
    pool=16,
    chunk=16,
    path_steps=4,
)
SMALL = {
    "unet": {
        "block_out_channels": (32,),
        "attention_head_dim": 2,
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
    },
    "vae": {"block_out_channels": (8, 16), "norm_num_groups": 4},
}


@functools.cache
def bundled(name: str) -> tuple:
    return sd.load(CHECKPOINTS / name)


@functools.cache
def small_teacher() -> dict:
    """A teacher with few channels and made-up parameters, and the bundled VAE."""
    declared = flux2.model_parameters(FLOW_CONFIG)

    def start(key: jax.Array, name: str, parameter: Parameter) -> jax.Array:
        return 0.2 * jax.random.normal(key, parameter.shape)

    params = loop.initial_parameters(
        jax.random.key(0), {part: declared[part] for part in flow.TRAINED}, start
    )
    return params | {"vae": flux2.load(flow.CHECKPOINT, jnp.float32)[0]["vae"]}


def write_paths(folder: Path) -> None:
    """Write made-up paths: straight ones, which all end at the same place."""
    noise = np.asarray(few_steps.random_noise(0, FEW, FLOW_CONFIG))
    captions, _, _ = few_steps.ask(0, FEW)
    times = flux2.times(FEW.path_steps)[1:, None, None]
    edits = few_steps.count_edits(FEW)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(
        folder / "0000.npz",
        paths=np.float16(times * noise[:, None] + (1 - times) * np.linspace(-1, 1, 16)),
        captions=captions,
        before=np.float16(noise[:edits]),
        is_right=np.ones(FEW.chunk, bool),
    )


def train(name: str, folder: Path) -> dict:
    """Train a model with few channels, and else as the bundled one of this name."""
    if name in few_steps.WAYS:
        write_paths(folder.parent / "paths")
        return few_steps.train(folder, FEW, FLOW_CONFIG, small_teacher(), name, judged=4)
    _, config, tokenize = bundled("shapes-sdxl" if name == "shapes-sdxl" else "shapes-sd")
    of_vae = bundled("shapes-sd")[0]["vae"]
    if name == "vae":
        return {"vae": vae.train(folder, RECIPE, replace(config.vae, **SMALL["vae"]), judged=4)}
    if name == "shapes-flux2":
        return flow.train(folder, FLOW, FLOW_CONFIG, of_vae, judged=4)
    config = replace(config, unet=replace(config.unet, **SMALL["unet"]))
    earlier = None
    if config.is_xl:  # it starts from the bundled model, as far as that fits
        earlier = {part: bundled("shapes-sd")[0][part] for part in ("unet", "text_encoder")}
    return unet.train(folder, RECIPE, config, tokenize, of_vae, earlier, judged=4)


class Run(NamedTuple):
    """A training from the beginning to the end."""

    name: str
    folder: Path
    params: dict
    task: loop.Task
    data: dict[str, jax.Array]


# The model of shapes-sd is trained as that of shapes-sdxl, which starts from it and is told more.
# Of the ways to train a student it is the one that the bundled one began with.
@pytest.fixture(scope="module", params=["vae", "shapes-sdxl", "shapes-flux2", "reflow"])
def run(request, tmp_path_factory):
    seen = {}
    train_by_loop = loop.train

    def train_and_see(folder, task, data, judge):
        seen.update(task=task, data=data)
        return train_by_loop(folder, task, data, judge)

    folder = tmp_path_factory.mktemp("train") / request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "SAVE_EVERY", 2)
        patch.setattr(few_steps, "RUNS", (1,))
        patch.setattr(loop, "train", train_and_see)
        yield Run(request.param, folder, train(request.param, folder), **seen)


# Which steps are taken is the loop's doing, whatever it trains.
@pytest.mark.parametrize("run", ["vae"], indirect=True)
def test_a_run_that_was_cut_off_takes_the_same_steps(run, monkeypatch):
    folder = run.folder.with_name("cut")
    folder.mkdir()
    for file in run.folder.glob("*.npz"):
        shutil.copyfile(file, folder / file.name)
    make_step = loop.make_step
    taken = []

    def make_cut_step(task):
        step = make_step(task)

        def cut_step(state, number, data):
            if len(taken) == 3:
                raise KeyboardInterrupt
            taken.append(number)
            return step(state, number, data)

        return cut_step

    with monkeypatch.context() as patch:
        patch.setattr(loop, "make_step", make_cut_step)
        with pytest.raises(KeyboardInterrupt):
            train(run.name, folder)
    assert taken == [0, 1, 2]
    resumed = train(run.name, folder)
    assert jax.tree.structure(resumed) == jax.tree.structure(run.params)
    for ours, theirs in zip(jax.tree.leaves(resumed), jax.tree.leaves(run.params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_loss_falls_and_the_log_has_what_was_judged(run):
    batch = jax.jit(run.task.random_batch)(jax.random.key(9), run.data)
    loss = jax.jit(lambda params: run.task.loss(params, batch))
    before = run.task.start(jax.random.key(run.task.recipe.seed))
    after = {part: run.params[part] for part in before}
    assert float(loss(after)) < float(loss(before))
    rows = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == rows[-2]["step"] == run.task.recipe.steps
    assert np.isfinite(rows[-2]["loss"])
    if run.name == "vae":
        assert rows[-1]["psnr"].keys() == {"mean", "worst"}
        assert rows[-1]["restored"]["pictures"] == 4
    elif run.name in few_steps.WAYS:
        final = json.loads((run.folder / "final.json").read_text())
        for counts in (rows[-1], final):
            assert counts["drawn"].keys() == counts["edited"].keys() == {"1"}
    else:
        assert rows[-1]["drawn"].keys() == {"right", *scenes.ATTRIBUTES, "refused", "colors"}


@pytest.mark.parametrize("name", ["shapes-sd", "shapes-sdxl", "shapes-flux2"])
def test_the_export_of_a_bundled_checkpoint_has_the_same_bytes(name, tmp_path):
    """So what is trained anew is read by all that reads the bundled ones: Flax, and diffusers."""
    like = CHECKPOINTS / name
    if name == "shapes-flux2":
        export.export_flux2(flux2.load(like, jnp.bfloat16)[0], like, tmp_path)
    else:
        export.export_sd(bundled(name)[0], like, tmp_path)
    written = {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    bundled_files = {file.relative_to(like) for file in like.rglob("*") if file.is_file()}
    assert written == {file for file in bundled_files if file.suffix not in (".md", ".png")}
    for file in written:
        # Which of two equal forms it has depended on what was saved before it.
        if name != "shapes-sdxl" or file.name != "special_tokens_map.json":
            assert (tmp_path / file).read_bytes() == (like / file).read_bytes(), file


def test_the_command_trains_all_in_order_and_writes_the_checkpoints(tmp_path, monkeypatch):
    trained = []

    def fake(result):
        """A training that writes a log, and gives what is in a bundled checkpoint."""

        def train(folder, recipe, config, tokenize=None, of_vae=None, earlier=None):
            trained.append((folder.name, recipe.steps, earlier is not None))
            folder.mkdir(parents=True)
            (folder / "log.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
            return result(config)

        return train

    def unet_of(config: sd.Config) -> dict:
        return bundled("shapes-sdxl" if config.is_xl else "shapes-sd")[0]

    monkeypatch.setattr(vae, "train", fake(lambda config: bundled("shapes-sd")[0]["vae"]))
    monkeypatch.setattr(unet, "train", fake(unet_of))
    monkeypatch.setattr(flow, "train", fake(lambda config: flux2.load(flow.CHECKPOINT)[0]))
    monkeypatch.setattr(few_steps, "train", fake(lambda config: flux2.load(flow.CHECKPOINT)[0]))
    main(["--work", str(tmp_path), "--shorten", "10"])
    assert trained == [
        ("vae", 300, False),
        ("shapes-sd-first", 600, False),
        ("shapes-sd", 300, True),
        ("shapes-sdxl", 600, True),
        ("flux2", 1150, False),
        ("reflow-0", 80, False),
        ("dmd-0", 16, True),
    ]
    for name in ("shapes-sd", "shapes-sdxl", "shapes-flux2", "shapes-few"):
        assert (tmp_path / "checkpoints" / name / "model_index.json").is_file()
    assert (tmp_path / "checkpoints" / "shapes-sd" / "loss.png").is_file()


def test_the_command_refuses_parts_and_numbers_that_there_are_not(capsys):
    with pytest.raises(SystemExit):
        main(["shapes-sd2"])
    assert "There is no part 'shapes-sd2': choose from vae, shapes-sd" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--shorten", "0"])
    assert "--shorten is 0: choose from 1 to 1000." in capsys.readouterr().err


def test_a_folder_with_another_training_is_refused(tmp_path):
    about = {"batch": 8, "vae": "a hash", "sizes": (1, 2)}
    loop.note_training(tmp_path, about)
    loop.note_training(tmp_path, about)
    with pytest.raises(SystemExit, match="holds a training with another batch: remove it"):
        loop.note_training(tmp_path, about | {"batch": 16})
    with pytest.raises(SystemExit, match="holds a training with another vae"):
        loop.note_training(tmp_path, about | {"vae": "another hash"})
    (tmp_path / "run.json").write_text('{"device": "cpu"}')
    with pytest.raises(SystemExit, match="holds a training by an older version: remove"):
        loop.note_training(tmp_path, about)


def test_the_learning_rate_rises_and_falls_to_zero():
    recipe = replace(RECIPE, steps=1000, cooldown=400, peak=2.0, warmup=100)
    rate = loop.learning_rate(recipe)
    rates = [float(rate(step)) for step in (50, 100, 600, 800, 1000)]
    assert rates == pytest.approx([1, 2, 2, 1, 0], abs=1e-3)


def test_muon_steps_matrices_and_adamw_the_rest():
    _, config, _ = bundled("shapes-sd")
    matrices = loop.matrices_of(sd.model_parameters(config))
    attention = "mid_block.attentions.0.transformer_blocks.*.attn1.to_q.weight"
    assert matrices["unet"][attention][:2] == ((1,), 2)  # axis 0 is that of the layers
    assert matrices["unet"]["conv_in.weight"][:2] == ((0, 1, 2), 3)
    assert matrices["unet"]["conv_in.bias"] is None
    assert matrices["unet"]["conv_norm_out.weight"] is None
    embeddings = "text_model.embeddings.token_embedding.weight"
    assert matrices["text_encoder"][embeddings] is None
    norm = "text_model.encoder.layers.*.layer_norm1.weight"
    assert matrices["text_encoder"][norm] is None


def test_captions_are_numbered_as_they_are_listed():
    captions = data.all_captions()
    scene = scenes.Scene("small", "red", "heart", "white")
    attributes = jnp.array([data.attribute_indices(scene)])
    for named in ((1, 1, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0)):
        number = int(data.caption_number(attributes, jnp.array([named], bool))[0])
        said = {
            name: getattr(scene, name) if is_named else None
            for name, is_named in zip(data.OPTIONS, named, strict=True)
        }
        assert captions[number] == scenes.caption(**said)
        assert data.attributes_of(number) == said


def test_captions_name_all_some_or_nothing():
    attributes = jnp.zeros((10_000, 4), jnp.int32)
    numbers = data.random_captions(jax.random.key(0), attributes, full=0.5)
    counts = [sum(map(bool, data.attributes_of(int(number)).values())) for number in numbers]
    shares = np.bincount(counts, minlength=5) / len(counts)
    some = 0.4 * 0.65 ** np.arange(5) * 0.35 ** np.arange(5)[::-1] * [1, 4, 6, 4, 1]
    np.testing.assert_allclose(shares, some + np.array([0.1, 0, 0, 0, 0.5]), atol=0.015)


def test_every_other_timestep_is_in_the_middle():
    timesteps = unet.random_timesteps(jax.random.key(0), 1000, 1000)
    assert timesteps.dtype == jnp.int32
    np.testing.assert_array_equal(timesteps[::2], np.arange(0, 1000, 2))
    assert unet.MIDDLE[0] <= timesteps[1] < timesteps[-1] < unet.MIDDLE[1]
    assert float(timesteps[1::2].mean()) == pytest.approx(np.mean(unet.MIDDLE), abs=2)


def test_most_empty_captions_of_sdxl_are_not_encoded():
    _, config, _ = bundled("shapes-sdxl")
    arrays = {
        "latents": jnp.zeros((10, 8, 8, 4)),
        "attributes": jnp.zeros((10, 4), jnp.int32),
        "ids": jnp.arange(len(data.all_captions())),  # a number in place of each caption's tokens
    }
    batch = unet.random_batch(jax.random.key(0), arrays, replace(RECIPE, batch=5000), config)
    is_empty = np.asarray(batch.ids == len(arrays["ids"]) - 1)
    assert batch.is_shown[~is_empty].all()
    share = float(batch.is_shown[is_empty].mean())
    assert share == pytest.approx(unet.EMPTY_BUT_ENCODED, abs=0.06)


def test_a_model_starts_from_what_fits_of_an_earlier_one():
    layers = "text_model.encoder.layers.*.layer_norm1.bias"
    params = {"text_encoder": {layers: jnp.zeros((3, 4)), "other": jnp.zeros(2)}}
    earlier = {
        "text_encoder": {layers: jnp.ones((2, 4)), "other": jnp.ones(3), "more": jnp.ones(1)},
        "unet": {"conv_in.bias": jnp.ones(1)},
    }
    started = jax.jit(loop.start_from)(params, earlier)
    np.testing.assert_array_equal(started["text_encoder"][layers].mean(axis=1), [1, 1, 0])
    np.testing.assert_array_equal(started["text_encoder"]["other"], [0, 0])
    assert started.keys() == {"text_encoder"}
    assert started["text_encoder"].keys() == {layers, "other"}


@pytest.fixture(scope="module")
def batch():
    """A function that makes the batch of a key, from random tokens."""
    rng = np.random.default_rng(0)
    pool, pairs = FLOW.pool, FLOW.pairs
    arrays = {
        "tokens": rng.normal(size=(pool, 16, 16)),
        "attributes": rng.integers(3, size=(pool, 4)),
        "before": rng.normal(size=(pairs, 16, 16)),
        "after": rng.normal(size=(pairs, 16, 16)),
        "afterwards": rng.integers(3, size=(pairs, 4)),
        "changed": rng.integers(4, size=pairs),
    }
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    # A number in place of each caption's tokens.
    arrays["ids"] = arrays["mask"] = jnp.arange(len(data.all_captions()))
    return jax.jit(lambda seed: flow.random_batch(jax.random.key(seed), arrays, FLOW))


def test_the_loss_is_that_of_the_velocity_from_data_to_noise(batch, monkeypatch):
    found = batch(0)
    target = found["noise"] - found["clean"]
    seen = []

    def right(p, config, image, text, time, image_positions, text_positions, until):
        assert until is None
        rows = slice(6, 8) if seen else slice(0, 6)  # first what is drawn, then the edits
        seen.append((image, time))
        more = image.shape[1] - target.shape[1]
        return jnp.pad(target[rows], ((0, 0), (0, more), (0, 0)))

    monkeypatch.setattr(flux2, "velocity", right)
    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.zeros((FLOW.batch, 20, 1)))
    assert float(flow.loss_fn({"transformer": {}}, found, FLOW_CONFIG)) == 0
    (drawn, times), (edits, edit_times) = seen
    expected = (1 - times[:, None, None]) * found["clean"][:6]
    expected += times[:, None, None] * found["noise"][:6]
    np.testing.assert_allclose(drawn, expected, atol=1e-5)
    np.testing.assert_array_equal(edits[:, 16:], found["reference"])
    np.testing.assert_array_equal(jnp.concatenate([times, edit_times]), found["times"])


def test_each_block_starts_by_giving_back_what_it_gets_and_the_velocity_from_zero():
    for name in ("single_stream_modulation.linear.weight", "norm_out.linear.weight", "proj_out"):
        parameter = Parameter((4, 6), (None, None))
        assert not flow.start_layer(jax.random.key(0), name, parameter).any()


def test_edits_get_all_times(batch):
    times = np.concatenate([batch(seed)["times"][-FLOW.edits :] for seed in range(20)])
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
            assert replace(scene, **{name: getattr(changed, name)}) == changed


def test_times_are_spread_over_all_of_the_distribution():
    recipe = replace(FLOW, batch=1000, shift=1.0, spread=1.2)
    times = flow.random_times(jax.random.key(0), recipe)
    shares = jax.scipy.stats.norm.cdf(jax.scipy.special.logit(times) / 1.2)
    np.testing.assert_array_equal(jnp.floor(1000 * shares), np.arange(1000))
    times = flow.random_times(jax.random.key(1), recipe)
    assert float(jnp.median(times)) == pytest.approx(0.5, abs=0.01)
    shifted = flow.random_times(jax.random.key(0), replace(recipe, shift=3.0))
    assert float(jnp.median(shifted)) == pytest.approx(0.75, abs=0.01)


def test_a_student_is_asked_for_no_held_out_combination():
    recipe = replace(few_steps.RECIPE, chunk=64)
    for number in range(3):
        captions, asked, before = few_steps.ask(number, recipe)
        edits = few_steps.count_edits(recipe)
        assert (len(captions), len(asked), before.shape) == (64, 64, (edits, 64, 64, 3))
        for named in asked:
            combination = (named["color"], named["shape"], named["background"])
            assert combination not in scenes.held_out()
        said = [sum(map(bool, data.attributes_of(int(number)).values())) for number in captions]
        assert said[-edits:] == [1] * edits  # of an edit, what changes
        assert max(said[:-edits]) == 4
    again, _, _ = few_steps.ask(2, recipe)
    np.testing.assert_array_equal(captions, again)


def test_settings_are_chosen_by_other_captions_than_those_that_are_judged():
    others = few_steps.other_captions(flow.JUDGED)
    assert len(others) == flow.JUDGED
    judged = scenes.held_out_captions(flow.JUDGED)
    for named in others:
        assert named not in judged
        assert (named["color"], named["shape"], named["background"]) in scenes.held_out()


def test_a_path_is_kept_if_it_ends_at_what_was_asked_for_and_is_not_held_out():
    (scene,) = scenes.training_scenes(1, seed=6)
    named = {name: getattr(scene, name) for name in data.OPTIONS}
    assert few_steps.is_right(named, scenes.render(scene))
    assert few_steps.is_right(named | {"shape": None}, scenes.render(scene))
    other = "small" if scene.size == "large" else "large"
    assert not few_steps.is_right(named | {"size": other}, scenes.render(scene))
    nothing = dict.fromkeys(data.OPTIONS)
    color, shape, background = min(scenes.held_out())
    unseen = scenes.Scene("medium", color, shape, background)
    assert not few_steps.is_right(nothing, scenes.render(unseen))
    assert not few_steps.is_right(nothing, np.zeros((64, 64, 3), np.uint8))


def test_paths_of_the_teacher_are_those_of_guided_drawing_and_made_once(tmp_path, monkeypatch):
    teacher, config, tokenize = flux2.load(flow.CHECKPOINT, jnp.float32)
    recipe = replace(FEW, pool=8, chunk=8)
    found = few_steps.prepare(tmp_path, recipe, config, teacher, tokenize)
    chunk = np.load(tmp_path / "0000.npz")
    draws = 8 - few_steps.count_edits(recipe)
    assert found["drawn"].shape == (chunk["is_right"][:draws].sum(), 5, 16, 16)
    assert found["edited"].shape == (chunk["is_right"][draws:].sum(), 5, 16, 16)
    assert len(found["before"]) == len(found["edited"]) == len(found["edited_captions"])

    _, _, before = few_steps.ask(0, recipe)
    noise = few_steps.random_noise(0, recipe, config)
    captions = [data.all_captions()[number] for number in chunk["captions"]]
    for part, guidance, images in (
        (slice(0, draws), 3.0, None),
        (slice(draws, None), 2.0, before),
    ):
        reference = None if images is None else flux2.encode_images(teacher, config, images)
        expected = flux2.denoise(
            teacher,
            config,
            noise[part],
            flux2.encode_prompts(teacher, config, *tokenize(captions[part])),
            64,
            64,
            steps=recipe.path_steps,
            guidance=guidance,
            empty=flux2.encode_prompts(teacher, config, *tokenize([""])),
            reference=reference,
            shift=1.0,
        )
        np.testing.assert_allclose(chunk["paths"][part, -1], expected, atol=5e-3)

    monkeypatch.setattr(few_steps, "make_teaching", lambda *_: None)
    again = few_steps.prepare(tmp_path, recipe, config, teacher, tokenize)
    for name, value in found.items():
        np.testing.assert_array_equal(again[name], value)


def test_between_two_points_a_path_is_straight():
    paths = jax.random.normal(jax.random.key(0), (3, 5, 16, 16))
    points = few_steps.on_path(paths, jnp.float32([1, 0.5, 0]))
    np.testing.assert_array_equal(points, jnp.stack([paths[0, 0], paths[1, 2], paths[2, 4]]))
    between = few_steps.on_path(paths, jnp.full(3, 0.625))
    np.testing.assert_allclose(between, (paths[:, 1] + paths[:, 2]) / 2, atol=1e-6)


def test_examples_go_from_a_time_to_an_earlier_one():
    recipe = replace(FEW, batch=4000, at_noise=0.4, to_data=0.3)
    times, until = map(np.asarray, few_steps.random_times(jax.random.key(0), recipe))
    assert until.min() == 0 and times.max() == 1
    assert (times - until).min() >= few_steps.LEAST_WAY - 1e-6
    assert (times == 1).mean() == pytest.approx(0.4, abs=0.03)
    assert (until == 0).mean() == pytest.approx(0.3, abs=0.03)
    assert ((times > 0.25) & (times < 0.75)).sum() > 2 * (times < 0.25).sum()
    recipe = replace(recipe, nowhere=0.25)
    times, until = few_steps.random_times(jax.random.key(0), recipe)
    assert float((times == until).mean()) == pytest.approx(0.25, abs=0.03)


def made_up_examples() -> dict[str, jax.Array]:
    """Examples on curved paths: x at the time t is e^t times x at the time 0."""
    keys = jax.random.split(jax.random.key(0), 3)
    clean = jax.random.normal(keys[0], (8, 16, 16))
    times, until = few_steps.random_times(keys[1], replace(FEW, nowhere=0.3))
    here = clean * jnp.exp(times)[:, None, None]
    return {
        "clean": clean,
        "noise": clean * jnp.e,
        "here": here,
        "teach": lambda x, times, rows=few_steps.ALL: x,
        "times": times,
        "until": until,
        "is_own": jnp.zeros(8, bool),
        "reference": clean[:2],
        "ids": jnp.zeros((8, 20), jnp.int32),
        "mask": jnp.ones((8, 20), bool),
    }


def exact_average(p, config, x, text, times, reference, until):
    """The average velocity on those paths, (1 - e^-way) / way times x."""
    way = times - until
    share = jnp.where(way > 0, -jnp.expm1(-way) / jnp.maximum(way, 1e-6), 1)
    return x * share[:, None, None]


def test_the_loss_of_a_flow_map_is_0_for_the_exact_average_velocity(monkeypatch):
    batch = made_up_examples()
    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.zeros((8, 20, 1)))
    monkeypatch.setattr(flow, "predict", exact_average)
    assert 0 < int((batch["times"] > batch["until"]).sum()) < 8
    loss = few_steps.meanflow_loss({"transformer": {}}, batch, FLOW_CONFIG)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    monkeypatch.setattr(flow, "predict", lambda p, config, x, *_: x)  # the velocity itself
    assert float(few_steps.meanflow_loss({"transformer": {}}, batch, FLOW_CONFIG)) > 1


def test_a_shortcut_learns_two_steps_of_the_teacher_and_its_own_two_halves(monkeypatch):
    """The teacher's velocity is x, so each of its steps of 1/8 leaves 7/8 of x."""
    keys = jax.random.split(jax.random.key(0), 3)
    path = jax.random.normal(keys[0], (8, 5, 16, 16))
    asked = []

    def teach(x, times, rows):
        asked.append(list(rows))
        return x

    batch = {
        "noise": path[:, 0],
        "new_noise": jax.random.normal(keys[1], (8, 16, 16)),
        "path": path,
        "teach": teach,
        "is_own": jnp.arange(8) % 2 == 0,
        "reference": jax.random.normal(keys[2], (2, 16, 16)),
        "ids": jnp.zeros((8, 20), jnp.int32),
        "mask": jnp.ones((8, 20), bool),
    }
    seen = []

    def predict(p, config, x, text, times, reference, until):
        rows = text[:, 0, 0]
        np.testing.assert_array_equal(reference, batch["reference"][rows[rows >= 6] - 6])
        seen.append((x, times, until))
        way = times - until
        return ((1 - 0.875 ** (8 * way)) / way)[:, None, None] * x

    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.arange(8)[:, None, None])
    monkeypatch.setattr(flow, "predict", predict)
    loss = few_steps.shortcut_loss({"transformer": {}}, batch, FLOW_CONFIG)
    assert float(loss) == pytest.approx(0, abs=1e-4)
    start, times, until = seen[-1]
    np.testing.assert_array_equal(np.stack([times, until], axis=1), few_steps.JUMPS)
    arrived = batch["new_noise"] * (0.875 ** (8 * (1 - times)))[:, None, None]
    own = batch["is_own"][:, None, None]
    expected = jnp.where(own, arrived, few_steps.on_path(path, times))
    np.testing.assert_allclose(start, expected, atol=1e-5)
    assert asked == [[3, 4, 5, 6]] * 2

    monkeypatch.setattr(flow, "predict", lambda p, config, x, *_: x)  # as if a jump were short
    assert float(few_steps.shortcut_loss({"transformer": {}}, batch, FLOW_CONFIG)) > 1


def test_new_noise_is_only_for_captions_that_can_lead_to_no_held_out_combination():
    recipe = replace(FEW, batch=64, edits=8)
    captions = jnp.int32([0, 3999, 9, 1234])  # full, empty, without a background, full
    named = [data.attributes_of(int(number)) for number in captions]
    is_full = [None not in attributes.values() for attributes in named]
    assert is_full == [True, False, False, True]
    arrays = {
        "drawn": jax.random.normal(jax.random.key(0), (4, 5, 16, 16)),
        "drawn_captions": captions,
        "edited": jax.random.normal(jax.random.key(1), (2, 5, 16, 16)),
        "edited_captions": captions[1:3],
        "before": jnp.zeros((2, 16, 16)),
        "ids": jnp.arange(4000),
        "mask": jnp.arange(4000),
    }
    batch = few_steps.random_batch(jax.random.key(2), arrays, recipe, FLOW_CONFIG)
    is_new = (batch["new_noise"] != batch["noise"]).any(axis=(1, 2))
    expected = np.isin(batch["ids"], captions[np.array(is_full)]) | (np.arange(64) >= 56)
    np.testing.assert_array_equal(is_new, expected)


def test_reflow_learns_the_line_between_the_ends_of_a_path(monkeypatch):
    batch = made_up_examples()
    line = batch["noise"] - batch["clean"]
    seen = []

    def predict(p, config, mixed, text, times, reference, until):
        assert until is None
        expected = batch["clean"] + times[:, None, None] * line
        np.testing.assert_allclose(mixed, expected, atol=1e-5)
        seen.append(times)
        return line

    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.zeros((8, 20, 1)))
    monkeypatch.setattr(flow, "predict", predict)
    loss = few_steps.reflow_loss({"transformer": {}}, batch, FLOW_CONFIG)
    assert float(loss) == pytest.approx(0, abs=1e-5)
    np.testing.assert_array_equal(seen, [np.ones(8), batch["times"]])


def test_a_student_learns_to_go_on_from_where_it_arrives_itself(monkeypatch):
    batch = made_up_examples()
    is_own = jnp.arange(8) % 2 == 0
    batch |= {"is_own": is_own}
    line = batch["noise"] - batch["clean"]
    seen = []

    def predict(p, config, mixed, text, times, reference, until):
        seen.append(mixed)
        return jnp.full_like(mixed, 0.5)

    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.zeros((8, 20, 1)))
    monkeypatch.setattr(flow, "predict", predict)
    loss = few_steps.reflow_loss({"transformer": {}}, batch, FLOW_CONFIG)
    times = batch["times"][:, None, None]
    arrived, on_line = batch["noise"] - (1 - times) * 0.5, batch["clean"] + times * line
    expected = jnp.where(is_own[:, None, None], arrived, on_line)
    first, second = seen
    np.testing.assert_array_equal(first, batch["noise"])
    np.testing.assert_allclose(second, expected, atol=1e-5)
    errors = batch["noise"] - 0.5 - batch["clean"], expected - times * 0.5 - batch["clean"]
    mean = sum(float(few_steps.huber(error)) for error in errors) / 2
    assert float(loss) == pytest.approx(mean, rel=1e-4)


def test_a_student_goes_where_the_teacher_finds_an_image_more_likely_than_its_critic(monkeypatch):
    """Each network sees one image in whatever noise: the teacher 2, the critic 1, the student 0."""
    keys = jax.random.split(jax.random.key(0), 3)
    levels = jax.random.uniform(keys[0], (2, 8), minval=0.1)

    def velocity_to(image, x, times):
        return (x - image) / times[:, None, None]

    batch = {
        "noise": jax.random.normal(keys[1], (8, 16, 16)),
        "teach": lambda x, times: velocity_to(2, x, times),
        "text": jnp.zeros((8, 20, 1)),
        "reference": jnp.zeros((2, 16, 16)),
        "levels": levels,
        "more_noise": jax.random.normal(keys[2], (2, 8, 16, 16)),
        "ids": jnp.zeros((8, 20), jnp.int32),
        "mask": jnp.ones((8, 20), bool),
    }
    seen = []

    def predict(p, config, x, text, times, reference, until=None):
        assert until is None
        if p["name"] == "student":
            seen.append((x, times))
        return velocity_to(p["image"], x, times)

    monkeypatch.setattr(flux2, "encode_prompts", lambda *_: jnp.zeros((8, 20, 1)))
    monkeypatch.setattr(flow, "predict", predict)

    def parts(image, critic):
        networks = {"transformer": (image, "student"), few_steps.CRITIC: (critic, "critic")}
        return {part: {"image": each, "name": name} for part, (each, name) in networks.items()}

    def loss(image, critic):
        return few_steps.dmd_loss(parts(image, critic), batch, FLOW_CONFIG)

    monkeypatch.setattr(jax.lax, "stop_gradient", lambda x: x)
    # From 0 it goes (2 - 1) / 2 towards the teacher. The critic's error is (1 - 0) / level.
    critic_error = float(jnp.square(1 / levels[1]).mean())
    assert float(loss(0.0, 1.0)) == pytest.approx(0.5**2 / 2 + critic_error, rel=1e-2)
    # The last call is the one with a gradient: it starts on the student's own way to 0.
    start, times = seen[-1]
    np.testing.assert_array_equal(times, few_steps.STARTS)
    np.testing.assert_allclose(start, batch["noise"] * times[:, None, None], atol=1e-5)
    monkeypatch.undo()


def test_a_part_can_learn_faster_than_others():
    weights = {"weight": jnp.eye(4)}
    params = {"student": weights, "critic": weights}
    names = jax.tree.map(lambda _: None, params)
    task = loop.Task(RECIPE, None, names, None, None, speeds={"critic": 2.0})
    optimizer = loop.make_optimizer(task)
    memory = optimizer.init(params)
    for _ in range(2):  # in the first step the learning rate is 0
        updates, memory = optimizer.update(params, memory, params)
    assert float(jnp.abs(updates["student"]["weight"]).max()) > 0
    np.testing.assert_allclose(
        updates["critic"]["weight"], 2 * updates["student"]["weight"], rtol=1e-6
    )


def test_a_critic_starts_as_the_teacher_and_is_no_part_of_the_student(tmp_path, monkeypatch):
    teacher = small_teacher()
    seen = {}

    def see(folder, task, arrays, judge):
        seen.update(params=task.start(jax.random.key(0)), arrays=arrays)
        return seen["params"]

    monkeypatch.setattr(few_steps, "make_judge", lambda *_: lambda params: {})
    monkeypatch.setattr(loop, "train", see)
    student = few_steps.train(tmp_path / "dmd", FEW, FLOW_CONFIG, teacher, "dmd", judged=4)
    assert student.keys() == {*flow.TRAINED, "vae"}
    critic = seen["params"][few_steps.CRITIC]
    for name, value in teacher["transformer"].items():
        np.testing.assert_array_equal(critic[name], value)
    arrays = {name: np.asarray(seen["arrays"][name]) for name in ("drawn_captions", "before")}
    assert data.is_full(arrays["drawn_captions"]).all()
    assert len(arrays["before"]) == len(seen["arrays"]["edited_captions"]) == 4
    for number in arrays["drawn_captions"]:
        named = data.attributes_of(int(number))
        assert (named["color"], named["shape"], named["background"]) not in scenes.held_out()
    task = few_steps.make_task("dmd", FEW, FLOW_CONFIG, teacher)
    batch = task.random_batch(jax.random.key(1), seen["arrays"])
    levels = batch["levels"]
    assert levels.min() >= few_steps.LEAST_LEVEL and levels.max() <= 1 - few_steps.LEAST_LEVEL
    assert (levels[0] != levels[1]).all()
    assert len(np.unique(batch["noise"])) == batch["noise"].size


@pytest.mark.parametrize("way", few_steps.WAYS)
def test_a_student_starts_as_its_teacher(way):
    teacher = small_teacher()
    task = few_steps.make_task(way, FEW, FLOW_CONFIG, teacher)
    params = task.start(jax.random.key(0))
    student = few_steps.student_config(way, FLOW_CONFIG)
    mixed = jax.random.normal(jax.random.key(1), (3, 16, 16))
    text = jax.random.normal(jax.random.key(2), (3, 20, 192))
    times = jnp.float32([1, 0.5, 0.2])
    until = jnp.zeros(3) if student.transformer.guidance_embeds else None
    asked = mixed, text, times, mixed[:1]
    found = flow.predict(params["transformer"], student, *asked, until)
    expected = flow.predict(teacher["transformer"], FLOW_CONFIG, *asked)
    assert float(jnp.abs(expected).max()) > 0.1
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert few_steps.student_config(way, FLOW_CONFIG).is_distilled


def test_what_a_student_is_exported_as_is_read_again(tmp_path):
    params, config, _ = flux2.load(flow.CHECKPOINT, jnp.bfloat16)
    task = few_steps.make_task("shortcut", FEW, config, params)
    student = few_steps.student_config("shortcut", config)
    written = task.start(jax.random.key(0)) | {"vae": params["vae"]}
    export.export_distilled(written, student, flow.CHECKPOINT, tmp_path)
    read, found, _ = flux2.load(tmp_path, jnp.float32)
    assert found == student
    second = "time_guidance_embed.guidance_embedder.linear_1.weight"
    expected = written["transformer"][second].astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(read["transformer"][second], expected)


def test_edges_are_where_the_colour_changes():
    images = jnp.zeros((1, 4, 6, 3)).at[:, :, 3:, 1].set(0.5)
    np.testing.assert_array_equal(vae.at_edges(images)[0], [[0, 0, 1, 1, 0, 0]] * 4)


def test_an_error_at_an_edge_counts_more_and_no_error_is_no_loss():
    images = jnp.zeros((1, 4, 6, 3)).at[:, :, 3:, 1].set(0.5)
    assert float(vae.picture_loss(images, images)) == 0
    at_edge = vae.picture_loss(images.at[:, :, 2].add(0.2), images)
    elsewhere = vae.picture_loss(images.at[:, :, 0].add(0.2), images)
    assert float(at_edge) > float(elsewhere) > 0


def test_whitening_changes_latents_and_no_picture():
    _, config, _ = bundled("shapes-sd")
    config = replace(config.vae, **SMALL["vae"])
    task = vae.make_task(RECIPE, config)
    p = task.start(jax.random.key(0))["vae"]
    some = [scenes.render(scene) for scene in scenes.training_scenes(32, seed=0)]
    images = np.float32(some) / 255
    white = vae.normalize_latents(p, config, np.stack(some))

    latents, deviation = encode_latents(white, config, images)
    np.testing.assert_allclose(np.asarray(deviation), vae.LATENT_NOISE / 2, rtol=1e-5)
    channels = np.asarray(latents).reshape(-1, 4)
    np.testing.assert_allclose(np.cov(channels.T), np.eye(4), atol=0.01)
    np.testing.assert_allclose(channels.mean(axis=0), 0, atol=1e-3)

    before, _ = encode_latents(p, config, images)
    before = (before - before.mean((0, 1, 2))) / before.std((0, 1, 2))
    expected = decode_latents(p, config, before, clip=False)
    found = decode_latents(white, config, latents, clip=False)
    np.testing.assert_allclose(found, expected, atol=1e-3)


def rendered(captions: list[str]) -> np.ndarray:
    """Draw captions as training would show them, in place of a model."""
    said = {}
    for scene in scenes.training_scenes(20_000, data.POOL_SEED):
        words = scenes.caption(scene.size, scene.color, scene.shape, scene.background)
        said[words] = scene
    return np.stack([scenes.render(said[caption]) for caption in captions]) / np.float32(255)


def test_pictures_that_show_what_captions_say_score_1():
    asked = [named for named in cards.training_captions(60) if all(named.values())][:8]
    report = cards.score(rendered, asked)
    assert (report["pictures"], report["all"], report["refused"]) == (8, 1, 0)
    wrong = cards.score(lambda captions: rendered(captions)[::-1], asked)
    assert wrong["all"] < 0.5


def test_a_copy_of_a_training_picture_is_found(monkeypatch):
    monkeypatch.setattr(unet, "FIRST", replace(unet.FIRST, pool=20_000))
    report = cards.nearest(rendered, None)
    assert report["median distance"] == 0
    assert report["median distance of fresh scenes"] > 0.05
