"""create_key, split_keys and prepare_prompts."""

import jax
import numpy as np
import pytest

from course.model import tokens
from helpers import create_key, inputs, prepare_prompts, split_keys


def test_the_same_seed_gives_the_same_keys():
    assert (split_keys(create_key(7)) == split_keys(create_key(7))).all()
    assert not (split_keys(create_key(7)) == split_keys(create_key(8))).any()


@pytest.mark.parametrize("count", [1, 3, 8])
def test_every_key_is_another(count):
    keys = split_keys(create_key(0), count)
    assert keys.shape == (count,)
    assert len(np.unique(np.asarray(jax.random.key_data(keys)), axis=0)) == count


def test_there_is_one_key_for_each_device():
    assert split_keys(create_key(0)).shape == (jax.device_count(),)


@pytest.mark.parametrize("seed", [1.5, "0", None, True])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(TypeError, match="whole number"):
        create_key(seed)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**64])
def test_a_seed_that_a_key_would_cut_is_refused_with_the_range(seed):
    with pytest.raises(ValueError, match=f"is {seed}: give a whole number from 0 to 4294967295"):
        create_key(seed)
    assert create_key(2**32 - 1) != create_key(0)


SYNTAX = {
    "a (red:1.4) heart": "(red:1.4)",
    "a [red:blue:0.5] heart": "[red:blue:0.5]",
    "a (((red))) heart": "((red))",
    "a [[red]] heart": "[[red]]",
    "a red BREAK heart": "BREAK",
    "a heart <lora:oil:0.8>": "<lora:oil:0.8>",
    "a heart (or two) at 8:30, breaking [news]": None,
    "a clock (8:3)": None,
}


@pytest.mark.parametrize("prompt", SYNTAX)
def test_what_only_other_programs_understand_is_noticed(prompt):
    """In the pipelines' prompts and in those of the model's own tokenizers alike."""
    found = inputs.say_what_is_plain_text(prompt)
    assert found == tokens.say_what_is_plain_text(prompt)
    if SYNTAX[prompt] is None:
        assert found is None
        tokens.check_prompts([prompt], lambda prompt: None)
        return
    assert found.startswith(f"A prompt has {SYNTAX[prompt]!r}, which is read as plain text")
    with pytest.warns(UserWarning, match="which is read as plain text"):
        tokens.check_prompts([prompt], lambda prompt: None)


def test_what_is_no_list_of_prompts_is_refused():
    for prompts, sentence in (
        ("a heart", r"Give a list of prompts: \['a heart'\]"),
        (["a heart", 3], "A prompt is 3: give strings"),
    ):
        with pytest.raises(TypeError, match=sentence):
            tokens.check_prompts(prompts, lambda prompt: None)


def test_what_is_no_key_is_refused():
    with pytest.raises(TypeError, match="make one with create_key"):
        split_keys(0)
    with pytest.raises(TypeError, match="make one with create_key"):
        split_keys(jax.random.PRNGKey(0))
    with pytest.raises(TypeError, match="split already"):
        split_keys(split_keys(create_key(0)))
    with pytest.raises(ValueError, match="cannot be split into 0"):
        split_keys(create_key(0), 0)


def test_one_prompt_goes_to_every_device(pipeline):
    ids = prepare_prompts(pipeline, "a heart")
    assert ids.shape == (8, 1, 77)
    assert (ids == ids[0]).all()


def test_a_list_is_spread_in_order(pipeline):
    prompts = [f"a {color} heart" for color in ("red", "blue")] * 8
    ids = prepare_prompts(pipeline, prompts)
    assert ids.shape == (8, 2, 77)
    assert np.array_equal(ids.reshape(16, 77), pipeline.prepare_inputs(prompts))


def test_prompts_that_do_not_fill_the_devices_are_refused(pipeline):
    with pytest.raises(
        ValueError, match="5 prompts cannot be spread over 8 devices: give 8, or repeat them"
    ):
        prepare_prompts(pipeline, ["a heart"] * 5)
    with pytest.raises(
        ValueError, match="11 prompts cannot be spread over 8 devices: give 8 or 16"
    ):
        prepare_prompts(pipeline, ["a heart"] * 11)


def test_no_prompts_are_refused(pipeline):
    with pytest.raises(ValueError, match="no prompts: give 8"):
        prepare_prompts(pipeline, [])


@pytest.mark.parametrize("prompts", [["a heart"] * 7 + [3], 3, None, {"a heart": 1}])
def test_prompts_that_are_no_strings_are_refused(pipeline, prompts):
    with pytest.raises(TypeError, match="string"):
        prepare_prompts(pipeline, prompts)


def test_a_long_prompt_warns_with_what_is_cut_off(pipeline):
    prompt = "a heart " * 37 + "a star on a white background"
    with pytest.warns(
        UserWarning,
        match=r"^A prompt has 80 tokens, and 75 are read: not 'star on a white background'\.$",
    ):
        ids = prepare_prompts(pipeline, prompt)
    assert ids.shape == (8, 1, 77)


def test_the_warning_shows_exactly_the_lost_words(pipeline):
    with pytest.warns(UserWarning, match="not 'white background'"):
        prepare_prompts(pipeline, "a heart " * 36 + "a star on white background")


def test_a_prompt_that_just_fits_does_not_warn(pipeline, recwarn):
    prepare_prompts(pipeline, "heart " * 75)
    assert not recwarn.list


def test_words_that_the_bundled_checkpoint_never_saw_are_named(pipeline):
    with pytest.warns(UserWarning, match=r"never saw 'cat', 'sofa'.*It knows these words: .*heart"):
        prepare_prompts(pipeline, "a cat on a red sofa")


def test_words_that_it_knows_do_not_warn(pipeline, recwarn):
    prepare_prompts(pipeline, "A small red heart, on a WHITE background.")
    assert not recwarn.list
