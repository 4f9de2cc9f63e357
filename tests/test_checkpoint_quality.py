"""The bundled checkpoints draw what they are told, and their parts have the form that is needed.

The scores in the model cards are of hundreds of pictures. Here a few are judged, with a threshold
far below the score, so that a broken model fails and chance does not.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import flux2, sd
from course.shapes import judge, scenes
from helpers import bundled_checkpoint, read_record
from lab.cards import flux2 as cards
from lab.record import find_left
from lab.score import flux2 as scores
from lab.train import tokenizers

ASKED = scenes.held_out_captions(32)
CAPTIONS = [scenes.caption(**named) for named in ASKED]


def draw_sd(folder):
    params, config, tokenize = sd.load(folder)
    inputs = (tokenize(CAPTIONS), jax.random.key(0), tokenize([""]))
    draw = jax.jit(sd.generate, static_argnames=sd.STATIC)
    return draw(params, config, *inputs, steps=10, guidance=3.0)


def draw_flux2(folder):
    params, config, tokenize = flux2.load(folder, jnp.float32)
    noise = flux2.random_tokens(jax.random.key(0), config, len(CAPTIONS), 64, 64)
    inputs = (*tokenize(CAPTIONS), noise, 64, 64)
    draw = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
    return draw(params, config, *inputs, steps=8, guidance=3.0, empty=tokenize([""]))


@pytest.mark.parametrize(("name", "draw"), [("shapes-sd", draw_sd), ("shapes-flux2", draw_flux2)])
def test_a_bundled_checkpoint_draws_what_captions_say(name, draw):
    images = np.asarray(draw(bundled_checkpoint(name).source))
    assert judge.count_right(ASKED, images) / len(ASKED) >= 0.8
    # The judge does not say yes to everything.
    assert judge.count_right(ASKED[1:] + ASKED[:1], images) / len(ASKED) <= 0.15


def test_the_record_and_the_card_are_of_the_bundled_checkpoint():
    left = find_left(scores, read_record("score/flux2"))
    assert not left, "the record score/flux2 is of another checkpoint"
    assert cards.tables() in cards.CARD.read_text()
    assert cards.chinese_tables() in cards.CHINESE_CARD.read_text()
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
