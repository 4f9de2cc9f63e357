"""What makes the model faster: guidance in halves and left out, and runs that are measured."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from course import measure, sd
from course.sd import pipeline
from course.sd.samplers import SAMPLERS
from course.tpu import Times
from course.tpu.pieces import load_config
from helpers import read_record
from lab.clock import cpu
from lab.score import sd as scores

ROOT = Path(__file__).resolve().parents[1]
SMALL = sd.Config(
    text=(
        sd.TextConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            projection_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            eos_token_id=49,
        ),
    ),
    unet=sd.UNetConfig(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
    ),
    vae=sd.VAEConfig(block_out_channels=(8, 8), norm_num_groups=4),
    schedule=sd.ScheduleConfig("ddim"),
)


@pytest.fixture(scope="module")
def small():
    """``generate`` without a large network: it gives latents in the place of images.

    What stands in for the UNet depends on latents and text.
    """

    def answer(p, config, x, timestep, condition, attention, remat):
        about = next(iter(condition.words.values()))[0].mean((0, 2, 3, 4))
        return x * (1 + 100 * about.reshape(-1, 1, 1, 1))

    def generate(params, *inputs, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "unet", answer)
            patch.setattr(pipeline, "decode", lambda p, config, latents, attention: latents)
            return sd.generate(params, SMALL, *inputs, **options)

    return generate


@pytest.fixture(scope="module")
def inputs():
    """Made-up parameters, two prompts, a key, what not to draw, steps and guidance."""
    ids = jnp.stack([jnp.full((1, 8), n).at[0, -1].set(49) for n in (3, 4)])
    return measure.make_up(SMALL, jnp.float32), ids, jax.random.key(0), ids[:1], 3, 5.0


@pytest.fixture(scope="module")
def late(small, inputs):
    """What is drawn if guidance is left out below a timestep: nowhere, in some steps, in all."""
    draw = jax.jit(small)
    return {below: draw(*inputs, unguided_below=below) for below in (0, 500, 1000)}


def by_halves(generate, devices):
    mesh = jax.make_mesh(
        (devices,), ("half",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    half = functools.partial(generate, guidance_axis="half")
    return jax.jit(jax.shard_map(half, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


def test_guidance_on_two_devices_draws_the_images_of_one(small, inputs, late):
    assert jnp.abs(by_halves(small, 2)(*inputs) - late[0]).max() < 1e-5
    assert jnp.abs(late[1000] - late[0]).max() > 1e-2  # guidance does change them


@pytest.mark.parametrize("devices", [1, 3])
def test_guidance_needs_an_axis_of_two_devices(small, inputs, devices):
    with pytest.raises(
        ValueError, match=rf"the axis 'half' has {devices} device\(s\): give it two"
    ):
        by_halves(small, devices)(*inputs)


def test_guidance_is_left_out_below_a_timestep(small, inputs, late):
    without = jax.jit(functools.partial(small, guided=False))(*inputs)
    assert jnp.abs(late[1000] - without).max() < 1e-5
    assert min(jnp.abs(late[500] - late[other]).max() for other in (0, 1000)) > 1e-2


@pytest.mark.parametrize(
    ("sampler", "steps", "unguided"), [("ddim", 8, 1), ("dpm++", 10, 4), ("ddim", 30, 30)]
)
def test_a_threshold_leaves_guidance_out_of_so_many_steps(sampler, steps, unguided):
    schedule = load_config("shapes-sd").schedule
    below = scores.find_threshold(schedule, sampler, steps, unguided)
    timesteps = [
        SAMPLERS[sampler].point(schedule, jnp.int32(steps), jnp.int32(i)).timestep
        for i in range(steps)
    ]
    assert [timestep < below for timestep in timesteps] == [False] * (steps - unguided) + [
        True
    ] * unguided


def test_every_setting_is_scored():
    rows = read_record("score/sd")
    scored = [row["question"] for row in rows]
    assert all(question in scored for question in scores.questions(rows))
    assert all(question in scores.questions(rows) for question in scored)
    assert all(0 <= row["answer"]["right"] <= row["answer"]["pictures"] for row in rows)


def test_the_best_setting_is_the_least_work_at_an_equal_score():
    rows = []
    for sampler, steps, unguided, right in (
        ("ddim", 30, 0, 90),
        ("ddim", 8, 0, 90),
        ("ddim", 8, 1, 89),
        ("ddim", 8, 2, 88),
        ("dpm++", 4, 0, 70),
    ):
        setting = {"sampler": sampler, "steps": steps, "unguided": unguided}
        answer = {"right": right, "pictures": 100}
        rows.append({"question": scores.USUAL | setting, "answer": answer})
    in_int8 = rows[3]["question"] | {"weights": "int8"}
    rows.append({"question": in_int8, "answer": {"right": 99, "pictures": 100}})
    assert scores.find_best(rows) == rows[2]


def test_the_weights_for_pytorch_are_the_bundled_ones(tmp_path):
    source = ROOT / "checkpoints" / "shapes-sd"
    cpu.write_for_pytorch(source, tmp_path)
    params, config, _ = sd.load(tmp_path)
    expected, expected_config, _ = sd.load(source)
    assert config == expected_config
    assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))


def test_a_measured_run_is_written_and_read(small, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(measure, "load_config", lambda model: SMALL)
    assert measure.main(["shapes-sd", "--steps", "2", "--calls", "2", "--to", str(tmp_path)]) == 0
    assert "shapes-sd, 2 steps, batch 1, on cpu: " in capsys.readouterr().out
    (file,) = tmp_path.iterdir()
    run = measure.read_measured(file)
    assert (run.model, run.steps, run.height, run.dtype) == ("shapes-sd", 2, 64, "float32")
    assert len(run.seconds) == 2
    assert run.steady > 0
    assert run.bound is None  # for a CPU nobody asked the TPU compiler
    file.write_text(file.read_text().replace('"steps"', '"stepps"'))
    with pytest.raises(TypeError, match="stepps"):
        measure.read_measured(file)


def test_every_contributed_run_can_be_read():
    """There may be none yet; then nothing is wrong with them."""
    assert all(run.steady > 0 for run in measure.measured_runs())


def test_a_run_on_a_chip_stands_beside_what_the_compiler_says(small, monkeypatch):
    monkeypatch.setattr(measure, "load_config", lambda model: SMALL)
    monkeypatch.setattr(measure, "find_chip_name", lambda device: "v5e")
    monkeypatch.setattr(measure, "recorded_times", lambda program: Times(float(program.steps), 2.0))
    run = measure.measure("shapes-sd", steps=3, calls=1)
    assert run.bound == 3.0
    assert run.mfu == pytest.approx(3.0 / run.steady)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "There is no model 'nothing': give sd, sdxl, shapes-sd"),
        (["--steps", "0"], "steps is 0: give at least 1."),
        (["--calls", "0"], "calls is 0: give at least 1."),
        (["--height", "63"], "shapes-sd cannot draw 63 × 64 pixels: give multiples of"),
        (["--attention", "fast"], "There is no attention 'fast': choose one of plain"),
    ],
)
def test_a_run_that_is_impossible_is_refused_in_a_sentence(arguments, message, capsys, tmp_path):
    assert measure.main([*arguments, "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(message)
    assert not list(tmp_path.iterdir())
