"""LoRA: pairs of small matrices whose products are added to a model's weights (arXiv:2106.09685).

Files are read in the formats of diffusers and PEFT, and of kohya's scripts (``lora_unet_…``), and
written in the latter, which most programs read. A LoRA may come with a new word, whose embedding is
in a file beside it (textual inversion, arXiv:2208.01618).
"""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from course.model.quantize import Quantized
from course.sd.clip import EMBEDDINGS
from course.sd.configs import Config
from course.sd.convert import name_unet
from course.sd.tokenizer import Tokenizer
from course.sd.weights import (
    check_numbers,
    map_safetensors,
    names_in_files,
    stacked_name,
    to_channels_first,
    unstack_layers,
)

# What kohya's scripts put in front of the names of a part's layers.
KOHYA = {
    "unet": ["lora_unet"],
    "text_encoder": ["lora_te", "lora_te1"],
    "text_encoder_2": ["lora_te2"],
}


def _half(peft: str, others: str) -> re.Pattern:
    """What the key of one of the two matrices is; the first group is the layer's name.

    PEFT may put the name of the adapter behind its own; old files of diffusers put theirs behind an
    underscore, as ``to_q_lora.down``.
    """
    peft_name = rf"\.lora_{peft}(?:\.\w+)?"
    name = rf"\.lora_{others}|(?:\.lora|\.lora_linear_layer|_lora)\.{others}"
    return re.compile(rf"(.+?)(?:{peft_name}|{name})\.weight")


DOWN = _half("A", "down")
UP = _half("B", "up")

# Other kinds of files, by what is in their keys. None of them is a sum of a weight and a product of
# two matrices, or they are more than that.
OTHER_KINDS = {
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.dora_scale$|\.lora_magnitude_vector": "DoRA",
    r"\.lora_mid\.": "LoCon in three matrices (Tucker)",
    r"\.oft_": "OFT",
    r"\.on_input$": "(IA)³",
    r"\.(diff|diff_b|w_norm|b_norm)$": "whole differences of weights",
    r"\.lora_(B|up)(\.\w+)?\.bias$": "LoRA with biases",
    r"^bundle_emb\.": "a LoRA with new words in the same file",
}


class Pair(NamedTuple):
    """What is added to a weight is ``down @ up``.

    For a linear layer, ``down`` is (inputs, rank), and ``up`` (rank, outputs). For a convolution,
    they are (size, size, inputs, rank) and (1, 1, rank, outputs). For stacked layers, they are
    (layers, inputs, rank) and (layers, rank, outputs).
    """

    down: jax.Array
    up: jax.Array

    @property
    def product(self) -> jax.Array:
        """The product, float32, in the weight's shape."""
        return jnp.float32(self.down) @ jnp.float32(self.up)


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
    file = Path(file)
    arrays, metadata = map_safetensors(file)
    options = _read_options(file, metadata)
    layers = _find_layers(params, config)
    _refuse_other_kinds(file, arrays)
    downs, ups, alphas, unknown = _sort_arrays(arrays, layers)
    if unknown or not downs:
        some = "; ".join(sorted(unknown)[:5]) or "no keys of a LoRA"
        raise ValueError(
            f"{file} has {len(unknown)} keys that fit nothing in this model: {some}. "
            f"{_made_for(arrays, metadata, config)}"
        )
    if PEFT_PREFIX in next(iter(arrays)) and not options and not alphas:
        raise ValueError(
            f"{file} does not say its alpha, which PEFT writes into {PEFT_CONFIG} beside it: get "
            "that file, too."
        )
    for value in (*downs.values(), *ups.values()):
        check_numbers(file, value)
    pairs = {}  # by part and name in files
    for layer, down in downs.items():
        part, name = layers[layer]
        up = ups[layer]
        rank = down.shape[-1]
        model_name, number = stacked_name(name)
        shape = params[part][model_name].shape
        if number is not None:
            shape = shape[1:]
        if len(shape) == 4:  # files may have a convolution of one pixel as a matrix
            down = _as_convolution(down)
            up = _as_convolution(up)
        product_shape = (*down.shape[:-1], up.shape[-1])
        if product_shape != shape:
            raise ValueError(
                f"{file} has {layer} for {product_shape}, and this model has {shape}: "
                "get one made for it."
            )
        if up.shape[-2] != rank:
            raise ValueError(
                f"{file} has halves of {layer}, {down.shape} and {up.shape}, of two ranks: "
                "get it again."
            )
        if layer in alphas:
            scale = alphas[layer] / rank
        else:
            scale = _scale_by_options(options, part, name.removesuffix(".weight"), rank)
        pair = Pair(np.float32(down), np.float32(up) * np.float32(scale))
        pairs.setdefault(part, {})[name] = pair
    return {part: _stack_pairs(found, params[part]) for part, found in pairs.items()}


def _stack_pairs(pairs: dict[str, Pair], parameters: dict) -> dict[str, Pair]:
    """Pairs by the names of a model, out of those by the names of files.

    Layers that are stacked get the same rank, the largest, and zeros for what they do not have.
    """
    found = {}
    for model_name in dict.fromkeys(stacked_name(name)[0] for name in pairs):
        if "*" not in model_name:
            found[model_name] = Pair(*map(jnp.asarray, pairs[model_name]))
            continue
        depth, inputs, outputs = parameters[model_name].shape
        names = names_in_files(model_name, (depth,))
        rank = max(pairs[name].down.shape[-1] for name in names if name in pairs)
        down = np.zeros((depth, inputs, rank), np.float32)
        up = np.zeros((depth, rank, outputs), np.float32)
        for layer, name in enumerate(names):
            if name in pairs:
                own_rank = pairs[name].down.shape[-1]
                down[layer, :, :own_rank] = pairs[name].down
                up[layer, :own_rank] = pairs[name].up
        found[model_name] = Pair(jnp.asarray(down), jnp.asarray(up))
    return found


def _find_layers(params: dict, config: Config) -> dict[str, tuple[str, str]]:
    """By what a file may call a layer, the part and the name of its weight in diffusers' files."""
    layers = {}
    bare = {}  # by a name without the part's, all layers that it may mean
    for part, parameters in params.items():
        for name in _names_in_files(parameters):
            if not name.endswith(".weight"):
                continue
            layer = name.removesuffix(".weight")
            layers[f"{part}.{layer}"] = part, name
            bare.setdefault(layer, []).append((part, name))
            names = [layer]
            if part == "unet":  # kohya writes that of XL by the names of the original layout
                names.append(name_unet(name, config).removesuffix(".weight"))
            for prefix in KOHYA.get(part, []):
                for each in names:
                    layers[f"{prefix}_{each.replace('.', '_')}"] = part, name
    for layer, meant in bare.items():
        if len(meant) == 1:  # both text encoders of XL have the same names
            layers[layer] = meant[0]
    return layers


def _names_in_files(parameters: dict) -> list[str]:
    names = []
    for name, value in parameters.items():
        names += names_in_files(name, value.shape)
    return names


PEFT_PREFIX = "base_model.model."
PEFT_CONFIG = "adapter_config.json"
# What old files of diffusers call the layers of an attention, at the end of a name, and what they
# are called in the UNet and in text encoders.
OLD_LAYERS = {
    "to_q": ("to_q", "q_proj"),
    "to_k": ("to_k", "k_proj"),
    "to_v": ("to_v", "v_proj"),
    "to_out": ("to_out.0", "out_proj"),
}


def _layer_name(layer: str) -> str:
    """What a file calls a layer, without what PEFT and old versions of diffusers put into it.

    >>> _layer_name("base_model.model.mid_block.attentions.0.transformer_blocks.0.attn1.to_q")
    'mid_block.attentions.0.transformer_blocks.0.attn1.to_q'
    >>> _layer_name("unet.mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out")
    'unet.mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0'
    """
    layer = layer.replace(PEFT_PREFIX, "").replace(".processor.", ".")
    before, _, last = layer.rpartition(".")
    if last in OLD_LAYERS:
        in_unet, in_text = OLD_LAYERS[last]
        last = in_text if before.endswith("self_attn") else in_unet
        return f"{before}.{last}"
    return layer


def _sort_arrays(arrays: dict[str, np.ndarray], layers: dict) -> tuple[dict, dict, dict, list[str]]:
    """The first and second matrices and the alphas by layer, and the keys that fit nothing."""
    downs, ups, alphas, unknown = {}, {}, {}, []
    for key, array in arrays.items():
        down, up = DOWN.fullmatch(key), UP.fullmatch(key)
        if down:
            group, layer = downs, down[1]
        elif up:
            group, layer = ups, up[1]
        else:
            group, layer = alphas, re.sub(r"([._]lora)?\.alpha$", "", key)
            if layer == key or array.size != 1:
                unknown.append(key)
                continue
            array = float(array.item())
        layer = _layer_name(layer)
        if layer in layers:
            group[layer] = array
        else:
            unknown.append(key)
    for layer in downs.keys() ^ ups.keys():
        unknown.append(f"{layer}, of which only one half is there")
    return downs, ups, alphas, unknown


def _refuse_other_kinds(file: Path, arrays: dict) -> None:
    """Raise ``ValueError`` and name the kind of a file that is no plain LoRA."""
    for pattern, kind in OTHER_KINDS.items():
        found = [key for key in arrays if re.search(pattern, key)]
        if found:
            raise ValueError(
                f"{file} is {kind}, as {found[0]} says, and this course reads LoRA alone, which "
                "adds down · up to a weight. Build it into a model by the program that it was "
                "made for, and read that model; or get a LoRA."
            )


def _made_for(arrays: dict, metadata: dict[str, str], config: Config) -> str:
    """A sentence that says for which model a LoRA was made, as far as one can see it."""
    keys = " ".join(arrays)
    if "double_blocks" in keys:
        kind = "Flux"
    elif "joint_" in keys:
        kind = "Stable Diffusion 3"
    elif "lora_te2_" in keys or "text_encoder_2." in keys:
        kind = "Stable Diffusion XL"
    else:
        kind = metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture")
    if kind:
        return f"It was made for {kind}: get one made for this model."
    return "Get one made for it."


def _as_convolution(matrix: np.ndarray) -> np.ndarray:
    """(inputs, outputs) to (1, 1, inputs, outputs); what has four axes stays as it is."""
    return matrix[None, None] if matrix.ndim == 2 else matrix


def _read_options(file: Path, metadata: dict[str, str]) -> dict:
    """PEFT's options, in a file's metadata or in a file beside it; mostly there are none."""
    beside = file.with_name(PEFT_CONFIG)
    try:
        if "lora_adapter_metadata" in metadata:
            return json.loads(metadata["lora_adapter_metadata"])
        if file.name == "adapter_model.safetensors" and beside.is_file():
            return json.loads(beside.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{file} has options of PEFT that are damaged: {error}. Get it again."
        ) from None
    return {}


def _scale_by_options(options: dict, part: str, layer: str, rank: int) -> float:
    """By what PEFT multiplies a product: alpha / rank, or 1 if there are no options."""

    def option(name: str) -> Any:  # which may be that of one part, or of a model that is one part
        return options.get(f"{part}.{name}", options.get(name))

    alpha = option("lora_alpha")
    if alpha is None:
        alpha = rank
    for ending, own_alpha in (option("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({ending})", layer):
            alpha = own_alpha
            break
    if option("use_rslora"):
        return alpha / rank**0.5
    return alpha / rank


def save_lora(
    file: str | Path, lora: dict[str, dict[str, Pair]], config: Config, dtype: Any = np.float16
) -> None:
    """Write a LoRA by the names of kohya's scripts, which other programs read as well.

    diffusers (``load_lora_weights``), ComfyUI, kohya's scripts and ``read_lora`` find every key in
    it. Each layer has three arrays: ``lora_down``, ``lora_up``, and alpha. A program adds their
    product alpha / rank times. Here alpha is the rank, so it is added as it was trained.

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
    tensors = {}
    for part, pairs in lora.items():
        downs = unstack_layers({name: pair.down for name, pair in pairs.items()})
        ups = unstack_layers({name: pair.up for name, pair in pairs.items()})
        for name, down in downs.items():
            layer = _kohya_name(part, name, config)
            rank = down.shape[-1]
            tensors[f"{layer}.lora_down.weight"] = to_channels_first(name, down).astype(dtype)
            tensors[f"{layer}.lora_up.weight"] = to_channels_first(name, ups[name]).astype(dtype)
            tensors[f"{layer}.alpha"] = np.asarray(rank, dtype)
    _save_whole(tensors, Path(file), {"ss_network_module": "networks.lora"})


def _kohya_name(part: str, name: str, config: Config) -> str:
    """What kohya's scripts call a weight's layer: ``lora_unet_mid_block_resnets_0_conv1``."""
    if part == "unet":
        prefix = "lora_unet"
        if config.is_xl:
            name = name_unet(name, config)
    elif part == "text_encoder_2":
        prefix = "lora_te2"
    elif config.is_xl:
        prefix = "lora_te1"
    else:
        prefix = "lora_te"
    layer = name.removesuffix(".weight").replace(".", "_")
    return f"{prefix}_{layer}"


def _save_whole(tensors: dict[str, np.ndarray], file: Path, metadata: dict[str, str]) -> None:
    """Write safetensors beside the file, and move them there once they are whole.

    So a disk that is full leaves an earlier file as it was.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.unfinished")
    try:
        save_file(tensors, unfinished, metadata={"format": "pt"} | metadata)
        unfinished.replace(file)
    finally:
        unfinished.unlink(missing_ok=True)


def merge(params: dict, lora: dict, scale: float | jax.Array = 1.0) -> dict:
    """Add a LoRA to parameters, ``scale`` times.

    The result is a new dictionary, whose other arrays are the old ones. To take the LoRA out again,
    merge it with minus the scale: that gives the old numbers up to rounding, which in bfloat16 is 1
    in 256, so keep the old parameters there. Merge before you quantize: weights in int8 raise
    ``ValueError``.
    """
    merged = dict(params)
    for part, pairs in lora.items():
        changed = {name: add(params[part][name], pair, scale) for name, pair in pairs.items()}
        merged[part] = params[part] | changed
    return merged


def add(weight: jax.Array, pair: Pair, scale: float | jax.Array) -> jax.Array:
    """The sum of a weight and a pair's product, in the weight's dtype."""
    if isinstance(weight, Quantized):
        raise ValueError(
            f"A weight of {weight.shape} is in int8, to which nothing can be added: "
            "merge the LoRA first, and then quantize."
        )
    total = weight.astype(jnp.float32) + scale * pair.product
    return total.astype(weight.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Adapted:
    """A weight with a LoRA beside it: an array can be multiplied by it as by their sum."""

    weight: "jax.Array | Adapted | Quantized"  # which may have a LoRA itself
    pair: Pair
    scale: jax.Array  # float32, (); for stacked layers one for each, (layers,)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype

    def __getitem__(self, index: Any) -> "Adapted":
        """The matrix of a convolution of one pixel, which is ``weight[0, 0]``."""
        pair = Pair(self.pair.down[index], self.pair.up[index])
        return Adapted(self.weight[index], pair, self.scale)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """``x @ self``: from (..., inputs) to (..., outputs)."""
        y = x @ self.pair.down.astype(x.dtype)  # (..., rank)
        y = (y * self.scale).astype(x.dtype)
        return x @ self.weight + y @ self.pair.up.astype(x.dtype)


def attach(params: dict, lora: dict, scale: float | jax.Array) -> dict:
    """Put a LoRA beside the weights of a model, in the program that uses them.

    Then the scale is an input like any other, and each layer multiplies by two small matrices more.
    Only convolutions of more than one pixel are added up, for the time of the call; where they are
    in int8, that raises ``ValueError``. The other weights may be.
    """
    attached = dict(params)
    for part, pairs in lora.items():
        changed = {}
        for name, pair in pairs.items():
            weight = params[part][name]
            if len(weight.shape) == 3:  # stacked layers, each of which gets the scale
                scales = jnp.broadcast_to(jnp.float32(scale), weight.shape[0])
                changed[name] = Adapted(weight, pair, scales)
            elif len(weight.shape) == 2 or weight.shape[:2] == (1, 1):
                changed[name] = Adapted(weight, pair, jnp.float32(scale))
            else:
                changed[name] = add(weight, pair, scale)
        attached[part] = params[part] | changed
    return attached


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
    _save_whole(tensors, word_file(file), {})


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
    arrays, _ = map_safetensors(file)
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
        # An array with two axes was turned around as a linear layer's weight is.
        value = value.T if value.ndim == 2 else value
        if value.shape[-1:] != (text.hidden_size,) or value.ndim > 2:
            raise ValueError(
                f"{file} has a vector of {value.shape}, and this model's have {text.hidden_size} "
                "numbers."
            )
        vectors[part] = np.float32(value).reshape(-1, text.hidden_size)
    if len({len(rows) for rows in vectors.values()}) > 1:
        raise ValueError(f"{file} has not as many vectors for both text encoders: get it again.")
    return _append_word(params, config, tokenize, word or name, vectors)
