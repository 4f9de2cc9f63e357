"""What the TPU compiler said of FLUX.2-klein-4B, which chapter 16 shows."""

import pytest

from course.tpu.jaxpr import find_products
from course.tpu.records import PUBLISHED_KLEIN, recorded_flops, recorded_products, recorded_splits
from course.tpu.splits import bytes_on_chip
from lab.ask import flux2

PROGRAMS = recorded_splits("ask/flux2")
FLOPS = recorded_flops("flux2")


@pytest.mark.parametrize("name", flux2.PARTS)
def test_the_records_are_of_the_model_as_it_is(name):
    part = flux2.take_part(name)
    assert find_products(part.function, *part.arguments) == recorded_products("flux2")[name]
    program = PROGRAMS.get(f"{name}, v5e, one chip")
    if program:
        assert program.parameters == bytes_on_chip(part.arguments[0])


def test_the_parts_add_up_to_the_whole():
    assert FLOPS["draw"] == FLOPS["encode"] + flux2.STEPS * FLOPS["step"] + FLOPS["decode"]


@pytest.mark.parametrize("part", ["draw", "draw guided", "edit", "encode", "step", "decode"])
def test_the_compiler_counts_about_the_same_operations(part):
    counted = PROGRAMS[f"{part}, v5e, one chip"].report.work.flops
    assert counted == pytest.approx(FLOPS[part], rel=0.05)


@pytest.mark.parametrize("part", ["encode", "step"])
def test_with_weights_on_the_host_a_part_takes_less_than_a_sixth_of_the_device(part):
    whole = PROGRAMS[f"{part}, v5e, one chip"]
    waiting = PROGRAMS[f"{part}, v5e, one chip, from the host"]
    assert waiting.parameters + waiting.on_host == whole.parameters
    assert waiting.report.memory.total < whole.report.memory.total / 6
    assert waiting.report.work.flops == whole.report.work.flops


@pytest.mark.parametrize(
    "program", ["draw, v5e", "draw, v6e", "draw guided, v5e", "edit, v5e", "Z-Image step, v5e"]
)
def test_the_whole_program_fits_one_chip(program):
    assert PROGRAMS[f"{program}, one chip"].report.fits


def test_no_published_time_is_below_its_bound():
    peak = PROGRAMS["draw, v6e, one chip"].report.chip.peak
    for run in PUBLISHED_KLEIN:
        assert run.chip == "v6e"
        assert run.step_seconds > run.images * FLOPS["step"] / (run.chips * peak)
