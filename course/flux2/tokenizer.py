"""Qwen's tokenizer: from prompts to token ids, in the form of a chat."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers

# What Qwen3's chat template makes of one message to which it shall answer without thinking.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PADDING = "<|endoftext|>"
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
        if isinstance(prompts, str):
            raise TypeError(f"Give a list of prompts: [{prompts!r}]")
        padding = self.splitter.token_to_id(PADDING)
        ids = np.full((len(prompts), self.max_length), padding, np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, prompt in enumerate(prompts):
            found = self.splitter.encode(TEMPLATE.format(prompt=prompt)).ids
            if len(found) > self.max_length:
                warnings.warn(
                    f"A prompt has {len(found)} tokens with the template around it, and "
                    f"{self.max_length} are read: its end is left out.",
                    stacklevel=2,
                )
                found = found[: self.max_length]
            ids[row, : len(found)] = found
            mask[row, : len(found)] = True
        return ids, mask


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a tokenizer's folder: ``tokenizer.json``, and whether fewer than 512 tokens are read.

    Raises
    ------
    FileNotFoundError
        If it is missing.
    """
    files = Path(folder, "tokenizer.json"), Path(folder, "tokenizer_config.json")
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing: give a whole folder in diffusers' format.")
    settings = json.loads(files[1].read_text(encoding="utf-8"))
    max_length = min(MAX_LENGTH, int(settings.get("model_max_length", MAX_LENGTH)))
    return Tokenizer(tokenizers.Tokenizer.from_file(str(files[0])), max_length)
