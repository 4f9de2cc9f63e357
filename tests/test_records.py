"""What was recorded, how it is shown, and what records it."""

import dataclasses
import importlib
import math
from types import SimpleNamespace

import jax
import pytest

from course import tpu
from course.tpu import make_program, records
from course.tpu.answers import Answer
from course.tpu.jaxpr import find_products
from course.tpu.pieces import parameter_bytes, take_piece
from course.tpu.programs import DECODER, PARTS, STEP, WHOLE
from course.tpu.records import (
    answer_of,
    largest_batch,
    read_answers,
    recorded_answers,
    recorded_times,
    table_of,
)
from helpers import read_record
from lab import record
from lab.ask import programs

GIB = 2**30
MIB = 2**20
V5E = tpu.Chip("v5e", 197e12, 820e9, 128 * MIB, int(15.75 * GIB))
PIPELINES = recorded_answers(attention=None)
VERSIONS = {"jax": "0.10.2", "libtpu": "0.0.42.1"}


def report_of(memory=None, work=None, message=""):
    return tpu.Report(V5E, memory, work, message, 1.0, "2026-11-22", VERSIONS)


ACCEPTED = report_of(tpu.Memory(GIB, GIB, GIB, GIB), tpu.Work(1e12, 1e9, 2**30))
REFUSED = report_of(message="RESOURCE_EXHAUSTED: Ran out of memory\nand more")


# What was recorded


@pytest.mark.parametrize("name", record.SUBJECTS)
def test_everything_is_recorded_and_in_one_form(name):
    subject = importlib.import_module(f"lab.{name.replace('/', '.')}")
    rows = read_record(name)
    assert record.find_left(subject, rows) == {}
    for row in rows:
        assert {"question", "answer", "date", "versions"} <= row.keys()
        assert row.keys() <= record.make_row({}, {}).keys()


def test_recorded_parameters_are_those_of_the_configurations():
    for answer in PIPELINES:
        program = answer.program
        if program.batch > 1:
            continue
        in_bfloat16 = dataclasses.replace(program, dtype="bfloat16")  # built once for each model
        wider = 2 if program.dtype == "float32" else 1
        assert answer.parameters == wider * parameter_bytes(in_bfloat16)
        # The compiler adds inputs, and leaves room around small arrays, of which a small model is
        # made.
        if answer.whole.fits:
            room = 1.5 if program.model.startswith("shapes") else 1.05
            assert 1 <= answer.whole.memory.arguments / answer.parameters < room


def test_the_parts_of_a_recorded_program_add_up_to_the_whole():
    for answer in PIPELINES:
        if not answer.parts:
            assert answer.program.batch > 1 or not answer.whole.fits
            continue
        flops = sum(part.work.flops for part in answer.parts.values())
        assert answer.whole.work.flops == pytest.approx(flops, rel=0.02)


def test_recorded_chips_have_the_figures_of_today():
    try:
        tpu.find_chip("v5e")
    except RuntimeError as error:
        pytest.skip(str(error))
    for answer in recorded_answers():
        for report in answer.pieces.values():
            assert report.chip == tpu.find_chip(answer.program.chip)


def test_no_published_time_is_below_its_bound():
    times = records.published_times()
    assert {published.chip for published, _ in times} == {"v4", "v5e", "v6e"}
    for published, found in times:
        assert 0.3 * published.seconds < found.bound < published.seconds
        assert found.utilization(published.seconds) == found.operations / published.seconds


def test_what_is_said_beforehand_of_a_published_run():
    runs = records.predicted_times()
    assert len(runs) == 8
    said = {}
    for run in runs:
        assert run.by_flops <= run.by_tiles < run.measured
        assert run.by_tiles < run.by_schedule < run.by_cycles
        key = run.published.model, run.published.chip
        said.setdefault(key, []).append(run.by_schedule / run.measured)
    assert all(0.95 < share < 1.1 for share in said["sdxl", "v5e"] + said["sdxl", "v4"])
    # Above 1, so what was measured was faster than this program can be, or too much is counted.
    assert 1.4 < said["sdxl", "v6e"][0] < 1.6
    klein = [share for (model, _), shares in said.items() if model != "sdxl" for share in shares]
    assert len(klein) == 4 and max(klein) < 0.8


def test_bundles_only_add_to_a_roofline():
    for row in read_record("ask/rooflines"):
        answer = row["answer"]
        without = answer["without bundles"]
        assert without["issuing"] == 0 < answer["issuing"]
        assert answer["bytes"] == without["bytes"]
        for bound in ("multiplying", "moving"):
            assert answer[bound] <= without[bound]
        assert sum(answer[of] for of in ("multiplying", "moving", "issuing")) > sum(
            without[of] for of in ("multiplying", "moving")
        )


def test_splash_attention_takes_the_fewest_cycles_of_klein_and_flash_of_xl():
    cycles = {}
    for row in read_record("ask/kernels"):
        model, chip, kernel, part = row["question"].values()
        if part != STEP:
            total = row["answer"]["cycles"] + row["answer"]["others"]
            cycles.setdefault((model, chip), {})[kernel] = total
    for chip in ("v5e", "v6e"):
        klein, xl = cycles["flux2", chip], cycles["sdxl", chip]
        assert klein["splash"] < 0.7 * klein["compiler"] < 0.7 * klein["flash"]
        assert xl["flash"] < 0.65 * xl["compiler"]
        assert xl["flash"] < xl["splash"] < xl["compiler"]


def test_a_step_of_klein_gains_what_its_kernels_gain():
    seconds, alone, in_step = {}, {}, {}
    for row in read_record("ask/kernels"):
        model, chip, kernel, part = row["question"].values()
        if part == STEP:
            seconds.setdefault(chip, {})[kernel] = row["answer"]["seconds"]
            in_step[chip, kernel] = row["answer"]["expected cycles"]["kernels"]
        elif model == "flux2":
            alone[chip, kernel] = row["answer"]["cycles"]
    assert seconds.keys() == {"v5e", "v6e"}
    # It has 25 blocks.
    for asked, cycles in in_step.items():
        assert cycles == pytest.approx(25 * alone[asked], rel=0.03), asked
    for chip, step in seconds.items():
        gains = {kind: step["compiler"][kind] - step["splash"][kind] for kind in records.KINDS}
        assert gains["kernels"] > 0.25 * step["compiler"]["kernels"], chip
        for kind in ("products", "others"):
            assert abs(gains[kind]) < 0.05 * step["compiler"][kind], (chip, kind)


def test_options_of_others_gain_little_or_nothing():
    seconds, exchanging = {}, {}
    for row in read_record("ask/options"):
        piece, chip, options = row["question"].values()
        seconds[piece, chip, options] = sum(row["answer"][bound] for bound in records.BOUNDS)
        exchanging[piece, options] = row["answer"]["exchanging"]
    for piece, chip, options in seconds:
        if options == "recipe":
            assert seconds[piece, chip, options] > seconds[piece, chip, None]
    step = "step of klein over 8 chips"
    assert 0.85 < exchanging[step, "overlap"] / exchanging[step, None] < 0.95


@pytest.mark.parametrize("model", ["sd", "sdxl"])
def test_recorded_products_do_about_the_operations_the_compiler_counts(model):
    """It also counts what is no product, and leaves out what a convolution does to its padding."""
    products = records.recorded_products(model)
    assert products.keys() == set(PARTS)
    for name, found in products.items():
        flops = sum(count * product.flops for product, count in found.items())
        report = records.recorded_report(make_program(model), name)
        assert flops == pytest.approx(report.work.flops, rel=0.1), name


def test_recorded_products_are_those_of_the_pipeline():
    piece = take_piece(make_program("sd"), DECODER)
    found = find_products(piece.function, *piece.arguments)
    assert records.recorded_products("sd")[DECODER] == found


def test_wider_tiles_and_filled_rows_take_longer():
    program = make_program("sdxl", steps=20)
    v5e, v6e = (
        recorded_answers(model="sdxl", attention=None, chip=chip)[0].whole.chip
        for chip in ("v5e", "v6e")
    )
    same_peak = dataclasses.replace(v6e, peak=v5e.peak)
    seconds = [
        records.padded_seconds(program, v5e),
        records.padded_seconds(program, v5e, rows=128),
        records.padded_seconds(program, same_peak),
        records.padded_seconds(program, same_peak, rows=256),
    ]
    assert seconds == sorted(seconds)
    assert len(set(seconds)) == 4


def test_times_need_all_parts_recorded_and_are_for_any_number_of_steps():
    twenty, forty = (
        recorded_times(make_program("sdxl", steps=steps, attention="flash")) for steps in (20, 40)
    )
    assert twenty.bound < forty.bound < 2 * twenty.bound
    assert recorded_times(make_program("sdxl", steps=20, attention="dot_product")) is None
    plain, automatic = (
        recorded_times(make_program("sdxl", steps=20, attention=name))
        for name in ("plain", "automatic")
    )
    assert plain == automatic and plain is not None


@pytest.mark.parametrize("change", ["unknown field", "missing field", "impossible program"])
def test_what_is_no_answer_is_not_read(change):
    program = make_program("shapes-sd")
    question = dataclasses.asdict(program) | {"piece": WHOLE}
    row = record.make_row(question, answer_of(ACCEPTED, parameters=7))
    row |= {"date": ACCEPTED.date, "versions": ACCEPTED.versions}
    assert read_answers([row]) == [Answer(program, {WHOLE: ACCEPTED}, parameters=7)]
    if change == "unknown field":
        row["answer"]["report"]["watts"] = 1
    elif change == "missing field":
        del row["answer"]["report"]["work"]["flops"]
    else:
        row["question"]["height"] = 63
    with pytest.raises((TypeError, ValueError)):
        read_answers([row])


# Tables


def test_the_table_has_a_row_for_each_program_and_its_largest_batch():
    program = make_program("sdxl", steps=20)
    memory = tpu.Memory(2 * GIB, MIB, 3 * MIB // 2, 0)
    works = {
        WHOLE: tpu.Work(1e12, 1e9, 1),
        PARTS[0]: tpu.Work(3e12, 1e9, 1),
        STEP: tpu.Work(3e12, 1e9, 1),
        DECODER: tpu.Work(2e12, 1e9, 1),
    }
    first = Answer(program, {name: report_of(memory, work) for name, work in works.items()})
    later = dataclasses.replace(
        report_of(memory), date="2026-11-24", versions=VERSIONS | {"jax": "0.99"}
    )
    larger = [
        Answer(dataclasses.replace(program, batch=batch), {WHOLE: report})
        for batch, report in ((2, later), (3, REFUSED), (8, REFUSED))
    ]
    other = Answer(make_program("sdxl", "v6e", steps=20, split_head_dim=False), {WHOLE: REFUSED})
    table = table_of([first, *larger, other]).replace("\N{NO-BREAK SPACE}", " ")
    rows = []
    for line in table.splitlines():
        if line.startswith("|"):
            rows.append([cell.strip() for cell in line.split("|")[1:-1]])
    name = "sdxl, 1024 × 1024, 20 steps, bfloat16"
    sizes = ["2,048.0", "1.0", "1.5", "0.0"]
    least_bytes = 3  # of one run of each part: they fit into the memory on the chip
    times = [f"{65e12 / V5E.peak:.3g} s", f"{least_bytes / V5E.bandwidth:.3g} s"]
    assert rows[2:] == [
        [name, "1 × v5e", "1", "yes", *sizes, "65,000", *times, "1 s"],
        [name, "1 × v5e", "2, the largest", "yes", *sizes, "", "", "", "1 s"],
        [f"{name}, split_head_dim=False", "1 × v6e", "1", "no", *[""] * 7, "1 s"],
    ]
    by = "libtpu 0.0.42.1 with jax 0.10.2, libtpu 0.0.42.1 with jax 0.99"
    assert table.endswith(f"Answered by {by}, from 2026-11-22 to 2026-11-24.")


# The search for the largest batch


def answers_for(batches: dict[int, bool]) -> list[Answer]:
    found = []
    for batch, fits in batches.items():
        program = make_program("shapes-sd", batch=batch)
        found.append(Answer(program, {WHOLE: ACCEPTED if fits else REFUSED}))
    return found


def test_the_search_finds_the_largest_batch_that_fits():
    for largest in range(41):
        tried = {1: largest >= 1}
        while True:
            answers = answers_for(tried)
            batch = programs.next_batch(make_program("shapes-sd"), answers)
            if batch is None:
                break
            assert batch not in tried
            tried[batch] = batch <= largest
        assert largest_batch(make_program("shapes-sd"), answers) == largest
        # What fits takes long, and is asked about seldom.
        assert sum(tried.values()) <= 3 + math.log2(largest + 1)


def test_the_search_goes_on_where_a_larger_batch_may_still_fit():
    program = make_program("shapes-sd")
    tried = {1: True, 2: True, 3: False}
    assert programs.next_batch(program, answers_for(tried)) == 8
    assert programs.next_batch(program, answers_for(tried | {8: True})) == 16
    tried = {28: True, 29: False}
    assert programs.next_batch(program, answers_for(tried)) == 32
    assert programs.next_batch(program, answers_for(tried | {32: False})) is None


def test_a_largest_batch_is_confirmed_by_larger_ones():
    program = make_program("shapes-sd")
    assert largest_batch(program, answers_for({1: True, 3: True})) is None
    assert largest_batch(program, answers_for({1: True, 3: True, 5: False})) is None
    assert largest_batch(program, answers_for({1: True, 3: True, 4: False, 8: False})) == 3
    assert largest_batch(program, answers_for({2: True, 3: False, 4: False})) is None
    assert largest_batch(program, answers_for({2: True, 3: False, 8: False})) == 2
    assert largest_batch(program, answers_for({28: True, 29: False})) is None
    assert largest_batch(program, answers_for({28: True, 29: False, 32: True})) is None
    confirmed = {28: True, 29: False, 32: True, 33: False, 40: False}
    assert largest_batch(program, answers_for(confirmed)) == 32
    assert largest_batch(program, answers_for({1: False})) == 0
    assert largest_batch(make_program("shapes-sd", "v4"), answers_for({1: False})) is None


# The recorder


def test_the_most_useful_is_asked_first():
    left = [name for name in record.find_left(programs, []) if "shapes" not in name]
    whole = [name for name in left if name.endswith(WHOLE) and "batch 1," in name]
    assert [name.split(", ")[:2] for name in whole[:3]] == [
        ["model sd", "chip v5e"],
        ["model sdxl", "chip v5e"],
        ["model sdxl", "chip v4"],
    ]
    assert [name for name in left if "batch 2," in name] == left[-14:]  # the searches


@pytest.fixture
def empty_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "FOLDER", tmp_path)
    return tmp_path


def test_the_recorder_says_what_is_left(capsys):
    assert record.main(["ask/programs", "--list"]) == 0
    assert capsys.readouterr().out == "Nothing is left.\n"


def test_each_answer_is_written_and_one_that_fails_left_out(monkeypatch, capsys, empty_folder):
    asked = []

    def take_piece(program, name):
        def ask(chip):
            asked.append((name, program.batch))
            if name == STEP:
                raise jax.errors.JaxRuntimeError("INTERNAL: no such thing")
            return REFUSED if program.batch > 5 else ACCEPTED

        return SimpleNamespace(ask=ask)

    monkeypatch.setattr(record, "require_compiler", lambda: None)
    monkeypatch.setattr(programs, "take_piece", take_piece)
    program = make_program("sd", "v4", dtype="float32")
    only = "model sd, chip v4"
    monkeypatch.setattr(programs, "real_pipelines", lambda: [program])
    monkeypatch.setattr(programs, "other_heads", list)
    assert record.main(["ask/programs", "--only", only]) == 1
    said = capsys.readouterr().out
    assert said.count("It failed: INTERNAL: no such thing") == 1
    assert "Failed: model sd, chip v4" in said
    batches = [batch for name, batch in asked if name == WHOLE]
    assert batches == [1, 2, 4, 8, 7, 6, 5]

    first, *larger = read_answers(record.read_rows("ask/programs"))
    assert first.program == program
    assert first.pieces.keys() == {WHOLE, *PARTS} - {STEP}
    assert first.parameters == parameter_bytes(program)
    assert [answer.program.batch for answer in larger] == batches[1:]
    assert largest_batch(program, [first, *larger]) == 5


def subject_of(*names):
    return SimpleNamespace(
        questions=lambda rows: [{"name": name} for name in names],
        answer=lambda name: {"length": len(name)},
    )


@pytest.mark.usefixtures("empty_folder")
def test_work_goes_on_where_it_stopped_and_stops_when_its_time_is_up():
    subject = subject_of("first", "second", "third")

    def recorded():
        return [row["question"]["name"] for row in record.read_rows("it")]

    record.work_through("it", subject, only="", minutes=0)
    assert recorded() == []
    record.work_through("it", subject, only="second", minutes=1)
    assert recorded() == ["second"]
    assert record.work_through("it", subject, only="", minutes=1) == []
    assert recorded() == ["second", "first", "third"]


def test_a_record_is_written_whole_or_not_at_all(empty_folder):
    record.write_rows("new/it", [{"answer": 1}])
    with pytest.raises(TypeError):
        record.write_rows("new/it", [object()])
    assert record.read_rows("new/it") == [{"answer": 1}]
    assert [path.name for path in (empty_folder / "new").iterdir()] == ["it.json"]
    assert record.read_rows("other") == []
