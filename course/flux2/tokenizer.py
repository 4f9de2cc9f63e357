"""Qwen's tokenizer: from prompts to token ids, in the form of a chat."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

from course.model.files import find_inside, read_json
from course.model.tokens import check_prompts, max_length, read_splitter, say_what_is_not_read

# What Qwen3's chat template makes of one message to which it shall answer without thinking.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PADDING = "<|endoftext|>"
# How Qwen's tokenizer cuts texts into words: endings, letters, single digits, signs, line ends.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MAX_LENGTH = 512  # of a prompt, with the template around it


@dataclass(frozen=True)
class Tokenizer:
    """Turns prompts into token ids. To use it, call it with a list of prompts."""

    splitter: tokenizers.Tokenizer
    max_length: int = MAX_LENGTH  # how many tokens the text encoder reads

    def __call__(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Token ids, int32, and which of them are no padding, bool: each (prompts, tokens).

        If a prompt is too long, there is a warning, and its end is left out.

        Raises
        ------
        TypeError
            If there is one string in place of a list.
        """
        check_prompts(prompts, self.say_what_is_lost)
        padding = self.splitter.token_to_id(PADDING)
        ids = np.full((len(prompts), self.max_length), padding, np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, prompt in enumerate(prompts):
            encoding = self.splitter.encode(TEMPLATE.format(prompt=prompt))
            read = encoding.ids[: self.max_length]
            ids[row, : len(read)] = read
            mask[row, : len(read)] = True
        return ids, mask

    def say_what_is_lost(self, prompt: str, name: str = "A prompt") -> str | None:
        """Return a sentence on the end of a prompt that is too long; None if all is read."""
        text = TEMPLATE.format(prompt=prompt)
        starts = [start for start, _ in self.splitter.encode(text).offsets]
        around = " with the template around it"
        return say_what_is_not_read(text, starts, self.max_length, around, name)


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a tokenizer's folder: ``tokenizer.json``, and whether fewer than 512 tokens are read.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing or damaged.
    """
    folder = Path(folder)
    file = find_inside(folder, "tokenizer.json")
    splitter = read_splitter(file, PATTERN)
    if splitter.token_to_id(PADDING) is None:
        raise ValueError(f"{file} has no token {PADDING}: it is not Qwen's. Get Qwen3's.")
    settings_file = find_inside(folder, "tokenizer_config.json")
    return Tokenizer(splitter, max_length(settings_file, read_json(settings_file), MAX_LENGTH))
