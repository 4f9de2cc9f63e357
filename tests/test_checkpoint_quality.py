"""The bundled checkpoints draw what they are told, and their parts have the form that is needed.

The scores in the model cards are of hundreds of pictures. Here a few are judged, with a threshold
far below the score, so that a broken model fails and chance does not.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import flux2, sd
from course.shapes import judge, scenes
from helpers import bundled_checkpoint, read_record
from lab.cards import few_steps as few_cards
from lab.cards import flux2 as cards
from lab.record import find_left
from lab.score import few_steps as few_scores
from lab.score import flux2 as scores
from lab.train import few_steps, tokenizers

ASKED = scenes.held_out_captions(32)
CAPTIONS = [scenes.caption(**named) for named in ASKED]


def draw_sd(folder):
    params, config, tokenize = sd.load(folder)
    inputs = (tokenize(CAPTIONS), jax.random.key(0), tokenize([""]))
    draw = jax.jit(sd.generate, static_argnames=sd.STATIC)
    return draw(params, config, *inputs, steps=10, guidance=3.0)


def draw_flux2(folder, steps, **guidance):
    params, config, tokenize = flux2.load(folder, jnp.float32)
    noise = flux2.random_tokens(jax.random.key(0), config, len(CAPTIONS), 64, 64)
    inputs = (*tokenize(CAPTIONS), noise, 64, 64)
    draw = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    return draw(params, config, *inputs, steps=steps, **guidance, empty=tokenize([""]))


DRAW = {
    "shapes-sd": draw_sd,
    "shapes-flux2": partial(draw_flux2, steps=8, guidance=3.0),
    "shapes-few": partial(draw_flux2, steps=2),
}


@pytest.mark.parametrize("name", DRAW)
def test_a_bundled_checkpoint_draws_what_captions_say(name):
    images = np.asarray(DRAW[name](bundled_checkpoint(name).source))
    assert judge.count_right(ASKED, images) / len(ASKED) >= 0.7
    # The judge does not say yes to everything.
    assert judge.count_right(ASKED[1:] + ASKED[:1], images) / len(ASKED) <= 0.15


@pytest.mark.parametrize(
    ("record", "questions", "card"),
    [("score/flux2", scores, cards), ("score/few_steps", few_scores, few_cards)],
)
def test_the_record_and_the_card_are_of_the_bundled_checkpoint(record, questions, card):
    assert not find_left(questions, read_record(record)), f"{record} is of another checkpoint"
    assert card.tables() in card.CARD.read_text()


@pytest.mark.parametrize("card", [cards, few_cards])
def test_the_chinese_card_has_the_same_scores_and_no_english_words(card):
    tables = card.chinese_tables()
    assert tables in card.CHINESE_CARD.read_text()
    names = {"CPU", "DDIM", "UNet", "sd", "shapes", "shift", *few_steps.WAYS}
    assert set(re.findall(r"[A-Za-z]{2,}", tables)) <= names


def test_what_the_shapes_count_adds_up_to_all():
    drawn = cards.own_score()
    assert sum(count["right"] for count in drawn["shapes"].values()) == drawn["right"]
    assert sum(count["asked"] for count in drawn["shapes"].values()) == drawn["pictures"]


def test_the_tokenizer_has_every_byte_its_own_words_and_the_encoders_end(pipeline):
    own = pipeline.tokenizer
    assert own.model_max_length == 77
    for word in own.init_kwargs["caption_words"]:
        assert own.tokenize(word) == [word + "</w>"]
    strange = "ein Größenvergleich: 日本語 🙂"
    assert own.unk_token_id not in own(strange, add_special_tokens=False).input_ids
    assert own.eos_token_id == pipeline.text_encoder.config.eos_token_id
    # transformers treats 2 as a mistake of old configurations, and pools elsewhere.
    assert own.eos_token_id != 2


def test_the_tokenizer_is_the_one_that_training_makes(checkpoint, tmp_path):
    tokenizers.write_clip(tmp_path)
    for made in tmp_path.iterdir():
        shipped = Path(checkpoint.source) / "tokenizer" / made.name
        assert made.read_text() == shipped.read_text(), made.name
