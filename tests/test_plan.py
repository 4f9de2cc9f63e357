"""The planner: which ways there are to split a step, what is asked and kept, which comes first."""

import ast
import dataclasses
import itertools
import json
import math
import platform
import runpy
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import flux2, sd
from course.tpu import plan, splits
from course.tpu.__main__ import main
from course.tpu.answers import Memory, Report, Work
from course.tpu.chips import Chip, tpu_devices
from course.tpu.hlo import Overlap, find_collectives
from course.tpu.jaxpr import equations_of, find_products
from course.tpu.pieces import flux2_text_length, load_config
from course.tpu.plan import ask_ways, bound_of, make_job, rank
from course.tpu.plan_file import python_of, write_plan
from course.tpu.records import Exchange, Split, recorded_flops
from course.tpu.splits import (
    CONTEXT,
    DATA,
    FULLY_SHARDED,
    TENSOR,
    TENSOR_BY_HAND,
    Way,
    find_ways,
)
from helpers import find_model, read_record
from lab.score.splits import draw_on_one

needs_compiler = pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="the TPU compiler runs on Linux on x86-64",
)

# Which ways there are


def over(number, before="", kinds=("tensor", "context", "Ulysses", "ring")):
    return [f"{before}{kind} over {number}" for kind in kinds]


@pytest.mark.parametrize(
    ("images", "chips", "guided", "names"),
    [
        (1, 8, False, over(8)),
        (1, 8, True, over(4, "guidance over 2 × ") + over(8)),
        (8, 8, True, ["data over 8", "fully sharded over 8", *over(8)]),
        (
            4,
            8,
            True,
            [
                "data over 4 × guidance over 2",
                "fully sharded over 8",
                *over(2, "data over 4 × "),
                *over(8),
            ],
        ),
        (6, 4, False, over(2, "data over 2 × ") + over(4)),
    ],
)
def test_chips_have_images_halves_of_guidance_or_a_share(images, chips, guided, names):
    ways = find_ways(load_config("shapes-sd"), images, chips, guided)
    assert [str(way) for way in ways] == names
    assert {way.groups * way.share for way in ways} == {chips}
    more = len(find_ways(load_config("shapes-flux2"), images, chips, guided)) - len(ways)
    assert more == sum(way.kind == TENSOR for way in ways)  # each also by hand


@pytest.mark.parametrize(
    ("way", "chips", "sentence"),
    [
        ("Ulysses", 5, "24 heads cannot be divided by 5 devices"),
        (TENSOR, 5, "24 heads cannot be divided by 5 devices"),
        (TENSOR_BY_HAND, 5, "24 heads cannot be divided by 5 devices"),
        (CONTEXT, 5, "4096 tokens of the image cannot be divided by 5 chips"),
        ("ring", 5, ""),  # which fills up tokens
        ("Ulysses", 8, ""),
    ],
)
def test_a_way_that_klein_cannot_be_split_in_ends_in_a_sentence(way, chips, sentence):
    reason = make_job("flux2").why_not(Way(way, share=chips))
    assert sentence in reason
    assert bool(sentence) == bool(reason)
    assert reason.count("\n") == 0


def test_a_way_that_cannot_divide_a_parameter_is_known_before_the_compiler_is_asked(monkeypatch):
    config = load_config("flux2")
    odd = config.text_encoder.intermediate_size + 1
    odd = dataclasses.replace(
        config, text_encoder=dataclasses.replace(config.text_encoder, intermediate_size=odd)
    )
    job = make_job("flux2", batch=8)
    ways = [Way(FULLY_SHARDED, images=8), Way(TENSOR, share=8)]
    assert [job.why_not(way) for way in ways] == ["", ""]
    monkeypatch.setattr(plan, "load_config", lambda model: odd)
    for way in ways:
        assert "8 devices do not divide 9729" in job.why_not(way)
    assert job.why_not(Way("ring", share=8)) == job.why_not(Way(DATA, images=8)) == ""


def test_few_ways_are_left_for_the_heads_of_xl():
    job = make_job("sdxl", "v5e", 8)
    possible = [str(way) for way in job.ways if not job.why_not(way)]
    assert possible == [
        "guidance over 2 × context over 4",
        "guidance over 2 × ring over 4",
        "context over 8",
        "ring over 8",
    ]
    small = make_job("sdxl", "v5e", 8, height=512, width=1024)
    assert small.why_not(Way("ring", share=8)) == ""
    smaller = make_job("sdxl", "v5e", 8, height=96, width=96)
    assert "3 rows of pixels on the lowest level" in smaller.why_not(Way(CONTEXT, share=8))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"chip": "v4"}, "the links of 'v4' are is not known here: choose v5e or v6e"),
        ({"chips": 5}, "5 chips cannot be asked for: choose 4 or 8"),
        ({"height": 1000}, "flux2 cannot draw 1000 × 1024 pixels: give multiples of 16"),
        ({"height": 1_600_000_000}, "are too many to ask about: give sides of at most 16384"),
    ],
)
def test_what_cannot_be_planned_gets_one_sentence(settings, sentence, capsys, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        make_job("flux2", **settings)
    options = [f"--{name}={value}" for name, value in settings.items()]
    assert main(["plan", "flux2", "--to", str(tmp_path / "new"), *options]) == 1
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def links_around(chips):
    """How many links lie between each chip and the next one, and between the last and the first."""
    after = [*chips[1:], chips[0]]
    places = zip(chips, after, strict=True)
    return [int(np.abs(np.subtract(one.coords, other.coords)).sum()) for one, other in places]


@needs_compiler
@pytest.mark.parametrize("chip", ["v5e", "v6e"])
@pytest.mark.parametrize("sizes", [(1, 8), (8, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)])
def test_neighbours_of_the_mesh_are_neighbours_on_the_grid(chip, sizes):
    mesh = splits.make_mesh(chip, dict(zip(("data", "tokens"), sizes, strict=True)))
    assert mesh.devices.shape == sizes
    along = max(axis for axis, size in enumerate(sizes) if size > 1)
    for group in np.moveaxis(mesh.devices, along, -1).reshape(-1, sizes[along]):
        assert set(links_around(list(group))) == {1}
    assert len(set(mesh.devices.flat)) == math.prod(sizes)


@needs_compiler
def test_of_eight_chips_jax_makes_no_ring():
    """If a newer JAX does, chapter 9, chapter 16 and `splits.mesh_of` say otherwise."""
    for chip in ("v5e", "v6e"):
        orders = [
            jax.make_mesh((chips,), ("x",), devices=tpu_devices(chip, chips)) for chips in (4, 8)
        ]
        four, eight = (links_around(list(mesh.devices)) for mesh in orders)
        assert set(four) == {1}
        assert sorted(eight) == [1] * 4 + [2] * 4


@pytest.mark.parametrize("x", [2, 4])
def test_rows_of_chips_may_lie_either_way(x):
    """And the chips may come in any order, and begin anywhere."""
    places = [(a + 4, b + 2, 0) for a in range(x) for b in range(8 // x)]
    chips = [
        SimpleNamespace(coords=place) for place in np.random.default_rng(0).permutation(places)
    ]
    near, far = splits.two_rows(chips)
    assert links_around(near + far[::-1]) == [1] * 8


@pytest.mark.parametrize(
    "places",
    [
        [None] * 8,  # no TPUs
        [(x, y, 0) for x in range(4) for y in range(4)],
        [(x, y, z) for x in range(2) for y in range(2) for z in range(2)],
        [(x, 0, 0) for x in range(4)],
        [(x, y, 0) for x in range(2) for y in range(4)][1:],
        [(x, y, 0) for x in range(2) for y in range(2) for _ in range(2)],  # each chip is two
    ],
    ids=["without", "square", "cube", "one row", "a gap", "two of each"],
)
def test_other_devices_are_not_taken_for_two_rows(places):
    chips = [SimpleNamespace(coords=place) if place else SimpleNamespace() for place in places]
    assert splits.two_rows(chips) == []


def test_an_odd_number_of_chips_of_two_rows_is_no_ring():
    chips = [SimpleNamespace(coords=(x, y, 0)) for x in range(2) for y in range(3)]
    with pytest.raises(ValueError, match="3 chips of two rows are no ring"):
        splits.mesh_of(chips, {"data": 2, "tokens": 3})


# Which comes first


def recorded_ways(model, chip):
    """What was recorded of a step over eight chips, by the way."""
    return plan.known_splits(make_job(model, chip, chips=8), read_record("ask/plans"))


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_of_klein_over_eight_chips_ulysses_comes_first(chip):
    """MaxDiffusion's authors found it by measuring, on v6e."""
    flops = recorded_flops("flux2")["step"]
    ranked = rank(recorded_ways("flux2", chip), flops, chips=8)
    middle = {"v5e": [TENSOR_BY_HAND, CONTEXT], "v6e": [CONTEXT, TENSOR_BY_HAND]}[chip]
    assert [way.kind for way in ranked] == ["Ulysses", *middle, "ring", TENSOR]
    first = ranked[Way("Ulysses", share=8)]
    peak = first.split.report.chip.peak
    assert first.computing == pytest.approx(flops / 8 / peak, rel=0.01)
    # By hand: in 25 blocks four arrays of an eighth of 4,608 tokens with 3,072 numbers; half of
    # what four chips have goes to the other four over two links.
    sent = 25 * 4 * 4608 // 8 * 3072 * 2
    link = {"v5e": 50e9, "v6e": 100e9}[chip]
    assert first.exchanging == pytest.approx(4 * sent / 2 / (2 * link), rel=0.01)
    assert first.hidden == 0


def test_of_the_larger_klein_ulysses_comes_first_too():
    found = recorded_ways("flux2-9b", "v6e")
    job = make_job("flux2-9b", chip="v6e", chips=8)
    assert found.keys() == set(job.ways)
    assert next(iter(rank(found, plan.step_flops(job), 8))) == Way("Ulysses", share=8)


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_the_recorded_plan_of_xl_has_half_of_guidance_on_each_side_first(chip):
    """Its 10 heads cannot be divided by 4 or 8 chips, so pixels are."""
    job = make_job("sdxl", chip=chip, chips=8)
    found = recorded_ways("sdxl", chip)
    impossible = set(job.ways) - found.keys()
    assert {way.kind for way in impossible} == {TENSOR, "Ulysses"}
    assert all("10 heads cannot be divided" in job.why_not(way) for way in impossible)
    ranked = list(rank(found, plan.step_flops(job), 8))
    assert ranked[0] == Way(CONTEXT, halves=2, share=4)
    assert ranked[-1] == Way("ring", share=8)


# What was recorded, and what arithmetic says


def bytes_of(split, kind, direction=0):
    """Bytes of one kind of collective in a step, on a chip; for 0 in any direction."""
    found = [each for each in split.exchanges if each.kind == kind]
    return sum(each.bytes for each in found if direction in (0, each.direction))


@pytest.mark.parametrize(
    ("model", "chip"), [("flux2", "v5e"), ("flux2", "v6e"), ("flux2-9b", "v6e")]
)
def test_klein_exchanges_what_arithmetic_says(model, chip):
    job = make_job(model, chip, 8)
    found = recorded_ways(model, chip)
    config = load_config(model)
    rows, columns = flux2.size_in_tokens(config, job.program.height, job.program.width)
    tokens = rows * columns + flux2_text_length(job.program, config)
    double, single = config.transformer.num_layers, config.transformer.num_single_layers
    array = tokens * config.transformer.width * 2
    # A sum after attention and one after the feed-forward layer; a single-stream block has both
    # layers side by side.
    by_hand = found[Way(TENSOR_BY_HAND, share=8)]
    assert bytes_of(by_hand, "all-reduce") == pytest.approx((2 * double + single) * array, rel=0.01)
    assert {each.kind for each in by_hand.exchanges} == {"all-reduce"}
    # Queries, keys, values and the result; or keys and values of each other chip.
    blocks = double + single
    ulysses = bytes_of(found[Way("Ulysses", share=8)], "all-to-all")
    assert ulysses == pytest.approx(blocks * 4 * array / 8, rel=0.01)
    ring = bytes_of(found[Way("ring", share=8)], "collective-permute")
    assert ring == pytest.approx(blocks * 2 * 7 * array / 8, rel=0.01)


def keys_and_values(config, height, width):
    """Bytes of the keys and values of the pixels of one image in bfloat16, in all layers."""
    total = 0
    pixels = height * width // config.pixels_per_latent**2
    for block in sd.unet.blocks(config.unet):
        pixels = {"downsample": pixels // 4, "upsample": pixels * 4}.get(block.kind, pixels)
        total += block.depth * 2 * pixels * block.channels * 2
    return total


def rows_beside(job):
    """Bytes of the rows of pixels that convolutions need from the chip before, and the one after.

    A kernel of 3 × 3 needs a row on either side; one that halves the rows begins a row before.
    """
    step = splits.whole_step(job.program, job.guided)
    before = after = 0
    for equation, runs in equations_of(step.function, *step.arguments):
        if equation.primitive.name == "conv_general_dilated":
            pixels, kernel = (each.aval for each in equation.invars)
            if kernel.shape[0] == 3:
                row = pixels.size // pixels.shape[1] * pixels.dtype.itemsize
                before += runs * row
                after += runs * row * (equation.params["window_strides"][0] == 1)
    return before, after


def test_xl_exchanges_what_arithmetic_says():
    jobs = [make_job("sdxl", chip, 8) for chip in ("v5e", "v6e")]
    of_both = rows_beside(jobs[0])  # halves of guidance
    program = jobs[0].program
    of_image = keys_and_values(load_config("sdxl"), program.height, program.width)
    for job, (halves, share) in itertools.product(jobs, [(1, 8), (2, 4)]):
        found = recorded_ways("sdxl", job.program.chip)
        whole = 2 // halves * of_image
        before, after = (size // halves for size in of_both)
        gathered = found[Way(CONTEXT, halves=halves, share=share)]
        assert bytes_of(gathered, "all-gather") == pytest.approx(whole, rel=0.01)
        rows = [bytes_of(gathered, "collective-permute", way) for way in (1, -1)]
        assert rows == pytest.approx([before, after], rel=0.01)
        ring = found[Way("ring", halves=halves, share=share)]
        pieces = (share - 1) / share * whole
        onward = bytes_of(ring, "collective-permute", 1)
        assert onward == pytest.approx(pieces + before, rel=0.01)
        passed = bytes_of(ring, "collective-permute")
        assert passed == pytest.approx(pieces + before + after, rel=0.01)


def split_of(schedule, exchanges=(), usable=2**30, least_bytes=0):
    chip = Chip("v5e", peak=1e14, bandwidth=1e12, on_chip=0, usable_hbm=usable)
    memory = Memory(2**20, 0, 0, 0)
    work = Work(0.0, 0.0, least_bytes)
    report = Report(chip, memory, work, "", 1.0, "2026-11-27", {}, schedule=schedule)
    return Split({"tokens": 8}, 1, 2**20, report, tuple(exchanges))


def test_what_stands_beside_products_hides_an_exchange_that_need_not_wait():
    size = 8 * 10**9 // 7
    gather = Exchange("all-gather", is_async=True, number=1, runs=1, bytes=size)
    waits = dataclasses.replace(gather, is_async=False)
    half = Overlap(flops=1e12, beside_exchange=0.5e12)
    found = bound_of(split_of(half, [gather, waits]), flops=8 * 10**12, chips=8)
    assert (found.computing, found.exchanging) == pytest.approx((10e-3, 20e-3))
    assert found.hidden == pytest.approx(5e-3)  # half of the products are beside it
    assert found.seconds == pytest.approx(25e-3)
    most = Overlap(flops=1e12, beside_exchange=1e12)
    assert bound_of(split_of(most, [waits]), 8 * 10**12, 8).hidden == 0
    # A chip that does more than its share takes longer, and so does one that reads much.
    twice = Overlap(flops=2e12, beside_exchange=0.0)
    assert bound_of(split_of(twice), 8 * 10**12, 8).computing == pytest.approx(20e-3)
    reading = split_of(half, least_bytes=30 * 10**9)
    assert bound_of(reading, 8 * 10**12, 8).computing == pytest.approx(30e-3)


def test_groups_of_chips_exchange_by_themselves():
    within = Exchange("all-gather", is_async=False, number=1, runs=1, bytes=10**9, chips=4)
    pairs = dataclasses.replace(within, chips=2)
    alone = dataclasses.replace(within, chips=1)
    schedule = Overlap(1.0, 0.0)
    seconds = [
        bound_of(split_of(schedule, [each]), 0, 8).exchanging for each in (within, pairs, alone)
    ]
    # Three quarters over two links; half over the one between two neighbours; nothing.
    assert seconds == pytest.approx([0.75 * 10e-3, 0.5 * 20e-3, 0])


def test_ways_that_do_not_fit_come_last():
    schedule = Overlap(1e12, 0.0)
    large = split_of(schedule, usable=2**10)
    slow = split_of(Overlap(2e12, 0.0))
    ranked = rank({Way(TENSOR, share=8): large, Way("ring", share=8): slow}, 0, 8)
    assert [way.kind for way in ranked] == ["ring", TENSOR]


# What is asked, and kept

KLEIN = {
    (row["question"]["chip"], row["question"]["way"]): row["answer"]
    for row in read_record("ask/plans")
    if row["question"]["model"] == "flux2"
}


@pytest.fixture
def asked(monkeypatch):
    """The names of the ways that a compiler was asked about, which says what it said of klein.

    About what is in ``asked.fails`` it raises what is there.
    """

    class Asked(list):
        """A list with a dictionary beside it."""

    asked = Asked()
    asked.fails = {}

    def ask_way(program, guided, way, timeout):
        asked.append(str(way))
        if str(way) in asked.fails:
            raise asked.fails[str(way)]
        return KLEIN[program.chip, f"{way.kind} over 8"]

    monkeypatch.setattr("course.tpu.splits.ask_way", ask_way)
    monkeypatch.setattr("course.tpu.plan.require_compiler", lambda: None)
    monkeypatch.setattr("course.tpu.plan.read_record", lambda name: [])
    return asked


def test_a_plan_goes_on_where_it_stopped(asked, tmp_path):
    job = make_job("flux2")
    file = tmp_path / "answers.json"
    asked.fails = {"Ulysses over 8": KeyboardInterrupt()}
    with pytest.raises(KeyboardInterrupt):
        ask_ways(job, file)
    assert asked == over(8, kinds=["tensor", "tensor by hand", "context", "Ulysses"])
    asked.fails = {}
    asked.clear()
    answers = ask_ways(job, file, only="Ulysses")
    assert asked == ["Ulysses over 8"]
    assert answers.unanswered == {Way("ring", share=8): "It was left out."}
    ask_ways(job, file)
    assert asked == ["Ulysses over 8", "ring over 8"]
    asked.clear()
    assert ask_ways(job, file).splits.keys() == set(job.ways)
    # Of other sizes nothing is known.
    ask_ways(make_job("flux2", height=512), file, only="ring")
    assert asked == ["ring over 8"]


def refuse():
    """Stand in for ``require_compiler`` where there is none."""
    raise RuntimeError("There is no compiler.")


def test_what_was_recorded_is_asked_only_if_it_is_to_be_anew(asked, monkeypatch, tmp_path):
    job = make_job("flux2")
    ask_ways(job, tmp_path / "answers.json")
    rows = json.loads((tmp_path / "answers.json").read_text())
    monkeypatch.setattr("course.tpu.plan.read_record", lambda name: rows)
    asked.clear()
    assert len(ask_ways(job).splits) == 5
    assert asked == []
    assert len(ask_ways(job, only="ring", anew=True).splits) == 5
    assert asked == ["ring over 8"]

    monkeypatch.setattr("course.tpu.plan.require_compiler", refuse)
    asked.clear()
    assert len(ask_ways(job, anew=True).splits) == 5
    assert asked == []
    with pytest.raises(RuntimeError, match=r"There is no compiler\."):
        ask_ways(make_job("flux2", height=512))


def test_a_plan_without_an_answer_says_what_to_do(asked, tmp_path, capsys):
    ways = [str(way) for way in make_job("flux2").ways]
    asked.fails = dict.fromkeys(ways, RuntimeError("The TPU compiler was stopped."))
    assert main(["plan", "flux2", "--to", str(tmp_path), "--timeout", "1"]) == 1
    output = capsys.readouterr()
    assert "The compiler answered about no way, see above: give more --timeout" in output.err
    assert "The TPU compiler was stopped." in output.out
    assert not (tmp_path / "draw.py").exists()


@pytest.mark.parametrize("has_compiler", [True, False])
def test_where_every_way_is_impossible_other_options_are_named(
    has_compiler, asked, tmp_path, capsys, monkeypatch
):
    if not has_compiler:
        monkeypatch.setattr("course.tpu.plan.require_compiler", refuse)
    command = ["plan", "sdxl", "--height", "64", "--width", "64", "--to", str(tmp_path)]
    assert main(command) == 1
    output = capsys.readouterr()
    assert "The model cannot be split in any of these ways: give a larger image" in output.err
    assert "--timeout" not in output.err
    assert "cannot be divided by" in output.out
    assert asked == []


def test_where_the_compiler_refuses_every_way_more_chips_are_named(tmp_path, capsys, monkeypatch):
    def ask_way(program, guided, way, timeout):
        row = KLEIN[program.chip, f"{way.kind} over 8"]
        return row | {"report": row["report"] | {"work": None, "message": "Out of memory."}}

    monkeypatch.setattr("course.tpu.splits.ask_way", ask_way)
    monkeypatch.setattr("course.tpu.plan.require_compiler", lambda: None)
    command = ["plan", "shapes-flux2", "--chip", "v5e", "--chips", "4", "--to", str(tmp_path)]
    assert main(command) == 1
    output = capsys.readouterr()
    assert "It does not fit. The compiler: Out of memory." in output.out
    assert "No way fits that was asked about: give more chips" in output.err


def test_a_plan_that_is_recorded_writes_no_answers(tmp_path):
    command = ["plan", "shapes-flux2", "--chip", "v6e", "--chips", "4", "--to", str(tmp_path)]
    assert main(command) == 0
    assert {file.name for file in tmp_path.iterdir()} == {"comparison.png", "draw.py"}
    assert main(command) == 0, "its own files are replaced"


@pytest.mark.parametrize("name", ["draw.py", "comparison.png"])
def test_files_of_somebody_else_are_not_replaced(name, asked, tmp_path, capsys):
    (tmp_path / name).write_bytes(b"mine")
    command = ["plan", "shapes-flux2", "--chip", "v6e", "--chips", "4", "--to", str(tmp_path)]
    assert main(command) == 1
    assert f"{tmp_path / name} was not written by a plan: move it away" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == b"mine"
    assert asked == []


def test_a_file_of_something_else_is_refused(asked, tmp_path):
    file = tmp_path / "answers.json"
    for content in ("", "{}", "[1]", '[{"question": {}}, 2]', "[" * 100_000):
        file.write_text(content)
        with pytest.raises(RuntimeError, match="has no answers for a plan: move it away"):
            ask_ways(make_job("flux2"), file)
    assert asked == []


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["report"], []),
        (["parameters"], "many"),
        (["parameters"], 10**400),
        (["mesh"], [8]),
        (["exchanges"], [{"kind": "telepathy"}]),
        (["exchanges", 0, "kind"], "telepathy"),
        (["report", "chip", "peak"], 0),
        (["report", "chip", "name"], "v99"),
        (["report", "memory"], None),
        (["report", "schedule"], None),
        (["report", "schedule", "flops"], float("nan")),
        (["report", "work", "least_bytes"], float("inf")),
        (["report", "message"], 7),
    ],
)
def test_answers_with_figures_that_cannot_be_are_refused(asked, tmp_path, keys, value):
    file, job = tmp_path / "answers.json", make_job("flux2")
    ask_ways(job, file, only="ring")
    rows = json.loads(file.read_text())
    place = rows[0]["answer"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    file.write_text(json.dumps(rows))
    with pytest.raises(RuntimeError, match="has no answers for a plan: move it away"):
        ask_ways(job, file)
    assert asked == ["ring over 8"]


def test_the_command_ranks_draws_and_writes(asked, tmp_path, capsys):
    asked.fails = {"ring over 4": RuntimeError("The TPU compiler crashed.\nMore of it.")}
    command = ["plan", "shapes-flux2", "--chip", "v6e", "--chips", "4", "--to", str(tmp_path)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "A step of shapes-flux2: one image of 64 × 64 pixels, with guidance, bfloat16, over 4 v6e "
        "chips."
    )
    lines = said.splitlines()
    ranked = [line.split("  ")[0] for line in lines if line.startswith(("guidance", "context"))]
    assert ranked[:2] == [
        "guidance over 2 × Ulysses over 2",
        "guidance over 2 × tensor by hand over 2",
    ]
    assert "- Ulysses over 4: Ulysses gives each device whole heads, and 6 heads cannot" in said
    assert "- ring over 4: The TPU compiler crashed.\n" in said
    assert "Text encoders and VAE take 0.00 GiB more" in said
    assert "all-to-all" in said
    assert f"First is guidance over 2 × Ulysses over 2: {tmp_path / 'draw.py'} draws so." in said
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert 'SIZES = {"data": 2, "tokens": 2}' in (tmp_path / "draw.py").read_text()


# The function of a way

PROMPT = "a large red heart on a white background"


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("shapes-flux2", Way("Ulysses", halves=2, share=2)),
        ("shapes-flux2", Way(TENSOR_BY_HAND, halves=2, share=2)),
        ("shapes-flux2", Way(CONTEXT, share=4)),
        ("shapes-sd", Way("ring", halves=2, share=2)),
        ("shapes-sdxl", Way("Ulysses", share=4)),
    ],
    ids=str,
)
def test_the_file_of_a_way_draws_what_one_device_draws(model, way, tmp_path):
    job = make_job(model, chips=4)
    job = dataclasses.replace(job, program=dataclasses.replace(job.program, steps=2))
    assert job.why_not(way) == ""
    write_plan(job, way, tmp_path / "draw.py")
    assert f"MODEL = {model!r}" in (tmp_path / "draw.py").read_text(), "no place on this machine"
    names = runpy.run_path(str(tmp_path / "draw.py"))
    params, config, tokenize = names["load"](find_model(model), jnp.float32)
    drawn = names["draw"](params, config, tokenize, [PROMPT])
    alone = draw_on_one(model, (PROMPT,), steps=2, guidance=3.0)
    assert 255 * np.abs(np.asarray(drawn) - alone).max() < 1
    with pytest.raises(ValueError, match=r"for 1 prompt\(s\) at a time"):
        names["draw"](params, config, tokenize, [PROMPT, PROMPT])


@pytest.mark.parametrize(
    ("model", "steps", "guidance"),
    [("flux2", 4, None), ("sd", 50, 7.5), ("sdxl", 25, 5.0), ("shapes-sdxl", 15, 3.0)],
)
def test_the_file_draws_with_what_suits_the_model(model, steps, guidance, tmp_path):
    write_plan(make_job(model, chips=4), Way(CONTEXT, share=4), tmp_path / "draw.py")
    names = runpy.run_path(str(tmp_path / "draw.py"))
    side = load_config(model).side
    found = [names[name] for name in ("STEPS", "GUIDANCE", "HEIGHT", "WIDTH")]
    assert found == [steps, guidance, side, side]


def test_the_file_of_a_distilled_model_has_guidance_if_it_was_asked_for(tmp_path):
    job = make_job("flux2", chips=4, guided=True)
    write_plan(job, Way(CONTEXT, halves=2, share=2), tmp_path / "draw.py")
    assert runpy.run_path(str(tmp_path / "draw.py"))["GUIDANCE"] == 4.0


def test_no_name_of_a_folder_becomes_code(tmp_path):
    folder = tmp_path / 'a"""\nraise SystemExit("taken over")\n"""\\'
    folder.symlink_to(find_model("shapes-flux2"))
    write_plan(make_job(str(folder), chips=4), Way("ring", share=4), tmp_path / "draw.py")
    first, second, *_ = ast.parse((tmp_path / "draw.py").read_text()).body
    assert "taken over" in first.value.value
    assert isinstance(second, ast.Import)
    assert runpy.run_path(str(tmp_path / "draw.py"))["MODEL"] == str(folder)


@pytest.mark.parametrize("kind", [DATA, FULLY_SHARDED, TENSOR, "ring"])
@pytest.mark.parametrize("model", ["shapes-flux2", "shapes-sd"])
def test_every_way_has_a_file_with_a_mesh_and_a_function_on_it(model, kind, tmp_path):
    share = 1 if kind in (DATA, FULLY_SHARDED) else 2
    way = Way(kind, images=4 // share, share=share)
    job = make_job(model, chips=4, batch=4)
    write_plan(job, way, tmp_path / "draw.py")
    names = runpy.run_path(str(tmp_path / "draw.py"))
    assert dict(names["mesh"].shape) == way.mesh
    assert names["PROMPTS"] == 4
    text = (tmp_path / "draw.py").read_text()
    assert f".{way.rules})" in text
    if model == "shapes-flux2":
        assert f"velocity = {python_of('flux2', splits.flux2_call(way))}" in text
        assert callable(names["velocity"])
    else:
        assert callable(names["attention"]) == (kind == "ring")


@needs_compiler
@pytest.mark.parametrize(
    "way", [Way("ring", share=8), Way(CONTEXT, halves=2, share=4), Way(DATA, images=8)], ids=str
)
def test_the_file_of_a_way_places_neighbours_on_the_grid(way, tmp_path, monkeypatch):
    write_plan(make_job("shapes-sd", batch=way.images), way, tmp_path / "draw.py")
    monkeypatch.setattr(jax, "devices", lambda: tpu_devices("v5e", 8))
    mesh = runpy.run_path(str(tmp_path / "draw.py"))["mesh"]
    for group in mesh.devices.reshape(way.groups if way.share > 1 else 1, -1):
        assert set(links_around(list(group))) == {1}


def test_tensor_parallelism_by_hand_exchanges_nothing_but_sums():
    """The partitioner passes on pieces, too, because the fused matrices are cut anywhere."""
    found = {}
    job = make_job("shapes-flux2", chips=4, dtype="float32")
    for kind in (TENSOR, TENSOR_BY_HAND):
        way = Way(kind, share=2)
        types = (jax.sharding.AxisType.Auto,) * 2
        mesh = jax.make_mesh((1, 2), tuple(way.mesh), devices=jax.devices()[:2], axis_types=types)
        step = splits.place_step(job.program, job.guided, way, mesh)
        lowered = jax.jit(step.function, out_shardings=step.output).lower(*step.arguments)
        found[kind] = find_collectives(lowered.compile())
    assert {each.kind for each in found[TENSOR]} > {"all-reduce"}
    assert {(each.kind, each.chips) for each in found[TENSOR_BY_HAND]} == {("all-reduce", 2)}
    # Of both halves of guidance, 36 tokens of text and image: in a double-stream block twice, in
    # a single-stream block once. Blocks in a loop count once.
    width = load_config("shapes-flux2").transformer.width
    moved = sum(each.bytes for each in found[TENSOR_BY_HAND])
    assert moved == pytest.approx((2 + 1) * 2 * 36 * width * 4, rel=0.01)


def test_a_step_on_one_device_does_the_work_of_a_step():
    job = make_job("flux2")
    step = splits.whole_step(job.program, job.guided)
    products = find_products(step.function, *step.arguments)
    assert sum(n * each.flops for each, n in products.items()) == recorded_flops("flux2")["step"]
    assert plan.step_flops(make_job("shapes-flux2")) == 2 * plan.step_flops(
        make_job("shapes-flux2", guided=False)
    )


def test_pixels_that_devices_cannot_share_are_refused():
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("tokens",), devices=jax.devices()[:4], axis_types=types)
    attend = sd.split_pixels(mesh, "ring")
    x = jnp.ones((1, 6, 2, 8))
    with pytest.raises(ValueError, match="over 6 pixels cannot be divided by 4 devices"):
        attend(x, x, x)
    x = jnp.ones((1, 8, 2, 8))
    with pytest.raises(ValueError, match="2 heads cannot be divided by 4 devices"):
        sd.split_pixels(mesh, "ulysses")(x, x, x)
    with pytest.raises(ValueError, match="no way 'star': choose one of ulysses, ring"):
        sd.split_pixels(mesh, "star")


@needs_compiler
def test_the_compiler_counts_the_bytes_of_a_small_step():
    job = make_job("shapes-flux2", "v5e", 4)
    row = splits.ask_way(job.program, job.guided, Way("Ulysses", halves=2, share=2))
    assert row["mesh"] == {"data": 2, "tokens": 2}
    (exchange,) = [each for each in row["exchanges"] if each["kind"] == "all-to-all"]
    config = load_config("shapes-flux2").transformer
    blocks = config.num_layers + config.num_single_layers
    # A chip has half of the tokens of one half of guidance: 16 of the image and 20 of the text.
    assert exchange["bytes"] == pytest.approx(blocks * 4 * 18 * config.width * 2, rel=0.01)
    assert exchange["chips"] == 2
