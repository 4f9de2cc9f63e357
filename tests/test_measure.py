"""What makes the model faster: guidance left out of some steps, and runs that are measured."""

import jax.numpy as jnp
import pytest

from course import measure
from course.sd.samplers import SAMPLERS
from course.tpu import Times, pieces
from course.tpu.pieces import load_config
from helpers import read_record
from lab.clock import gpu
from lab.score import sd as scores
from tests.makers import small


@pytest.mark.parametrize(
    ("sampler", "steps", "unguided"), [("ddim", 8, 1), ("dpm++", 10, 4), ("ddim", 30, 30)]
)
def test_a_threshold_leaves_guidance_out_of_so_many_steps(sampler, steps, unguided):
    schedule = load_config("shapes-sd").schedule
    below = scores.find_threshold(schedule, sampler, steps, unguided)
    leaves_out = []
    for i in range(steps):
        point = SAMPLERS[sampler].point(schedule, jnp.int32(steps), jnp.int32(i))
        leaves_out.append(bool(point.timestep < below))
    assert leaves_out == [i >= steps - unguided for i in range(steps)]


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


@pytest.fixture
def on_small(monkeypatch):
    """Measure a small model in the place of each."""
    monkeypatch.setattr(pieces, "load_config", lambda model: small.SD)


def test_a_measured_run_is_written_and_read(on_small, tmp_path, capsys):
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


def test_a_run_is_written_where_one_says(on_small, tmp_path):
    """Into a folder, whatever that is called; or as a file, whose folder may be new."""
    folder = tmp_path / "runs.json"
    folder.mkdir()
    for to in (folder, tmp_path / "new" / "mine.json"):
        assert measure.main(["shapes-sd", "--steps", "1", "--calls", "1", "--to", str(to)]) == 0
    assert [file.suffix for file in folder.iterdir()] == [".json"]
    assert measure.read_measured(tmp_path / "new" / "mine.json").steps == 1


def test_flux2_is_measured_in_the_steps_that_suit_the_model_before_distillation(flux2_folder):
    run = measure.measure(str(flux2_folder), calls=1, height=16, width=16)
    assert (run.steps, run.height, run.attention, len(run.seconds)) == (50, 16, "automatic", 1)


def test_a_run_on_a_chip_stands_beside_what_the_compiler_says(on_small, monkeypatch):
    monkeypatch.setattr(measure, "find_chip_name", lambda device: "v5e")
    monkeypatch.setattr(measure, "recorded_times", lambda program: Times(float(program.steps), 2.0))
    run = measure.measure("shapes-sd", steps=3, calls=1)
    assert run.bound == 3.0
    assert run.mfu == pytest.approx(3.0 / run.steady)


def test_a_step_on_a_gpu_is_what_an_image_takes_longer_in_twice_as_many(on_small):
    assert gpu.summarize(3.04, 1.0, 1.8, 4, None) == {
        "first": 3.0,
        "image": 1.0,
        "step": 0.2,
        "peak bytes": None,
    }
    assert gpu.run_jax("shapes-sd", 1).keys() == gpu.summarize(3.04, 1.0, 1.8, 4, None).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "There is no model 'nothing': give sd, sdxl, flux2, shapes-"),
        (["flux2", "--attention", "dot_product"], "FLUX.2 has no attention 'dot_product': leave"),
        (["shapes-flux2", "--width", "60"], "shapes-flux2 cannot draw 64 × 60 pixels: give mult"),
        (["--steps", "0"], "steps is 0: give at least 1."),
        (["--calls", "0"], "calls is 0: give at least 1, and at most 10000."),
        (["--calls", "1000000000"], "calls is 1000000000: give at least 1, and at most 10000."),
        (["--height", "63"], "shapes-sd cannot draw 63 × 64 pixels: give multiples of"),
        (["--attention", "fast"], "There is no attention 'fast': choose one of automatic"),
    ],
)
def test_a_run_that_is_impossible_is_refused_in_a_sentence(arguments, message, capsys, tmp_path):
    assert measure.main([*arguments, "--to", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(message)
    assert not list(tmp_path.iterdir())
