"""From prompts to token ids: what the tokenizers of all models have in common."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from course.model.files import read_json

# What web interfaces make something else of: (red:1.4) and [red:blue:0.5], ((red)) and [[red]],
# BREAK, <lora:name:0.8>.
OTHER_SYNTAX = re.compile(
    r"[(\[][^()\[\]]*[^\W\d]\s*:\s*-?(?:\d(?:\.\d*)?|\.\d+)\s*[)\]]|\bBREAK\b"
    r"|\(\([^()]+\)\)|\[\[[^\[\]]+\]\]|<(?:lora|lyco|hypernet):[^>]*>"
)


def check_prompts(prompts: Any, say_what_is_lost: Callable[[str], str | None]) -> None:
    """Raise ``TypeError`` unless this is a list of prompts; warn of what will not be drawn.

    That is what only other programs understand, and the end of what is too long, of which a
    tokenizer's ``say_what_is_lost`` makes a sentence.
    """
    if isinstance(prompts, str):
        raise TypeError(f"Give a list of prompts: [{prompts!r}]")
    for prompt in prompts:
        if not isinstance(prompt, str):
            raise TypeError(f"A prompt is {prompt!r}: give strings.")
        for sentence in (say_what_is_plain_text(prompt), say_what_is_lost(prompt)):
            if sentence:
                warnings.warn(sentence, stacklevel=3)  # whoever called the tokenizer


def say_what_is_plain_text(text: str, prompt: str = "A prompt") -> str | None:
    """Return a sentence on what in a prompt has a meaning in other programs only, if any has."""
    found = OTHER_SYNTAX.search(text)
    if not found:
        return None
    return (
        f"{prompt} has {found[0]!r}, which is read as plain text: weights, BREAK and <lora:…> are "
        "for other programs. Leave them out, and build a LoRA in by course.lora."
    )


def say_what_is_not_read(
    text: str, starts: list[int], room: int, around: str = "", prompt: str = "A prompt"
) -> str | None:
    """Return a sentence on the end of a prompt that is too long, or None if all of it is read.

    Parameters
    ----------
    text : str
        The prompt, with what stands around it.
    starts : list of int
        Where in the text each token starts.
    room : int
        How many tokens are read.
    around, prompt : str
        What stands around the prompt, and which prompt it is, for the sentence.
    """
    if len(starts) <= room:
        return None
    lost = text[starts[room] :].strip()
    return f"{prompt} has {len(starts)} tokens{around}, and {room} are read: not {lost!r}."


def read_splitter(file: Path, pattern: str) -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json`` of byte pairs, which says how texts are cut into tokens.

    It may have been saved after a call with padding or truncation, which it then holds. Both are
    left to the model here.

    Parameters
    ----------
    file : Path
    pattern : str
        The regular expression by which the model's tokenizer cuts texts into words. No other is
        used: a stranger's could run for ever.

    Raises
    ------
    FileNotFoundError, ValueError
        If it is missing or damaged, or it cuts texts by other rules.
    """
    content = read_json(file)
    match content:
        case {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "pretokenizers": [
                    {"pattern": {"Regex": found}, "behavior": "Isolated", "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ]
            },
            "post_processor": None | {"type": "ByteLevel"},
            "model": {"type": "BPE", "dropout": None},
        } if found == pattern:
            pass
        case _:
            raise ValueError(
                f"{file} is no tokenizer of this model, as it cuts texts by other rules: get it "
                "from the same model."
            )
    try:
        splitter = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no kind of its own
        raise ValueError(f"{file} is no tokenizer: {error}. Get it again.") from None
    splitter.no_padding()
    splitter.no_truncation()
    return splitter


def special_token(file: Path, settings: dict, name: str) -> str:
    """Return a token such as "bos_token", of which a tokenizer's settings say what it is.

    Raises
    ------
    ValueError
        If they do not. ``file`` is where they stand, for the message.
    """
    token = settings.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or not token:
        raise ValueError(f"{file} does not say what {name} is: download the folder again.")
    return token


def check_vocabulary(folder: Path, splitter: tokenizers.Tokenizer, rows: int) -> None:
    """Raise ``ValueError`` if a tokenizer has tokens that a text encoder has no embeddings for."""
    last = max(splitter.get_vocab().values(), default=0)
    if last >= rows:
        raise ValueError(
            f"{folder} has tokens up to number {last}, and the text encoder's configuration means "
            f"{rows} of them, from 0 on: get both from the same model."
        )


def max_length(file: Path, settings: dict, room: int) -> int:
    """Return how many tokens are read at most: those that a tokenizer's settings allow, or fewer.

    ``room`` is for how many the text encoder has room. Some settings have 10³⁰ for no limit.

    Raises
    ------
    ValueError
        If they say it, and it is no number, or too small for the tokens around a prompt. ``file``
        is where they stand, for the message.
    """
    length = settings.get("model_max_length", room)
    if isinstance(length, bool) or not isinstance(length, int | float) or not length > 2:
        raise ValueError(
            f"{file} has {length!r} for model_max_length, which is no number of tokens: download "
            "the folder again."
        )
    return int(min(length, room))
