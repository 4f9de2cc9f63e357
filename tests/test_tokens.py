"""The tokenizers of both models against those of transformers."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken
from transformers import CLIPTokenizerFast, Qwen2TokenizerFast

from course import flux2, sd
from course.flux2 import tokenizer as qwen
from course.sd.tokenizer import Tokenizer, read_encoder
from helpers import bundled_checkpoint
from tests.makers.common import FIXTURES

SHAPES_SD = Path(bundled_checkpoint("shapes-sd").source) / "tokenizer"
SHAPES_FLUX2 = Path(bundled_checkpoint("shapes-flux2").source) / "tokenizer"
PADDED = {"padding": "max_length", "truncation": True, "return_tensors": "np"}
ODD_TEXTS = [
    "",
    " ",
    "a small red heart",
    "A  SMALL\nred heart!!",
    "it's we'll I'd",
    "12345",
    "a" * 200,
    "naïve café e\u0301 中文",
    "<think> <|im_end|>",
    "a red heart " * 20,
    "…",
]
ODD_PIECES = [
    *"aäßéñçøİıΩжя中日本한ไทย0123456789½²'’s.,;:!?-_/#<|> \t\n\u00a0\u3000\u200b",
    *["🙂", "e\u0301", "'s", "'LL", "heart", "Red", "isn't"],
    *["<|endoftext|>", "<|startoftext|>", "<|ENDOFTEXT|>"],
]


def test_tokens_are_those_of_clips_fast_tokenizer():
    random = np.random.default_rng(0)
    texts = list(ODD_TEXTS)
    for _ in range(1200):
        texts.append("".join(random.choice(ODD_PIECES, random.integers(1, 60))))
    tokenize = Tokenizer((read_encoder(SHAPES_SD),))
    with pytest.warns(UserWarning, match="are read: not"):
        found = tokenize(texts)[:, 0]
    expected = CLIPTokenizerFast.from_pretrained(SHAPES_SD)(texts, max_length=77, **PADDED)
    assert np.array_equal(found, expected.input_ids)


def test_tokens_are_those_of_qwens_tokenizer_with_its_chat_template():
    tokenizer = Qwen2TokenizerFast.from_pretrained(SHAPES_FLUX2)
    chats = []
    for text in ODD_TEXTS:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,
        )
        chats.append(chat)
    tokenize = qwen.read_tokenizer(SHAPES_FLUX2)
    with pytest.warns(UserWarning, match="tokens with the template around it, and [0-9]+ are read"):
        ids, mask = tokenize(ODD_TEXTS)
    expected = tokenizer(chats, max_length=ids.shape[1], **PADDED)
    assert np.array_equal(ids, expected.input_ids)
    assert np.array_equal(mask, expected.attention_mask)


@pytest.mark.parametrize("name", ["tokenizer", "tokenizer-with-word"])
def test_tokens_are_those_of_transformers_5_by_its_one_file(name):
    """``python -m tests.makers.newest`` saved the files and recorded the ids."""
    folder = FIXTURES / "newest"
    assert not (folder / name / "vocab.json").exists()
    recorded = json.loads((folder / "recorded.json").read_text(encoding="utf-8"))
    found = Tokenizer((read_encoder(folder / name),))(recorded["prompts"])
    assert found[:, 0].tolist() == recorded["ids"][name]


def test_words_that_were_added_are_words_as_in_clips_fast_tokenizer(tmp_path):
    tokenizer = CLIPTokenizerFast.from_pretrained(SHAPES_SD)
    tokenizer.add_tokens(["<cat-toy>", AddedToken("Heartlike", single_word=True, normalized=True)])
    tokenizer.save_pretrained(tmp_path)
    texts = ["a red <cat-toy> star", "heartlike heartlikes HEARTLIKE", "a<cat-toy>b"]
    expected = tokenizer(texts, max_length=77, **PADDED).input_ids
    for name in ("tokenizer.json", "vocab.json"):  # of which one is enough
        other = shutil.copytree(tmp_path, tmp_path / f"without-{name}")
        (other / name).unlink()
        assert np.array_equal(Tokenizer((read_encoder(other),))(texts)[:, 0], expected)


@pytest.mark.parametrize("direction", ["Left", "Right"])
def test_a_tokenizer_that_was_saved_after_a_call_pads_and_cuts_nothing(tmp_path, direction):
    expected = qwen.read_tokenizer(SHAPES_FLUX2)(["a star"])
    folder = shutil.copytree(SHAPES_FLUX2, tmp_path / "tokenizer")
    saved = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    saved.enable_padding(direction=direction.lower(), length=40)
    saved.enable_truncation(2, direction=direction.lower())
    saved.save(str(folder / "tokenizer.json"))
    for found, each in zip(qwen.read_tokenizer(folder)(["a star"]), expected, strict=True):
        assert np.array_equal(found, each)


# Contents of tokenizer.json, and the sentence by which a tokenizer with it alone is refused.
WHOLE = json.loads((FIXTURES / "newest" / "tokenizer" / "tokenizer.json").read_text("utf-8"))
BAD_FILES = {
    "nothing": ({}, "tokenizer.json is no tokenizer of CLIP"),
    "no model": (WHOLE | {"model": None}, "tokenizer.json is no tokenizer of CLIP"),
    "another model": (
        WHOLE | {"model": {"type": "WordPiece", "vocab": {"a": 0}}},
        "tokenizer.json is no tokenizer of CLIP",
    ),
    "no end": (
        WHOLE | {"model": WHOLE["model"] | {"vocab": {"a": 0}}, "added_tokens": []},
        "is no token",
    ),
    "merges of numbers": (
        WHOLE | {"model": WHOLE["model"] | {"merges": [1]}},
        "holds no tokenizer",
    ),
    "tokens of nothing": (WHOLE | {"added_tokens": [1]}, "holds no tokenizer of CLIP"),
    "a token at another place": (
        WHOLE | {"added_tokens": [{"id": 700, "content": "<toy>"}]},
        "its token '<toy>' has no place at 700",
    ),
}


@pytest.mark.parametrize("how", BAD_FILES)
def test_a_file_that_is_no_tokenizer_of_clip_is_refused(tmp_path, how):
    content, message = BAD_FILES[how]
    folder = shutil.copytree(FIXTURES / "newest" / "tokenizer", tmp_path / "tokenizer")
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_encoder(folder)


@pytest.mark.parametrize(("package", "name"), [(sd, "shapes-sd"), (flux2, "shapes-flux2")])
def test_one_string_in_place_of_a_list_of_prompts_is_refused(package, name):
    _, _, tokenize = package.load(bundled_checkpoint(name).source)
    with pytest.raises(TypeError, match=r"Give a list of prompts: \['a star'\]"):
        tokenize("a star")


def test_a_sign_that_fills_up_is_a_special_token_in_a_prompt_as_well(tmp_path):
    """The second tokenizer of Stable Diffusion XL fills up with exclamation marks."""
    folder = shutil.copytree(SHAPES_SD, tmp_path / "tokenizer")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = json.loads((folder / file).read_text()) | {"pad_token": "!"}
        (folder / file).write_text(json.dumps(settings))
    texts = ["wow!", "a red! heart", "!", "a heart"]
    found = Tokenizer((read_encoder(folder),))(texts)[:, 0]
    expected = CLIPTokenizerFast.from_pretrained(folder)(texts, max_length=77, **PADDED)
    assert np.array_equal(found, expected.input_ids)


@pytest.mark.parametrize("name", ["shapes-sd", "shapes-sdxl"])
def test_a_prompt_that_is_too_long_is_warned_of_once_with_what_is_not_read(name):
    _, _, tokenize = sd.load(bundled_checkpoint(name).source)
    with pytest.warns(UserWarning) as warned:
        tokenize(["a red heart " * 30])
    lost = " ".join(["a red heart"] * 5)
    assert [str(warning.message) for warning in warned] == [
        f"A prompt has 90 tokens, and 75 are read: not {lost!r}."
    ]
    assert warned[0].filename == __file__
