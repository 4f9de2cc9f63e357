"""The renderer and the judge: what they draw and read, and what the judge refuses."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from course.shapes import judge, scenes
from tests import spoiled


@pytest.fixture
def rng():
    return np.random.default_rng(11)


EVERY_SHAPE = scenes.SHAPES + scenes.NEW_SHAPES


def random_scene(rng):
    choices = scenes.combinations()
    return scenes.random_scene(rng, *choices[rng.integers(len(choices))])


def test_scenes_are_the_same_for_the_same_seed():
    assert scenes.training_scenes(20, 3) == scenes.training_scenes(20, 3)
    assert scenes.training_scenes(20, 3) != scenes.training_scenes(20, 4)


def test_a_tenth_of_the_combinations_is_held_out_and_never_drawn():
    held_out = scenes.held_out()
    assert len(held_out) == round(len(scenes.combinations()) / 10)
    assert held_out <= set(scenes.combinations())
    drawn = {(s.color, s.shape, s.background) for s in scenes.training_scenes(20_000, 0)}
    assert drawn == set(scenes.combinations()) - held_out


def test_every_colour_shape_and_background_is_held_out_a_few_times():
    for position, options in enumerate((scenes.COLORS, scenes.SHAPES, scenes.BACKGROUNDS)):
        counts = Counter(combination[position] for combination in scenes.held_out())
        assert set(counts) == set(options)


def test_shapes_stay_inside_the_picture(rng):
    for _ in range(300):
        scene = random_scene(rng)
        picture = scenes.render(scene)
        border = np.concatenate([picture[0], picture[-1], picture[:, 0], picture[:, -1]])
        assert (border == scenes.PALETTE[scene.background]).all()


def test_edges_are_anti_aliased():
    picture = scenes.render(scenes.Scene("large", "black", "circle", "white", radius=0.4))
    levels = np.unique(picture[..., 0])
    assert levels[0] == 20 and levels[-1] == 245
    assert len(levels) > 6


def test_the_sizes_do_not_overlap():
    ranges = sorted(scenes.SIZES.values())
    assert all(first[1] < second[0] for first, second in pairwise(ranges))


@pytest.mark.parametrize(
    ("named", "text"),
    [
        (("small", "red", "heart", "white"), "a small red heart on a white background"),
        ((None, "orange", "arrow", None), "an orange arrow"),
        ((None, None, "arrow", "orange"), "an arrow on an orange background"),
        (("large", None, None, None), "large"),
        ((None, None, None, "white"), "a white background"),
        ((None, None, None, None), ""),
    ],
)
def test_any_attribute_may_be_left_out_of_a_caption(named, text):
    assert scenes.caption(*named) == text


def test_the_judge_reads_rendered_scenes(rng):
    right = []
    for _ in range(80):
        scene = random_scene(rng)
        asked = {name: getattr(scene, name) for name in scenes.ATTRIBUTES}
        right.append(judge.is_as_asked(asked, judge.read_scene(scenes.render(scene))))
    assert judge.share(right) >= 0.98


def test_the_judge_does_not_take_a_haze_that_nobody_sees_for_a_shape(rng):
    scene = scenes.Scene("small", "purple", "cross", "red", x=0.3, y=0.7, radius=0.16)
    hazy = (
        (scenes.render(scene).astype(float) + rng.normal(0, 4, (64, 64, 3)))
        .clip(0, 255)
        .astype(np.uint8)
    )
    assert (judge.read_scene(hazy).size, judge.read_scene(hazy).shape) == ("small", "cross")


def test_the_judge_measures_place_and_tilt(rng):
    for _ in range(20):
        scene = scenes.random_scene(rng, "red", "arrow", "white")
        seen = judge.read_scene(scenes.render(scene) / 255.0)
        assert np.hypot(seen.x - scene.x, seen.y - scene.y) < 0.01
        assert abs(seen.tilt - scene.tilt) < 3


def test_the_judge_reads_a_cross_with_one_short_arm():
    scene = scenes.Scene("large", "red", "cross", "white", radius=0.38)
    picture = scenes.render(scene)
    picture[: round(64 * (0.5 - 0.6 * scene.radius))] = scenes.PALETTE["white"]
    seen = judge.read_scene(picture)
    assert seen.shape == "cross"
    assert (seen.y, seen.radius) == pytest.approx((0.5, 0.38), abs=0.01)


@pytest.mark.parametrize("shapes", [scenes.SHAPES, EVERY_SHAPE], ids=["known", "with the new one"])
@pytest.mark.parametrize("kind", spoiled.KINDS)
def test_the_judge_refuses_what_is_no_scene(rng, kind, shapes):
    refused = (
        isinstance(judge.read_scene(spoiled.KINDS[kind](rng, 64), shapes), judge.Refusal)
        for _ in range(60)
    )
    assert judge.share(refused) >= 0.95


def test_the_judge_reads_a_new_shape_only_if_it_may_be_there(rng):
    drawn = [scenes.render(scene) for scene in scenes.new_examples("bowtie", 24)]
    asked = scenes.new_captions("bowtie", scenes.COLORS, 27)
    drawn += [scenes.render(scenes.random_scene(rng, **named)) for named in asked]
    assert (
        judge.share(
            getattr(judge.read_scene(each, EVERY_SHAPE), "shape", "") == "bowtie" for each in drawn
        )
        >= 0.99
    )
    assert all(isinstance(judge.read_scene(each), judge.Refusal) for each in drawn)


def test_a_new_shape_leaves_the_others_what_they_were(rng):
    drawn = [scenes.render(random_scene(rng)) for _ in range(15)]
    for each in drawn:
        assert judge.read_scene(each, EVERY_SHAPE) == judge.read_scene(each)
    assert not {shape for _, shape, _ in scenes.combinations()} & set(scenes.NEW_SHAPES)


def test_examples_of_a_new_shape_leave_some_colours_out():
    examples = scenes.new_examples("bowtie", 24)
    assert {scene.color for scene in examples} == set(scenes.TAUGHT_COLORS) < set(scenes.COLORS)
    assert {scene.size for scene in examples} == set(scenes.SIZES)
    assert examples == scenes.new_examples("bowtie", 24)


def test_the_judge_does_not_guess_between_two_shapes():
    circle, square = (
        scenes.render(scenes.Scene("large", "red", shape, "white", radius=radius))
        for shape, radius in (("circle", 0.36), ("square", 0.45))
    )
    between = (circle / 2 + square / 2).astype(np.uint8)
    assert judge.read_scene(circle).shape == "circle"
    assert judge.read_scene(square).shape == "square"
    assert judge.read_scene(between).reason == "it may be a circle or a square"


def test_a_wrong_attribute_is_told_from_the_right_ones():
    scene = scenes.Scene("medium", "red", "heart", "white")
    asked = {"size": "medium", "color": "blue", "shape": "heart", "background": None}
    seen = judge.read_scene(scenes.render(scene))
    assert judge.right_attributes(asked, seen) == {"size": True, "color": False, "shape": True}
