"""Tokenizers of CLIP's and of Qwen's kind, with all bytes and the words of the captions."""

import json
import re
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, Qwen2TokenizerFast
from transformers.models.clip.tokenization_clip import bytes_to_unicode

from course.flux2.tokenizer import PADDING, TEMPLATE
from lab.train.data import all_captions

CLIP_LENGTH = 77  # the length of every prompt in Stable Diffusion
START, END = "<|startoftext|>", "<|endoftext|>"

QWEN_LENGTH = 20  # tokens of a prompt, with the template around it: the longest caption has 20
SPECIAL = (PADDING, "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# Where Qwen2's tokenizer cuts a text into words.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Qwen3's, for what the course asks of it: messages, and an answer without thinking.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)


def write_clip(folder: Path) -> CLIPTokenizer:
    """Make a tokenizer for which each word of the captions is one token, and save it.

    Byte-pair merges are learned until that is so; CLIP's two files hold vocabulary and merges.
    """
    learner = tokenizers.Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    learner.train_from_iterator(
        all_captions(), trainers.BpeTrainer(end_of_word_suffix="</w>", show_progress=False)
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
        model_max_length=CLIP_LENGTH,
        # No argument of the tokenizer's own: it is kept in tokenizer_config.json, where
        # prepare_prompts finds it.
        caption_words=list(dict.fromkeys(" ".join(all_captions()).split())),
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def learn_qwen() -> tokenizers.Tokenizer:
    """Return a tokenizer for which each word of the captions and of the template is one token."""
    splitter = tokenizers.Tokenizer(models.BPE())
    splitter.normalizer = normalizers.NFC()
    splitter.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    splitter.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2_000,  # more than there are words, so that each of them becomes a token
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    around = re.split("|".join(map(re.escape, SPECIAL)), TEMPLATE.format(prompt=""))
    splitter.train_from_iterator([*all_captions(), *around], trainer)
    splitter.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return splitter


def write_qwen(folder: Path) -> Qwen2TokenizerFast:
    """Save that tokenizer in the files that transformers reads."""
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=learn_qwen(),
        model_max_length=QWEN_LENGTH,
        pad_token=PADDING,
        eos_token="<|im_end|>",
        unk_token=None,
        bos_token=None,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
