"""New words for Stable Diffusion, by themselves or with a LoRA.

The embeddings of a word are in a file of their own (textual inversion, arXiv:2208.01618). If it was
trained with a LoRA, that file is beside the LoRA's.
"""

import math
import re
import reprlib
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course.model.files import check_numbers, read_safetensors, write_safetensors
from course.sd.clip import EMBEDDINGS
from course.sd.configs import Config
from course.sd.tokenizer import Tokenizer

MOST_LETTERS = 100  # of a word, as the tokenizer's time grows by their square


def add_word(
    params: dict, config: Config, tokenize: Tokenizer, word: str, like: str
) -> tuple[dict, Config, Tokenizer]:
    """Give a model one more word, which starts with the mean of the embeddings of ``like``.

    Without that, the tokenizer cuts a word that it does not know into pieces, which have meanings
    of their own.

    Parameters
    ----------
    params, config, tokenize : dict, Config, Tokenizer
        From ``course.sd.load``.
    word, like : str
        A new word, of letters and digits; and words that the model knows.

    Returns
    -------
    params : dict
        With one more row in the table of embeddings, (tokens of the vocabulary + 1, channels).
    config : Config
        The configuration for them.
    tokenize : Tokenizer
        It knows the word, as one token.

    Raises
    ------
    ValueError
        If the model has two text encoders, or has the word already, or it is no word.
    """
    if config.is_xl:
        raise ValueError(
            "Stable Diffusion XL has two text encoders, and gets no new word here: "
            "use words that it knows."
        )
    encoder = tokenize.encoders[0]
    if not re.fullmatch(r"\w+", word):
        raise _not_new(word)
    table = params["text_encoder"][EMBEDDINGS]
    tokens = encoder.split(like)
    if not tokens:
        raise ValueError(f"{like!r} is no word that the model knows: say what {word} is like.")
    known = table[np.array(tokens)]  # (tokens, channels)
    vectors = {"text_encoder": known.mean(axis=0)[None]}
    return _append_word(params, config, tokenize, word, vectors)


def _not_new(word: str) -> ValueError:
    return ValueError(
        f"{reprlib.repr(word)} is no new word: choose one that the model does not know, of at most "
        f"{MOST_LETTERS} letters, without spaces and signs."
    )


def _append_word(
    params: dict, config: Config, tokenize: Tokenizer, word: str, vectors: dict[str, jax.Array]
) -> tuple[dict, Config, Tokenizer]:
    """Give a model one more word.

    For each text encoder there are the embeddings of the tokens that the word stands for, (tokens,
    channels).
    """
    encoder = tokenize.encoders[0]
    is_word = len(word) <= MOST_LETTERS and len(word.split()) == 1
    is_known = len(encoder.split(word)) == 1 or encoder.splitter.token_to_id(word) is not None
    if not is_word or is_known:
        raise _not_new(word)
    number = len(vectors["text_encoder"])
    tokenize = tokenize.with_word(word, number)
    changed = dict(params)
    texts = []
    for part, encoder, text in zip(vectors, tokenize.encoders, config.text, strict=True):
        table = params[part][EMBEDDINGS]
        first, *_ = encoder.split(word)
        if first != len(table):
            raise ValueError(
                f"The tokenizer knows {first} tokens, and the table of embeddings has {len(table)} "
                "rows: choose a model in which they are as many."
            )
        rows = jnp.asarray(vectors[part]).astype(table.dtype)
        changed[part] = params[part] | {EMBEDDINGS: jnp.concatenate([table, rows])}
        # Where a configuration does not know its end token, the largest id is taken for it, which
        # is the word's now.
        texts.append(replace(text, vocab_size=len(table) + number, eos_token_id=encoder.end))
    return changed, replace(config, text=tuple(texts)), tokenize


def word_file(file: str | Path) -> Path:
    """Return where the embedding of a LoRA's word is: beside the LoRA's file."""
    return Path(file).with_suffix(".word.safetensors")


def save_word(file: str | Path, word: str, embedding: jax.Array) -> None:
    """Write the embedding of a LoRA's word, (channels,), into a file beside the LoRA's.

    It is for diffusers on PyTorch (``load_textual_inversion``), ComfyUI's folder of embeddings, and
    ``read_word``.
    """
    tensors = {word: np.asarray(embedding, np.float32)}
    write_safetensors(word_file(file), tensors)


def read_word(
    file: str | Path, params: dict, config: Config, tokenize: Tokenizer
) -> tuple[dict, Config, Tokenizer]:
    """Give a model the word of a LoRA, with the embedding that was trained.

    ``file`` is the LoRA's, beside which the word's is. Everything else is as of ``read_embedding``,
    which reads it.
    """
    return read_embedding(word_file(file), params, config, tokenize)


# What files call the embeddings of a text encoder that do not call them by the word.
OF_PARTS = {
    "emb_params": "text_encoder",
    "emp_params": "text_encoder",  # as OneTrainer has it
    "clip_l": "text_encoder",
    "clip_g": "text_encoder_2",
    "text_encoders_0": "text_encoder",  # of diffusers' scripts from 2023
    "text_encoders_1": "text_encoder_2",
}


def read_embedding(
    file: str | Path, params: dict, config: Config, tokenize: Tokenizer, word: str | None = None
) -> tuple[dict, Config, Tokenizer]:
    """Give a model a word with trained embeddings (textual inversion).

    Parameters
    ----------
    file : str or Path
        Safetensors with one array, which has the word for its name, as diffusers writes it; with
        ``emb_params``, as other programs do; or with ``clip_l`` and ``clip_g``, for Stable
        Diffusion XL. A word may stand for several tokens. What OneTrainer adds to the text
        encoder's answer (``clip_l_out``) is left out, with a warning.
    params, config, tokenize : dict, Config, Tokenizer
        From ``course.sd.load``.
    word : str, optional
        What to call it in prompts. By default it is what the file says, or else the file's name.

    Returns
    -------
    params, config, tokenize : dict, Config, Tokenizer
        As of ``add_word``.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged, a pickle, or for a different model.
    """
    file = Path(file)
    arrays, _ = read_safetensors(file)
    outputs = [name for name in arrays if name.removesuffix("_out") in OF_PARTS.keys() - {name}]
    for name in outputs:
        del arrays[name]
    if outputs and arrays:
        warnings.warn(
            f"{file} has {' and '.join(outputs)}, too, which OneTrainer adds to the text encoder's "
            "answer: they are left out here, as in other programs.",
            stacklevel=2,
        )
    if arrays and arrays.keys() <= OF_PARTS.keys():
        embeddings = {OF_PARTS[name]: arrays[name] for name in sorted(arrays, key=OF_PARTS.get)}
        name = file.stem
    elif len(arrays) == 1:
        ((name, value),) = arrays.items()
        embeddings = {"text_encoder": value}
    else:
        raise ValueError(
            f"{file} has {len(arrays)} arrays with embeddings of words: "
            "give one with one array, named by its word."
        )
    parts = ["text_encoder", "text_encoder_2"][: len(config.text)]
    if list(embeddings) != parts:
        raise ValueError(
            f"{file} is for a model with {' and '.join(embeddings)}, and this one has "
            f"{' and '.join(parts)}: take a word for this model."
        )
    vectors = {}
    for (part, value), text in zip(embeddings.items(), config.text, strict=True):
        check_numbers(file, value)
        if value.shape[-1:] != (text.hidden_size,) or len(value.shape) > 2 or 0 in value.shape:
            raise ValueError(
                f"{file} has a vector of {value.shape}, and this model's have {text.hidden_size} "
                "numbers."
            )
        number, room = math.prod(value.shape[:-1]), tokenize.encoders[0].room
        if number > room:
            raise ValueError(
                f"{file} has {number} vectors for a word, and a prompt has room for {room} tokens: "
                "get one with fewer."
            )
        vectors[part] = np.asarray(value, np.float32).reshape(-1, text.hidden_size)
    if len({len(rows) for rows in vectors.values()}) > 1:
        raise ValueError(f"{file} has not as many vectors for both text encoders: get it again.")
    return _append_word(params, config, tokenize, word or name, vectors)
