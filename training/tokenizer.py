"""A CLIP tokenizer whose vocabulary is the full byte alphabet and the words of the captions."""

import json
from itertools import product
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import CLIPTokenizer
from transformers.models.clip.tokenization_clip import bytes_to_unicode

from course.shapes import scenes

MAX_LENGTH = 77  # the length of every prompt in Stable Diffusion
START, END = "<|startoftext|>", "<|endoftext|>"


def corpus() -> list[str]:
    """Every caption there is, once."""
    options = [
        (*values, None)
        for values in (scenes.SIZES, scenes.COLORS, scenes.SHAPES, scenes.BACKGROUNDS)
    ]
    return [scenes.caption(*choice) for choice in product(*options)]


def write(folder: Path) -> CLIPTokenizer:
    """Make a tokenizer for which each word of the captions is one token, and save it.

    Byte-pair merges are learned until that is so; CLIP's two files hold vocabulary and merges.
    """
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    learner.train_from_iterator(
        corpus(), trainers.BpeTrainer(end_of_word_suffix="</w>", show_progress=False)
    )
    merges = [tuple(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]

    alphabet = list(bytes_to_unicode().values())
    words = (
        alphabet
        + [letter + "</w>" for letter in alphabet]
        + ["".join(merge) for merge in merges]
        + [START, END]
    )
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(words)}
    (folder / "vocab.json").write_text(
        json.dumps(vocabulary, ensure_ascii=False, indent=0) + "\n", encoding="utf-8"
    )
    lines = ["#version: 0.2", *(" ".join(merge) for merge in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokenizer = CLIPTokenizer(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        pad_token=END,
        model_max_length=MAX_LENGTH,
        # No argument of the tokenizer's own: it is kept in tokenizer_config.json, where
        # prepare_prompts finds it.
        caption_words=list(dict.fromkeys(" ".join(corpus()).split())),
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
