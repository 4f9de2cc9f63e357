"""What the TPU compiler said of FLUX.2-klein-4B, which chapter 16 shows."""

import json

import pytest

from benchmarks.record_flux2 import (
    KEPT,
    PARTS,
    QUESTIONS,
    TARGET,
    Question,
    count_flops,
    count_parameters,
    make_arguments,
)

RECORDS = json.loads(TARGET.read_text(encoding="utf-8"))


def test_every_question_is_recorded():
    assert RECORDS["programs"].keys() == {KEPT, *map(str, QUESTIONS)}


@pytest.mark.parametrize("part", PARTS)
def test_the_records_are_of_the_model_as_it_is(part):
    question = Question(part, "v5e", "one chip")
    assert count_flops(question) == RECORDS["flops"][part]
    if str(question) in RECORDS["programs"]:
        recorded = RECORDS["programs"][str(question)]["parameters"]
        assert recorded == count_parameters(make_arguments(question, None)[0])


def test_the_parts_add_up_to_the_whole():
    flops = RECORDS["flops"]
    steps = RECORDS["steps"]
    assert flops["draw"] == flops["encode"] + steps * flops["step"] + flops["decode"]


@pytest.mark.parametrize("part", ["draw", "edit", "encode", "step", "decode"])
def test_the_compiler_counts_about_the_same_operations(part):
    recorded = RECORDS["programs"][f"{part}, v5e, one chip"]
    assert recorded["report"]["work"]["flops"] == pytest.approx(recorded["flops"], rel=0.05)


@pytest.mark.parametrize("program", ["draw, v5e", "draw, v6e", "edit, v5e", "Z-Image step, v5e"])
def test_the_whole_program_fits_one_chip(program):
    report = RECORDS["programs"][f"{program}, one chip"]["report"]
    assert sum(report["memory"].values()) < report["chip"]["usable_hbm"]


def test_no_published_time_is_below_its_bound():
    chips = [program["report"]["chip"] for program in RECORDS["programs"].values()]
    peaks = {chip["name"]: chip["peak"] for chip in chips}
    for run in RECORDS["published"]:
        flops = run["images"] * RECORDS["flops"]["step"]
        assert run["step_seconds"] > flops / (run["chips"] * peaks[run["chip"]])
