"""CLIP's tokenizer: prompts to token ids."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"  # words, digits, signs, as in openai/CLIP


def read_tokenizer(folder: Path) -> Callable[[list[str]], np.ndarray]:
    """Read ``vocab.json``, ``merges.txt`` and ``tokenizer_config.json``, as transformers' ``CLIPTokenizerFast`` does.

    It gives a function from a list of prompts to token ids, int32, (prompts, tokens), which warns of a long prompt.
    """
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    room, names = settings["model_max_length"], [settings[f"{name}_token"] for name in ("bos", "eos", "pad")]
    start, end, pad = (name if isinstance(name, str) else name["content"] for name in names)
    vocabulary = json.loads((folder / "vocab.json").read_text())
    lines = (folder / "merges.txt").read_text().splitlines()
    merges = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, end_of_word_suffix="</w>", unk_token=end))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), spaces, normalizers.Lowercase()])
    words = pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=True) for token in dict.fromkeys((start, end, pad))])
    first, last, filler = (tokenizer.token_to_id(token) for token in (start, end, pad))

    def tokenize(prompts: list[str]) -> np.ndarray:
        ids = np.full((len(prompts), room), filler, np.int32)
        for row, prompt in zip(ids, prompts, strict=True):
            tokens = tokenizer.encode(prompt).ids
            if len(tokens) > room - 2:
                lost = tokenizer.decode(tokens[room - 2 :]).replace("</w>", " ").strip()
                warning = f"A prompt has {len(tokens)} tokens, and {room - 2} are read: not {lost!r}."
                warnings.warn(warning, stacklevel=3)
            tokens = [first, *tokens[: room - 2], last]
            row[: len(tokens)] = tokens
        return ids

    return tokenize
