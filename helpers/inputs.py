"""What a pipeline is called with: keys, and prompts as token ids, one share for each device."""

import re
import warnings
from typing import Any

import jax
import numpy as np

LARGEST_SEED = 2**32 - 1  # of a larger one, JAX takes the last 32 bits

# What web interfaces make something else of: (red:1.4) and [red:blue:0.5], ((red)) and [[red]],
# BREAK, <lora:name:0.8>.
OTHER_SYNTAX = re.compile(
    r"[(\[][^()\[\]]*[^\W\d]\s*:\s*-?(?:\d(?:\.\d*)?|\.\d+)\s*[)\]]|\bBREAK\b"
    r"|\(\([^()]+\)\)|\[\[[^\[\]]+\]\]|<(?:lora|lyco|hypernet):[^>]*>"
)


def check_seed(seed: int) -> int:
    """Return a seed as an ``int``, if a key can be made of it.

    Raises
    ------
    TypeError
        If it is no whole number.
    ValueError
        If it has more than 32 bits, or is below 0.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
        raise TypeError(f"The seed is {seed!r}: give a whole number.")
    if not 0 <= seed <= LARGEST_SEED:
        raise ValueError(f"The seed is {seed}: give a whole number from 0 to {LARGEST_SEED}.")
    return int(seed)


def create_key(seed: int = 0) -> jax.Array:
    """Make the random key that everything random in an image follows from.

    Builds on ``jax.random.key``: a typed key, scalar, of dtype ``key<fry>``. Seeds are whole
    numbers from 0 to 4294967295, and each gives a different key.

    Examples
    --------
    >>> create_key(0).shape
    ()
    """
    return jax.random.key(check_seed(seed))


def split_keys(key: jax.Array, n: int | None = None) -> jax.Array:
    """Split a key into one for each device, so that each device draws a different image.

    Builds on ``jax.random.split``.

    Parameters
    ----------
    key : jax.Array
        One key, from ``create_key``.
    n : int, optional
        How many; by default ``jax.device_count()``.

    Returns
    -------
    jax.Array
        ``n`` keys, of shape (n,). The same key always gives the same ones.

    Raises
    ------
    TypeError
        If ``key`` is not one typed key.
    ValueError
        If ``n`` is less than 1.

    Examples
    --------
    >>> split_keys(create_key(0), 3).shape
    (3,)
    """
    if not isinstance(key, jax.Array) or not jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key):
        raise TypeError(f"A key was expected, but got {key!r}: make one with create_key(seed).")
    if key.ndim:
        raise TypeError(
            f"One key was expected, but got {key.size} of shape {key.shape}: these are split "
            "already."
        )
    if n is None:
        n = jax.device_count()
    if n < 1:
        raise ValueError(f"A key cannot be split into {n}: give at least 1.")
    return jax.random.split(key, n)


def prepare_prompts(pipeline: Any, prompts: str | list[str]) -> np.ndarray:
    """Tokenize prompts and spread them over the devices.

    Builds on ``pipeline.prepare_inputs``, and spreads as Flax's ``shard`` does.

    Parameters
    ----------
    pipeline : FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline
        Its tokenizers are used.
    prompts : str or list of str
        One prompt, which every device gets, or a list whose length the number of devices divides;
        device ``d`` gets the ``d``-th share of the list.

    Returns
    -------
    numpy.ndarray
        Token ids, int32 or int64 of shape (devices, prompts per device, 77); XL's pipeline, with
        its two tokenizers, gives (devices, prompts per device, 2, 77).

    Raises
    ------
    TypeError
        If a prompt is not a string.
    ValueError
        If there are no prompts, or they do not fill the devices.

    Warns
    -----
    UserWarning
        If a prompt is longer than the text encoder reads, with what is cut off; if it has what only
        other programs understand; and, with a bundled checkpoint, if it has words that the
        checkpoint never saw.
    """
    devices = jax.device_count()
    if isinstance(prompts, str):
        prompts = [prompts] * devices
    is_list = isinstance(prompts, (list, tuple))
    if not is_list or not all(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(f"Prompts must be a string or a list of strings, but got {prompts!r}.")
    if not prompts:
        raise ValueError(
            f"There are no prompts: give {devices}, or one as a string for every device."
        )
    each, surplus = divmod(len(prompts), devices)
    if surplus:
        fitting = f"{(each + 1) * devices}"
        if each:
            fitting = f"{each * devices} or {fitting}"
        raise ValueError(
            f"{len(prompts)} prompts cannot be spread over {devices} devices: give {fitting}, or "
            f"repeat them with [p for p in prompts for _ in range({devices})]."
        )
    for prompt in dict.fromkeys(prompts):
        warn_about_prompt(pipeline.tokenizer, prompt, stacklevel=3)
    ids = pipeline.prepare_inputs(list(prompts))
    return ids.reshape(devices, -1, *ids.shape[1:])


def warn_about_prompt(tokenizer: Any, prompt: str, stacklevel: int = 2) -> None:
    """Warn of what the text encoder will not read, and of words unknown to a bundled checkpoint.

    The warning names the line of the caller, or with a higher ``stacklevel`` a caller of that.
    """
    room = tokenizer.model_max_length - 2  # besides the start token and the end token
    tokens = tokenizer.tokenize(prompt)
    if len(tokens) > room:
        lost = tokenizer.convert_tokens_to_string(tokens[room:]).strip()
        warnings.warn(
            f"A prompt has {len(tokens)} tokens, and {room} are read: not {lost!r}.",
            stacklevel=stacklevel,
        )
    sentence = say_what_is_plain_text(prompt)
    if sentence:
        warnings.warn(sentence, stacklevel=3)
    # The tokenizers of the bundled checkpoints list the words that captions in training had.
    known = tokenizer.init_kwargs.get("caption_words")
    if known is None:
        return
    sentence = say_what_is_unknown(prompt, known)
    if sentence:
        warnings.warn(
            f"{sentence} It knows these words: {', '.join(known)}.", stacklevel=stacklevel
        )


def say_what_is_plain_text(text: str, prompt: str = "A prompt") -> str | None:
    """Return a sentence on what in a prompt has a meaning in other programs only, if any has.

    ``course.model.tokens`` has the same for its tokenizers, as a model imports none of this.

    >>> say_what_is_plain_text("a (red:1.4) heart")[:57]
    "A prompt has '(red:1.4)', which is read as plain text: we"
    """
    found = OTHER_SYNTAX.search(text)
    if not found:
        return None
    return (
        f"{prompt} has {found[0]!r}, which is read as plain text: weights, BREAK and <lora:…> are "
        "for other programs. Leave them out, and build a LoRA in by course.lora."
    )


def say_what_is_unknown(prompt: str, known: list[str]) -> str | None:
    """Return a sentence on the words of a prompt that a bundled checkpoint never saw, if any.

    >>> say_what_is_unknown("A red house", ["a", "red", "heart"])
    "The bundled checkpoint never saw 'house', so expect nothing sensible of 'A red house'."
    """
    words = dict.fromkeys(re.findall(r"\w+", prompt.lower()))  # each once, in their order
    unknown = [word for word in words if word not in known]
    if unknown:
        what = ", ".join(map(repr, unknown))
    elif prompt.strip() and not words:
        what = "any of it"
    else:
        return None
    return f"The bundled checkpoint never saw {what}, so expect nothing sensible of {prompt!r}."
