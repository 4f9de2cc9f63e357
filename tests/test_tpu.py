"""The TPU compiler, asked without a TPU: programs compile, bytes add up, and each problem is one sentence."""

import platform

import pytest

from benchmarks import record_tpu
from helpers import tpu

# A chapter whose program is to compile for a TPU: the bundled checkpoint that it runs, and how.
CHAPTERS = [("shapes-sd", "pmap"), ("shapes-sd", "jit")]


@pytest.mark.parametrize(("pipeline", "parallel"), CHAPTERS)
def test_a_chapters_program_compiles_for_eight_chips_and_for_one_alike(pipeline, parallel):
    answers = [tpu.memory_report(tpu.Program(pipeline, "v5e", chips, steps=2, parallel=parallel)) for chips in (8, 1)]
    assert all(answer["fits"] for answer in answers)
    if parallel == "pmap":  # no chip talks to another, so their number changes nothing
        eight, one = (answer["hbm"] for answer in answers)
        for kind in ("parameters", "temporaries", "output"):
            assert eight[kind] == one[kind]
        # The instructions themselves differ by about a thousandth.
        assert eight["program"] == pytest.approx(one["program"], rel=0.01)
        assert answers[0]["whole"]["flops"] == pytest.approx(answers[1]["whole"]["flops"], rel=1e-3)


def test_the_parameters_are_as_many_as_published():
    for model, millions in {
        "sd": {"unet": 859.5, "text_encoder": 123.1, "vae": 83.7},
        "sdxl": {"unet": 2567.5, "text_encoder": 123.1, "text_encoder_2": 694.7, "vae": 83.7},
    }.items():
        _, params = tpu.load_shapes(model, "float32")
        for part, expected in millions.items():
            assert tpu.tree_bytes(params[part]) / 4e6 == pytest.approx(expected, abs=0.06), (model, part)


def test_an_unknown_chip_is_refused():
    with pytest.raises(ValueError, match="No chip 'v9' is known here: choose one of v4, v5e, v5p, v6e"):
        tpu.Program("sd", "v9")


def test_an_unknown_pipeline_is_refused():
    with pytest.raises(ValueError, match="'nothing' is no pipeline: give sd, sdxl, shapes-sd"):
        tpu.load_shapes("nothing")


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Windows", "AMD64"), ("Linux", "aarch64")])
def test_other_systems_get_one_sentence(monkeypatch, system, machine):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(RuntimeError, match=f"and this is {system} on {machine}"):
        tpu.require_compiler()


def test_without_libtpu_the_command_that_installs_it_is_given(monkeypatch):
    monkeypatch.setattr(tpu.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'jax\[tpu\]'"):
        tpu.require_compiler()


def test_the_compilers_two_ways_to_say_out_of_memory_are_understood():
    needs = int(17.5 * tpu.GIB)
    for message in (
        "Ran out of memory on HBM, the total memory required for HLO temporaries (17.5G) "
        "exceeds available HBM (15.75G).",
        "Ran out of memory in memory space hbm. Used 17.5G of 15.75G hbm. Exceeded hbm capacity by 1.75G.",
    ):
        assert tpu._out_of_memory(message) == {"needs": needs, "available": tpu.CHIPS["v5e"].hbm}


@pytest.mark.parametrize(("each", "expected"), [(5, 2), (20, 0), (9, 1), (1, 14)])
def test_the_largest_batch_is_confirmed_at_n_and_n_plus_1(monkeypatch, each, expected):
    def answer(program, **_):
        needs = (1 + each * program.batch) * tpu.GIB
        return {"fits": needs <= tpu.CHIPS["v5e"].hbm, "needs": needs}

    monkeypatch.setattr(tpu, "memory_report", answer)
    found = tpu.largest_batch(tpu.Program("sd"))
    assert found["largest"] == expected
    tried = {entry["batch"]: entry["fits"] for entry in found["tried"]}
    assert not tried[expected + 1]
    assert expected == 0 or tried[expected]


def test_recorded_parameters_are_those_of_the_configurations():
    for report in tpu.recorded_reports():
        program = report["program"]
        _, params = tpu.load_shapes(program["pipeline"], program["dtype"])
        assert report["parameter_bytes"] == {k: tpu.tree_bytes(v) for k, v in params.items() if k != "scheduler"}


def test_the_most_useful_programs_are_recorded_first():
    assert list(record_tpu.programs())[:2] == ["sd-bfloat16-v5e-batch-1", "sdxl-bfloat16-v5e-batch-1"]
