"""From prompts to token ids: what the tokenizers of all models have in common."""

import warnings
from pathlib import Path
from typing import Any

import tokenizers

from course.model.files import read_json


def check_prompts(prompts: Any) -> None:
    """Raise ``TypeError`` if there is one string in place of a list of prompts."""
    if isinstance(prompts, str):
        raise TypeError(f"Give a list of prompts: [{prompts!r}]")


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


def warn_of_length(text: str, starts: list[int], room: int, around: str = "") -> None:
    """Warn of the end of a prompt that is too long, as ``say_what_is_not_read`` says it."""
    sentence = say_what_is_not_read(text, starts, room, around)
    if sentence:
        warnings.warn(sentence, stacklevel=3)  # whoever called the tokenizer


def read_splitter(file: Path) -> tokenizers.Tokenizer:
    """Read a ``tokenizer.json``, which says how texts are cut into tokens.

    Raises
    ------
    FileNotFoundError, ValueError
        If it is missing or damaged.
    """
    read_json(file)  # which says what is wrong with a file that is no JSON
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no kind of its own
        raise ValueError(f"{file} is no tokenizer: {error}. Get it again.") from None


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
    if not isinstance(token, str):
        raise ValueError(f"{file} does not say what {name} is: download the folder again.")
    return token


def max_length(file: Path, settings: dict, default: int) -> int:
    """Return how many tokens are read at most, by a tokenizer's settings or else by default.

    Raises
    ------
    ValueError
        If they say it, and it is no number. ``file`` is where they stand, for the message.
    """
    length = settings.get("model_max_length", default)
    if not isinstance(length, int | float):
        raise ValueError(
            f"{file} has {length!r} for model_max_length, which is no number: download the folder "
            "again."
        )
    return int(length)
