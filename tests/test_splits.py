"""Splits of one image over devices, and how long their exchange takes at least."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from course import flux2
from course.flux2.transformer import SECOND_TIME, TIME
from course.tpu.exchange import bisection_seconds, least_seconds, received_share
from course.tpu.pieces import load_config
from course.tpu.records import Exchange
from course.tpu.splits import DATA, FULLY_SHARDED, sharing_kinds
from helpers import find_data, read_record
from lab.score import splits as score

CAPTIONS = ["a large red heart on a white background", "a small blue star on a yellow background"]
SIZE = {"height": 64, "width": 64}


@pytest.fixture(scope="module")
def small():
    params, config, tokenize = flux2.load(find_data("checkpoints") / "shapes-flux2", jnp.float32)
    noise = flux2.random_tokens(jax.random.key(0), config, len(CAPTIONS), **SIZE)
    return params, config, tokenize(CAPTIONS), noise, tokenize([""])


def make_mesh(**axes):
    devices = jax.devices()[: math.prod(axes.values())]
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices, axis_types=types)


def draw(small, velocity=None):
    params, config, prompts, noise, empty = small
    options = {"steps": 4, "guidance": 3.0, "empty": empty, **SIZE}
    if velocity is not None:
        options["velocity"] = velocity
    generate = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    return 255 * np.asarray(generate(params, config, *prompts, noise, **options))


@pytest.fixture(scope="module")
def on_one_device(small):
    return draw(small)


@pytest.mark.parametrize(
    ("way", "shape", "images"),
    [
        ("ulysses", {"tokens": 3}, None),
        ("ring", {"tokens": 8}, None),  # 20 tokens of text are filled up to 24
        ("ulysses", {"halves": 2, "tokens": 2}, "halves"),  # the two halves of guidance
    ],
)
def test_tokens_split_over_devices_draw_the_same(small, on_one_device, way, shape, images):
    drawn = draw(small, flux2.split_tokens(make_mesh(**shape), way, images=images))
    np.testing.assert_allclose(drawn, on_one_device, atol=0.1)


@pytest.mark.parametrize("way", ["tokens", "heads", "partitioner"])
def test_split_over_devices_a_flow_map_is_told_where_a_step_goes(small, way):
    params, config, prompts, noise, empty = small
    config = replace(config, transformer=replace(config.transformer, guidance_embeds=True))
    p = params["transformer"]
    for name in [name for name in p if name.startswith(TIME)]:
        p = p | {name.replace(TIME, SECOND_TIME): p[name]}
    flow_map = params | {"transformer": p}, config, prompts, noise, empty
    expected = draw(flow_map)
    if way == "heads":
        p = flux2.sort_columns(p, config.transformer, 2)
        flow_map = params | {"transformer": p}, *flow_map[1:]
        velocity = flux2.split_heads(make_mesh(model=2))
    else:
        split = {"tokens": flux2.split_tokens, "partitioner": flux2.keep_tokens}[way]
        velocity = split(make_mesh(tokens=2), tokens="tokens")
    np.testing.assert_allclose(draw(flow_map, velocity), expected, atol=0.1)


@pytest.mark.parametrize("way", ["ulysses", "ring", "heads"])
def test_eight_devices_share_the_heads_and_tokens_of_one_image(small, way):
    """The small model's 6 heads go over 2 or 3 devices; one with 8 and random weights over 8."""
    config = replace(small[1].transformer, num_attention_heads=8)
    whole = replace(small[1], transformer=config)
    shapes = flux2.parameter_shapes(whole, jnp.float32)["transformer"]
    normal = np.random.default_rng(0).standard_normal
    p = {name: np.float32(0.1 * normal(shape.shape)) for name, shape in shapes.items()}
    image = np.float32(normal((1, 16, config.in_channels)))
    text = np.float32(normal((1, 20, config.joint_attention_dim)))
    places = {"image_positions": flux2.positions(4, 4), "text_positions": flux2.text_positions(20)}

    def step(velocity, p):
        function = jax.jit(functools.partial(velocity, config=config, **places))
        return function(p, image=image, text=text, time=jnp.ones(1))

    expected = step(flux2.velocity, p)
    if way == "heads":
        p = flux2.sort_columns(p, config, 8)
        split = flux2.split_heads(make_mesh(model=8))
    else:
        split = flux2.split_tokens(make_mesh(tokens=8), way)
    found = step(split, p)
    assert jnp.std(expected) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-3 * float(jnp.std(expected)))


@pytest.mark.parametrize("model", score.MODELS)
def test_in_every_way_two_four_and_eight_devices_drew_what_one_did(model):
    kinds = {DATA, FULLY_SHARDED, *sharing_kinds(load_config(model))}
    rows = read_record("score/splits")
    assert [row["question"] for row in rows] == score.questions([]), "record it anew"
    drawn = set()
    for row in rows:
        question, answer = row["question"], row["answer"]
        if question["model"] != model:
            continue
        assert answer["difference"] <= 1, question  # of 255; another batch alone rounds as much
        assert answer["right"] == answer["right on one"] > 0, question
        for part in question["way"].split(" × "):
            kind, _ = part.split(" over ")
            drawn.add((kind, question["devices"]))
    assert drawn >= {(kind, devices) for kind in kinds for devices in (2, 4, 8)}
    assert ("guidance", 2) in drawn


def test_ulysses_needs_whole_heads(small):
    mesh = make_mesh(tokens=4)
    with pytest.raises(ValueError, match=r"6 heads cannot be divided by 4 devices.*'ring'"):
        draw(small, flux2.split_tokens(mesh))
    with pytest.raises(ValueError, match="no way 'star': choose one of ulysses, ring"):
        flux2.split_tokens(mesh, "star")


def pass_pieces(kind, chips):
    """Pieces that each chip receives where ``kind`` is done by passing them round a ring.

    Chips start with one value for each piece; in each round all of them hand one piece on.
    """
    received = 0
    if kind in ("reduce-scatter", "all-reduce"):
        sums = {(chip, piece): {chip} for chip in range(chips) for piece in range(chips)}
        for turn in range(chips - 1):
            sent = {
                ((chip + 1) % chips, (chip - turn) % chips): sums[chip, (chip - turn) % chips]
                for chip in range(chips)
            }
            for place, parts in sent.items():
                sums[place] = sums[place] | parts
            received += 1
        assert all(len(sums[chip, (chip + 1) % chips]) == chips for chip in range(chips))
    if kind in ("all-gather", "all-reduce"):
        held = {chip: {(chip + 1) % chips} for chip in range(chips)}
        for turn in range(chips - 1):
            for chip, piece in [(c, (c + 1 - turn) % chips) for c in range(chips)]:
                held[(chip + 1) % chips].add(piece)
            received += 1
        assert all(len(pieces) == chips for pieces in held.values())
    return received


@pytest.mark.parametrize("chips", [2, 4, 8])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce"])
def test_the_share_received_is_that_of_a_ring(kind, chips):
    pieces_of_result = 1 if kind == "reduce-scatter" else chips
    expected = pass_pieces(kind, chips) / pieces_of_result
    assert received_share(kind, chips) == expected


def test_an_all_to_all_passes_the_middle_of_the_grid():
    # In two rows of four, 4 chips have half of a result for the other 4, over 2 links.
    size = 354_000_000
    assert bisection_seconds(size, "v6e", 8) == pytest.approx(4 * size / 2 / (2 * 100e9))
    exchange = Exchange("all-to-all", is_async=False, number=1, runs=1, bytes=size)
    assert least_seconds([exchange], "v6e", 8) == pytest.approx(3.54e-3)
    # Of four, 2 have half of a result for the other 2. A ring needs less: 3/4 of one over 2 links.
    assert least_seconds([exchange], "v6e", 4) == pytest.approx(size / 2 / 100e9)


def test_nothing_to_exchange_takes_no_time_on_any_chip():
    assert least_seconds([], "v4", 1) == least_seconds([], "tpu7x", 2) == 0


def test_what_goes_one_way_round_has_one_link():
    permute = Exchange("collective-permute", True, 1, 1, 10**9, direction=1)
    gather = Exchange("all-gather", is_async=True, number=1, runs=1, bytes=10**9)
    assert least_seconds([permute], "v5e", 8) == pytest.approx(20e-3)
    both = least_seconds([permute, gather], "v5e", 8)
    assert both == pytest.approx(20e-3 + 7 / 8 * 10e-3)


def test_permutes_that_go_both_ways_share_the_links():
    onward = Exchange("collective-permute", True, 1, 1, 10**9, direction=1)
    back = Exchange("collective-permute", True, 1, 1, 10**9, direction=-1)
    unknown = Exchange("collective-permute", True, 1, 1, 10**9)
    assert least_seconds([onward, onward], "v5e", 8) == pytest.approx(40e-3)
    assert least_seconds([onward, back], "v5e", 8) == pytest.approx(20e-3)
    assert least_seconds([onward, unknown], "v5e", 8) == pytest.approx(30e-3)
    assert least_seconds([unknown], "v5e", 8) == pytest.approx(10e-3)


def test_an_unknown_collective_is_named():
    with pytest.raises(ValueError, match="No collective 'broadcast'"):
        received_share("broadcast", 8)


def test_ulysses_and_ring_exchange_what_arithmetic_says(small):
    """The compiled program has the closed forms' bytes, where blocks in a loop count once."""
    from course.tpu.hlo import find_collectives

    params, config, _, noise, _ = small
    mesh = make_mesh(tokens=2)
    tokens, width, loops = 16 + 20, config.transformer.width, 2
    text = jnp.zeros((2, 20, config.transformer.joint_attention_dim))
    for way, arrays, kind in (("ulysses", 4, "all-to-all"), ("ring", 2, "collective-permute")):
        step = functools.partial(
            flux2.split_tokens(mesh, way),
            config=config.transformer,
            image_positions=flux2.positions(4, 4),
            text_positions=flux2.text_positions(20),
        )
        compiled = jax.jit(lambda p, x, t, step=step: step(p, image=x, text=text, time=t)).lower(
            params["transformer"], noise, jnp.ones(2)
        )
        found = [each for each in find_collectives(compiled.compile()) if each.kind == kind]
        moved = sum(each.runs * each.bytes for each in found)
        # Two images in float32: half of the tokens of queries, keys, values and result, or of keys
        # and values, in a block of each kind.
        assert moved == pytest.approx(arrays * 2 * 4 * tokens / 2 * width * loops, rel=0.01)
