"""CLIP's tokenizer: from prompts to token ids."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from course.model.files import find_inside, read_json, read_text
from course.model.tokens import check_prompts, max_length, say_what_is_not_read, special_token

# Endings, words, digits and signs, as in openai/CLIP.
PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

# What settings have for tokens that were added to the vocabulary, and what they say of each.
ADDED = "added_tokens_decoder"
TOKEN_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

ROOM = 77  # how many tokens CLIP's text encoders read, where nothing else is said


@dataclass(frozen=True)
class Encoder:
    """The tokenizer of one text encoder."""

    splitter: tokenizers.Tokenizer  # cuts a text into tokens
    room: int  # how many tokens the text encoder reads
    start: int  # the id of the token before a prompt
    end: int  # and after it
    fill: int  # and of those that fill up the rest
    # New words that stand for several tokens: the id of the first one, and how many there are.
    long_words: tuple[tuple[int, int], ...] = ()

    def split(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, however many there are, without start and end."""
        return [token for token, _ in self.split_with_places(text)]

    def split_with_places(self, text: str) -> list[tuple[int, int]]:
        """Return the ids of a text's tokens, and where in the text each of them starts."""
        numbers = dict(self.long_words)
        encoding = self.splitter.encode(text)
        tokens = []
        for token, (start, _) in zip(encoding.ids, encoding.offsets, strict=True):
            tokens += [(token + n, start) for n in range(numbers.get(token, 1))]
        return tokens

    def fill_up(self, ids: list[int]) -> list[int]:
        """Return what the text encoder reads: start, as many ids as there is room for, and end."""
        row = [self.start, *ids[: self.room - 2], self.end]
        return row + [self.fill] * (self.room - len(row))


@dataclass(frozen=True)
class Tokenizer:
    """The tokenizers of all text encoders of a model. To use it, call it with prompts."""

    encoders: tuple[Encoder, ...]

    def __call__(self, prompts: list[str]) -> np.ndarray:
        """Turn prompts into token ids, int32, (prompts, text encoders, tokens).

        If a prompt has more tokens than the text encoders read, there is a warning, and its end is
        left out.

        Raises
        ------
        TypeError
            If there is one string in place of a list.
        """
        check_prompts(prompts, self.say_what_is_lost)
        room = self.encoders[0].room
        rows = np.empty((len(prompts), len(self.encoders), room), np.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            for number, encoder in enumerate(self.encoders):
                row[number] = encoder.fill_up(encoder.split(prompt))
        return rows

    def say_what_is_lost(self, prompt: str, name: str = "A prompt") -> str | None:
        """Return a sentence on the end of a prompt that is too long; None if all is read."""
        first = self.encoders[0]  # all cut at the same place
        starts = [start for _, start in first.split_with_places(prompt)]
        return say_what_is_not_read(prompt, starts, first.room - 2, prompt=name)

    def with_word(self, word: str, number: int = 1) -> "Tokenizer":
        """Return a tokenizer that knows one word more, as one token, or as so many.

        Their ids are the next ones that are free. They stand for the word wherever that stands by
        itself, with small letters or large ones.
        """
        encoders = []
        for encoder in self.encoders:
            splitter = tokenizers.Tokenizer.from_str(encoder.splitter.to_str())  # a copy
            # Of several tokens, the others get names as diffusers gives them.
            for name in (word, *(f"{word}_{n}" for n in range(1, number))):
                splitter.add_tokens([AddedToken(name, single_word=True, normalized=True)])
            long_words = encoder.long_words
            if number > 1:
                long_words += ((splitter.token_to_id(word), number),)
            encoders.append(replace(encoder, splitter=splitter, long_words=long_words))
        return Tokenizer(tuple(encoders))


def read_encoder(folder: str | Path, room: int = ROOM) -> Encoder:
    """Read the tokenizer of one text encoder, as transformers' ``CLIPTokenizerFast`` does.

    Parameters
    ----------
    folder : str or Path
        With ``tokenizer_config.json``, and either ``vocab.json`` and ``merges.txt`` or, as
        transformers 5 writes it, ``tokenizer.json`` alone.
    room : int
        How many tokens the text encoder reads. The tokenizer's settings may allow fewer.

    Raises
    ------
    FileNotFoundError, ValueError
        If one of them is missing or damaged.
    """
    folder = Path(folder)
    settings_file = find_inside(folder, "tokenizer_config.json")
    settings = read_json(settings_file)
    vocabulary, merges, added = _read_pieces(folder, settings)

    names = ("bos_token", "eos_token", "pad_token")
    start, end, fill = (special_token(settings_file, settings, name) for name in names)
    try:
        splitter = _build_splitter(vocabulary, merges, added, (start, end, fill))
    except Exception as error:  # the package raises no kind of its own
        what = str(error).partition("\n")[0]  # the other lines are about types of the package
        raise ValueError(f"{folder} holds no tokenizer of CLIP: {what}. Get it again.") from None
    return Encoder(
        splitter=splitter,
        room=max_length(settings_file, settings, room),
        start=splitter.token_to_id(start),
        end=splitter.token_to_id(end),
        fill=splitter.token_to_id(fill),
    )


def _build_splitter(
    vocabulary: dict, merges: list, added: dict | list, special: tuple[str, str, str]
) -> tokenizers.Tokenizer:
    """Build what cuts texts into tokens, from what ``_read_pieces`` gives.

    ``special`` are the tokens that start, end and fill up.
    """
    start, end, _ = special
    if isinstance(added, list):
        added = {token["id"]: token for token in added}
    for token in (start, end):
        if token not in vocabulary and token not in str(added):
            raise ValueError(f"{token!r} is no token of it")
    merges = [tuple(pair.split() if isinstance(pair, str) else pair) for pair in merges]
    contents = {token["content"] for token in added.values()}
    _check_merges(vocabulary, merges, contents | set(special))
    pieces = models.BPE(vocabulary, merges, end_of_word_suffix="</w>", unk_token=end)
    splitter = tokenizers.Tokenizer(pieces)
    splitter.normalizer = normalizers.Sequence(
        [
            normalizers.NFC(),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Lowercase(),
        ]
    )
    splitter.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="removed", invert=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for token in dict.fromkeys(special):  # each once
        splitter.add_special_tokens([AddedToken(token, normalized=True)])
    added = sorted((int(number), token) for number, token in added.items())
    others = []
    for _, token in added:
        if token["content"] not in special:
            flags = {name: token[name] for name in TOKEN_FLAGS if name in token}
            others.append(AddedToken(token["content"], **flags))
    splitter.add_tokens(others)  # at once, as each call takes long if there are many
    for number, token in added:
        if splitter.token_to_id(token["content"]) != number:
            raise ValueError(f"its token {token['content']!r} has no place at {number}")
    return splitter


def _check_merges(vocabulary: dict, merges: list, whole: set[str]) -> None:
    """Raise ``ValueError`` if nothing is joined to pieces, and warn if some pieces never come.

    So a file that was cut is noticed, which would split words in another way than in the training.
    ``whole`` are tokens that are not joined of others.
    """
    joined = {"".join(pair) for pair in merges} | whole
    lost = [
        piece for piece in vocabulary if len(piece.removesuffix("</w>")) > 1 and piece not in joined
    ]
    if lost and not merges:
        raise ValueError("it has no merges, by which letters become words")
    if lost:
        warnings.warn(
            f"A tokenizer joins nothing to {len(lost)} of its {len(vocabulary)} pieces, such as "
            f"{lost[-1]!r}: unless it is meant to be so, download its merges again.",
            stacklevel=6,  # whoever called load
        )


def _read_pieces(folder: Path, settings: dict) -> tuple[dict, list, dict | list]:
    """Return a tokenizer's vocabulary, which pieces it joins, and the tokens added to them."""
    whole = find_inside(folder, "tokenizer.json")
    separate = find_inside(folder, "vocab.json")
    content = None
    if whole.is_file() and not (separate.is_file() and ADDED in settings):
        content = read_json(whole)
    added = settings.get(ADDED, (content or {}).get("added_tokens", []))
    if separate.is_file() or content is None:
        lines = read_text(find_inside(folder, "merges.txt")).splitlines()
        merges = [line for line in lines if line and not line.startswith("#version")]
        return read_json(separate), merges, added
    match content:
        case {"model": {"vocab": dict(vocabulary), "merges": list(merges)}}:
            return vocabulary, merges, added
    raise ValueError(f"{whole} is no tokenizer of CLIP: get it again.")
