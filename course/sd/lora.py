"""What LoRA files call the layers of Stable Diffusion, and new words, which may come with a LoRA.

Files are read in the formats of diffusers and PEFT, and of kohya's scripts (``lora_unet_…``), and
written in the latter, which most programs read. The embedding of a word is in a file beside the
LoRA's (textual inversion, arXiv:2208.01618).
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course.model.files import check_numbers, read_safetensors, write_safetensors
from course.model.lora import Layer, Pair, model_layers, read_pairs, save_pairs
from course.sd.clip import EMBEDDINGS
from course.sd.configs import Config
from course.sd.convert import name_unet
from course.sd.tokenizer import Tokenizer

# What kohya's scripts put in front of the names of a part's layers.
KOHYA = {
    "unet": ("lora_unet",),
    "text_encoder": ("lora_te", "lora_te1"),
    "text_encoder_2": ("lora_te2",),
}

# What old files of diffusers call the layers of an attention, and what these are called now, in the
# UNet and in text encoders.
OLD_LAYERS = {
    "to_q": ("to_q", "q_proj"),
    "to_k": ("to_k", "k_proj"),
    "to_v": ("to_v", "v_proj"),
    "to_out": ("to_out.0", "out_proj"),
}


def read_lora(file: str | Path, params: dict, config: Config) -> dict[str, dict[str, Pair]]:
    """Read a LoRA file for a model.

    Parameters
    ----------
    file : str or Path
        Safetensors of diffusers and PEFT (``unet.….lora_A.weight``, or without the part's name), of
        kohya (``lora_unet_….lora_down.weight``) with or without convolutions, or by the names that
        diffusers had before (``….processor.to_q_lora.down.weight``).
    params, config : dict, Config
        The model's, as ``course.sd.load`` gives them. Shapes are enough, as of
        ``parameter_shapes``.

    Returns
    -------
    dict
        For each part, pairs by the name of the weight to which their product is added. Alpha is in
        them already. Of stacked layers, those that the file does not name have zeros.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged or a pickle, it is of another kind than LoRA, it has keys
        that fit nothing in the model, which are listed, or shapes of a different model.
    """
    return read_pairs(file, params, name_layers(params, config))


def name_layers(params: dict, config: Config) -> dict[str, Layer]:
    """Return all layers of a model by all names that LoRA files have for them."""
    layers = {}
    bare = {}  # by a name without the part's, all layers that it may mean
    for layer in model_layers(params):
        for name in old_and_new_names(layer.file_name):
            layers[f"{layer.part}.{name}"] = layer
            bare.setdefault(name, []).append(layer)
        names = [layer.file_name]
        if layer.part == "unet":  # kohya writes that of XL by the names of the original layout
            names.append(_original_layer(layer, config))
        for prefix in KOHYA.get(layer.part, ()):
            for name in names:
                layers[f"{prefix}_{name.replace('.', '_')}"] = layer
    for name, meant in bare.items():
        if len(meant) == 1:  # both text encoders of XL have the same names
            layers[name] = meant[0]
    return layers


def old_and_new_names(layer: str) -> list[str]:
    """Return what diffusers calls a layer, and what it did before it used PEFT.

    >>> old_and_new_names("mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0")[1:]
    ['mid_block.attentions.0.transformer_blocks.0.attn1.to_out', \
'mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out']
    """
    names = [layer]
    for old, today in OLD_LAYERS.items():
        for name in today:
            if layer.endswith(f".{name}"):
                before = layer.removesuffix(name)
                names += [f"{before}{old}", f"{before}processor.{old}"]
    return list(dict.fromkeys(names))


def _original_layer(layer: Layer, config: Config) -> str:
    """Return what a layer of the UNet is called in the original layout."""
    return name_unet(f"{layer.file_name}.weight", config).removesuffix(".weight")


def save_lora(
    file: str | Path, lora: dict[str, dict[str, Pair]], config: Config, dtype: Any = np.float16
) -> None:
    """Write a LoRA by the names of kohya's scripts, which other programs read as well.

    diffusers (``load_lora_weights``), ComfyUI, kohya's scripts and ``read_lora`` find every key in
    it. Alpha is the rank, so the product is added as it was trained.

    Parameters
    ----------
    file : str or Path
        It is there whole or not at all. Its folder is made if it is not there.
    lora : dict
        For each part, pairs by the name of the weight that they change.
    config : Config
        The model's. In a file for Stable Diffusion XL, the UNet's layers have the names of the
        original layout, since kohya's scripts train that one.
    dtype : dtype
        Of what is written.
    """

    def name_layer(layer: Layer) -> str:
        """Return what kohya's scripts call it: ``lora_unet_mid_block_resnets_0_conv1``."""
        prefix = KOHYA[layer.part][0]
        name = layer.file_name
        if config.is_xl and layer.part == "text_encoder":
            prefix = "lora_te1"
        if config.is_xl and layer.part == "unet":
            name = _original_layer(layer, config)
        return f"{prefix}_{name.replace('.', '_')}"

    save_pairs(file, lora, name_layer, dtype)


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
    known = table[np.array(encoder.split(like))]  # (tokens, channels)
    vectors = {"text_encoder": known.mean(axis=0)[None]}
    return _append_word(params, config, tokenize, word, vectors)


def _not_new(word: str) -> ValueError:
    return ValueError(
        f"{word!r} is no new word: choose one without spaces and signs that the model does not "
        "know."
    )


def _append_word(
    params: dict, config: Config, tokenize: Tokenizer, word: str, vectors: dict[str, jax.Array]
) -> tuple[dict, Config, Tokenizer]:
    """Give a model one more word.

    For each text encoder there are the embeddings of the tokens that the word stands for, (tokens,
    channels).
    """
    if not word.strip() or len(word.split()) > 1 or len(tokenize.encoders[0].split(word)) == 1:
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
    """Where the embedding of a LoRA's word is: beside the LoRA's file."""
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


# What files for Stable Diffusion XL call the embeddings of its two text encoders.
XL_EMBEDDINGS = {"clip_l": "text_encoder", "clip_g": "text_encoder_2"}


def read_embedding(
    file: str | Path, params: dict, config: Config, tokenize: Tokenizer, word: str | None = None
) -> tuple[dict, Config, Tokenizer]:
    """Give a model a word with trained embeddings (textual inversion).

    Parameters
    ----------
    file : str or Path
        Safetensors with one array, which has the word for its name, as diffusers writes it; with
        ``emb_params``, as other programs do; or with ``clip_l`` and ``clip_g``, for Stable
        Diffusion XL. A word may stand for several tokens.
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
    if arrays.keys() == XL_EMBEDDINGS.keys():
        found = {part: arrays[name] for name, part in XL_EMBEDDINGS.items()}
        name = file.stem
    elif len(arrays) == 1:
        ((name, value),) = arrays.items()
        found = {"text_encoder": value}
        if name == "emb_params":
            name = file.stem
    else:
        raise ValueError(
            f"{file} has {len(arrays)} arrays: "
            "give one with one array, the embedding, named by its word."
        )
    if len(found) != len(config.text):
        kinds = {1: "with one text encoder", 2: "with two text encoders, as Stable Diffusion XL"}
        raise ValueError(
            f"{file} is for a model {kinds[len(found)]}, and this one has {len(config.text)}: "
            "take one for this model."
        )
    vectors = {}
    for (part, value), text in zip(found.items(), config.text, strict=True):
        check_numbers(file, value)
        if value.shape[-1:] != (text.hidden_size,) or len(value.shape) > 2:
            raise ValueError(
                f"{file} has a vector of {value.shape}, and this model's have {text.hidden_size} "
                "numbers."
            )
        vectors[part] = np.asarray(value, np.float32).reshape(-1, text.hidden_size)
    if len({len(rows) for rows in vectors.values()}) > 1:
        raise ValueError(f"{file} has not as many vectors for both text encoders: get it again.")
    return _append_word(params, config, tokenize, word or name, vectors)
