"""A tokenizer of Qwen's kind whose vocabulary is all bytes and the words of the captions."""

import re
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen2TokenizerFast

from course.flux2.tokenizer import PADDING, TEMPLATE
from training.tokenizer import corpus

MAX_LENGTH = 20  # tokens of a prompt, with the template around it: the longest caption has 20
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


def build() -> tokenizers.Tokenizer:
    """A tokenizer for which each word of the captions and of the template is one token."""
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
    splitter.train_from_iterator([*corpus(), *around], trainer)
    splitter.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return splitter


def write(folder: Path) -> Qwen2TokenizerFast:
    """Save the tokenizer in the files that transformers reads."""
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=build(),
        model_max_length=MAX_LENGTH,
        pad_token=PADDING,
        eos_token="<|im_end|>",
        unk_token=None,
        bos_token=None,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
