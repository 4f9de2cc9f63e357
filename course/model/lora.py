"""LoRA: pairs of small matrices whose products are added to a model's weights (arXiv:2106.09685).

What a file calls a layer is a model's own: ``course.sd.lora`` makes a table of it for Stable
Diffusion. Everything else is here: how files write the two matrices and their scale, which kinds
of files are no LoRA, and adding a LoRA to a model's weights or putting it beside them.
"""

import functools
import math
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course.model.files import (
    WRAPPERS,
    Rows,
    Stored,
    cast,
    check_finite,
    check_numbers,
    names_in_files,
    parse_json,
    read_json,
    read_safetensors,
    stacked_name,
    to_channels_first,
    to_channels_last,
    write_safetensors,
)
from course.model.kinds import made_for
from course.model.quantize import Quantized


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


# Reading files.


def _half(peft: str, others: str) -> re.Pattern:
    """Return what the key of one of the two matrices is; the first group is the layer's name.

    PEFT may put the name of the adapter behind its own; old files of diffusers put theirs behind an
    underscore, as ``to_q_lora.down``.
    """
    peft_name = rf"\.lora_{peft}(?:\.[^.]+)?"
    name = rf"\.lora_{others}|(?:\.lora|\.lora_linear_layer|_lora)\.{others}"
    return re.compile(rf"(.+?)(?:{peft_name}|{name})\.weight")


DOWN = _half("A", "down")
UP = _half("B", "up")
ALPHA = re.compile(r"(.+?)(?:[._]lora)?\.alpha")

# Other kinds of files, by what is in their keys. None of them is a sum of a weight and a product of
# two matrices, or they are more than that.
OTHER_ADAPTERS = {
    r"\.hada_": "LoHa",
    r"\.lokr_": "LoKr",
    r"\.dora_scale$|\.lora_magnitude_vector": "DoRA",
    r"\.lora_E(\.|$)": "AdaLoRA",
    r"\.lora_mid\.": "LoCon in three matrices (Tucker)",
    r"\.oft_": "OFT",
    r"\.on_input$": "(IA)³",
    r"\.(diff|diff_b|w_norm|b_norm)$": "whole differences of weights",
    r"\.lora_(B|up)(\.\w+)?\.bias$": "LoRA with biases",
    r"\.modules_to_save\.": "LoRA with whole layers in the same file",
    r"^bundle_emb\.": "a LoRA with new words in the same file",
}
PEFT_PREFIX = "base_model.model."
PEFT_FILE = "adapter_model.safetensors"
PEFT_CONFIG = "adapter_config.json"  # beside it
# How PEFT may start the training of a LoRA without changing the model's own weights. By the other
# ways, as PiSSA, a LoRA is for a model that only its training had.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
# What programs put in front of the name of a layer, which says nothing.
HEADS = ("lora_", "lycoris_")
MOST_ALPHAS = 5000  # of single layers; Stable Diffusion XL has 1,900 of them


class Layer(NamedTuple):
    """Where in a model the weight of a layer is, which may be one of several that are stacked."""

    part: str
    name: str  # of the parameter
    number: int | None  # of the layer, if layers are stacked
    file_name: str  # what files of diffusers call the layer


class Target(NamedTuple):
    """What a layer of a file is in a model: a layer, or one of several that the file has as one."""

    layer: Layer
    rows: Rows | None = None  # those of the file's layer that are this one; None: all of them


class Keys(NamedTuple):
    """What a file has for a layer: the keys of its arrays, "" where there is none."""

    down: str = ""
    up: str = ""
    alpha: str = ""
    rows: Rows | None = None  # as of ``Target``


def model_layers(params: Mapping[str, Mapping[str, Any]]) -> list[Layer]:
    """Return all layers of a model that have a weight, each of those that are stacked by itself."""
    layers = []
    for part, parameters in params.items():
        for name, value in parameters.items():
            if not name.endswith(".weight"):
                continue
            for number, each in enumerate(names_in_files(name, value.shape)):
                which = number if "*" in name else None
                layers.append(Layer(part, name, which, each.removesuffix(".weight")))
    return layers


def name_targets(
    layers: Iterable[Layer],
    prefixes: Mapping[str, Sequence[str]],
    name_layer: Callable[[Layer], Iterable[tuple[str, Rows | None]]],
    unused: Collection[Layer] = (),
) -> dict[str, list[Target]]:
    """Return what files may call layers, as flat names, and what each name means.

    Parameters
    ----------
    layers : iterable of Layer
        All of a model.
    prefixes : dict
        For each part, what programs put in front of the names of its layers. Names without any are
        in the result as well, if they mean layers of one part.
    name_layer : callable
        All names of a layer in its part, and which rows of the file's layer it is by each.
    unused : collection of Layer
        Those that no image depends on: their names mean nothing.
    """
    targets = {}
    bare = {}  # by a name without the part's, what it means in each part
    for layer in layers:
        names = {flat_name(name): rows for name, rows in name_layer(layer)}
        for name, rows in names.items():
            target = [] if layer in unused else [Target(layer, rows)]
            for prefix in prefixes[layer.part]:
                prefix = flat_name(prefix).removesuffix("_")
                targets.setdefault(f"{prefix}_{name}", []).extend(target)
            bare.setdefault(name, {}).setdefault(layer.part, []).extend(target)
    for name, by_part in bare.items():
        if len(by_part) == 1:  # both text encoders of Stable Diffusion XL have the same names
            (targets[name],) = by_part.values()
    return targets


def read_pairs(
    file: str | Path,
    params: Mapping[str, Mapping[str, Any]],
    layers: Mapping[str, Sequence[Target]],
) -> dict[str, dict[str, Pair]]:
    """Read a LoRA file for a model.

    Parameters
    ----------
    file : str or Path
        Safetensors.
    params : dict
        The model's parameters; shapes are enough.
    layers : dict
        By all names that files may have for a layer, as ``flat_name`` returns them, what it is in
        the model. A layer that the model has and does not use is nothing.

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
    arrays, metadata = read_safetensors(file)
    _refuse_other_adapters(file, arrays)
    options = _read_options(file, metadata)
    found, unknown = _sort_arrays(file, arrays, layers)
    if unknown or not found:
        some = "; ".join(unknown[:5]) or "no keys of a LoRA"
        raise ValueError(
            f"{file} has {len(unknown)} keys that fit nothing in this model: {some}. "
            f"{_made_for(arrays, metadata)}"
        )
    has_alphas = any(keys.alpha for keys in found.values())
    if any(PEFT_PREFIX in key for key in arrays) and not options and not has_alphas:
        if file.name == PEFT_FILE:
            raise ValueError(
                f"{file} does not say its alpha, which PEFT writes into {PEFT_CONFIG} beside it: "
                "get that file, too."
            )
        warnings.warn(
            f"{file} does not say its alpha: it is added as diffusers does, as if that were the "
            f"rank. If it was called {PEFT_FILE}, call it that again, and put {PEFT_CONFIG} "
            "beside it.",
            stacklevel=3,
        )
    pairs = {}  # for each part by the weight's name: of each layer, or of None if they are single
    for layer, keys in found.items():
        shape = params[layer.part][layer.name].shape
        if layer.number is not None:
            shape = shape[1:]
        pair = _read_pair(file, arrays, keys, shape, metadata)
        rank = pair.down.shape[-1]
        if keys.alpha:
            scale = float(np.asarray(arrays[keys.alpha]).item()) / rank
        else:
            scale = _scale_by_options(file, options, layer.part, keys.down, rank)
        with np.errstate(over="ignore"):
            pair = pair._replace(up=pair.up * np.float32(scale))
        check_finite(file, f"{keys.up}, alpha / rank times,", pair.up)
        if keys.rows:
            up = keys.rows.take(pair.up, axis=-1)
            is_used = up.any(axis=-1)  # of the ranks, those that change these rows
            pair = Pair(pair.down[:, is_used], up[is_used])
            if not pair.up.size:
                continue
        of_part = pairs.setdefault(layer.part, {})
        of_part.setdefault(layer.name, {})[layer.number] = pair
    lora = {}
    for part, by_name in pairs.items():
        lora[part] = {}
        for name, by_number in by_name.items():
            lora[part][name] = _stack_pairs(by_number, params[part][name].shape)
    return lora


def flat_name(name: str) -> str:
    """Return the name of a layer without what says nothing, and with "_" in place of each ".".

    So it does not matter by which program a file was written.

    >>> flat_name("base_model.model.unet.mid_block.resnets.0.conv1")
    'unet_mid_block_resnets_0_conv1'
    >>> flat_name("lora_unet_mid_block_resnets_0_conv1")
    'unet_mid_block_resnets_0_conv1'
    """
    flat = WRAPPERS.sub("", name).replace(".", "_")
    for head in HEADS:
        flat = flat.removeprefix(head)
    return flat


def _split_key(key: str) -> tuple[str, str]:
    """Return what a file calls a layer, and what the array is for it; or "" for other keys.

    >>> _split_key("base_model.model.mid_block.resnets.0.conv1.lora_A.weight")
    ('mid_block.resnets.0.conv1', 'down')
    """
    for kind, pattern in {"down": DOWN, "up": UP, "alpha": ALPHA}.items():
        match = pattern.fullmatch(key)
        if match:
            return WRAPPERS.sub("", match[1]), kind
    return "", ""


def _sort_arrays(
    file: Path, arrays: Mapping[str, Stored], layers: Mapping[str, Sequence[Target]]
) -> tuple[dict[Layer, Keys], list[str]]:
    """Return, for each layer, the keys of its halves and alpha; and the keys that fit nothing."""
    found, unknown = {}, []
    for key, array in arrays.items():
        name, kind = _split_key(key)
        targets = layers.get(flat_name(name))
        if targets is None or (kind == "alpha" and math.prod(array.shape) != 1):
            unknown.append(key)
            continue
        for layer, rows in targets:
            keys = found.setdefault(layer, Keys())
            other = getattr(keys, kind)
            if keys != Keys() and keys.rows != rows:  # by another name, which means more layers
                other = keys.down or keys.up or keys.alpha
            if other:
                raise ValueError(
                    f"{file} has both {other} and {key}, which are for the same weight: take one "
                    "LoRA for each file."
                )
            found[layer] = keys._replace(**{kind: key}, rows=rows)
    whole = {}
    for layer, keys in found.items():
        if keys.down and keys.up:
            whole[layer] = keys
        elif keys.down or keys.up:
            unknown.append(f"{keys.down or keys.up} without its other half")
    return whole, sorted(set(unknown))  # a key may be for several layers


def _read_pair(
    file: Path,
    arrays: Mapping[str, Stored],
    keys: Keys,
    shape: tuple[int, ...],
    metadata: Mapping[str, str],
) -> Pair:
    """Read the two matrices of a layer, whose product has to have the weight's shape."""
    matrices = []
    for key in (keys.down, keys.up):
        check_numbers(file, arrays[key])
        matrices.append(arrays[key].change(functools.partial(_to_our_axes, axes=len(shape))))
    down, up = (matrix.shape for matrix in matrices)
    if keys.rows:
        shape = (*shape[:-1], keys.rows.whole(shape[-1]))
    if (*down[:-1], *up[-1:]) != shape:
        raise ValueError(
            f"{file} has {keys.down} and its other half for {(*down[:-1], *up[-1:])}, and this "
            f"model has {shape}. {_made_for(arrays, metadata)}"
        )
    rank = down[-1]
    if up != (*[1] * (len(shape) - 2), rank, shape[-1]) or not rank:
        raise ValueError(
            f"{file} has {keys.down} as {down}, and its other half as {up}, of two ranks: get it "
            "again."
        )
    # A sum with such a product can be any matrix at a rank far below. Layers that are stacked get
    # the largest rank, so one of them could fill the memory.
    if rank > max(math.prod(shape[:-1]), shape[-1]):
        raise ValueError(
            f"{file} has {keys.down} of rank {rank}, for a weight of {shape}, which is no LoRA's: "
            "get it from a source that you trust."
        )
    return Pair(*(np.asarray(matrix, np.float32) for matrix in matrices))


def _to_our_axes(matrix: np.ndarray, axes: int) -> np.ndarray:
    """Return one half of a pair with our order of axes, and as many of them as the weight has.

    Files may have a convolution of one pixel as a matrix, or a matrix as that.
    """
    matrix = to_channels_last("", matrix)
    if axes == 4 and matrix.ndim == 2:
        return matrix[None, None]
    if axes == 2 and matrix.shape[:-2] == (1, 1):
        return matrix[0, 0]
    return matrix


def _stack_pairs(by_number: Mapping[int | None, Pair], shape: tuple[int, ...]) -> Pair:
    """Return one pair for a weight, out of those of its layers.

    Layers that are stacked get the same rank, the largest, and zeros for what they do not have.
    """
    if None in by_number:
        return Pair(*map(jnp.asarray, by_number[None]))
    depth, inputs, outputs = shape
    rank = max(pair.down.shape[-1] for pair in by_number.values())
    down = np.zeros((depth, inputs, rank), np.float32)
    up = np.zeros((depth, rank, outputs), np.float32)
    for number, pair in by_number.items():
        own_rank = pair.down.shape[-1]
        down[number, :, :own_rank] = pair.down
        up[number, :own_rank] = pair.up
    return Pair(jnp.asarray(down), jnp.asarray(up))


def _refuse_other_adapters(file: Path, arrays: Mapping[str, Stored]) -> None:
    """Raise ``ValueError`` and name the kind of a file that is no plain LoRA."""
    for pattern, kind in OTHER_ADAPTERS.items():
        for key in arrays:
            if re.search(pattern, key):
                raise _no_lora(file, kind, key)


def _no_lora(file: Path, kind: str, key: str) -> ValueError:
    return ValueError(
        f"{file} is {kind}, as {key} says, and this course reads LoRA alone, which adds down · up "
        "to a weight. Build it into a model by the program that it was made for, and read that "
        "model; or get a LoRA."
    )


def _made_for(arrays: Mapping[str, Stored], metadata: Mapping[str, str]) -> str:
    """Return a sentence that says for which model a LoRA was made, as far as one can see it."""
    kind = made_for({key: value.shape for key, value in arrays.items()})
    kind = kind or metadata.get("ss_base_model_version") or metadata.get("modelspec.architecture")
    if kind:
        return f"It was made for {kind}: get one made for this model."
    return "Get one made for it."


def _read_options(file: Path, metadata: Mapping[str, str]) -> dict:
    """Read PEFT's options, in a file's metadata or in a file beside it; mostly there are none."""
    beside = file.with_name(PEFT_CONFIG)
    options = {}
    if "lora_adapter_metadata" in metadata:
        options = parse_json(metadata["lora_adapter_metadata"], f"{file}, in PEFT's options,")
    elif file.name == PEFT_FILE and beside.is_file():
        options = read_json(beside)
    for name, value in options.items():
        if name.endswith("init_lora_weights") and value not in PLAIN_STARTS:
            raise ValueError(
                f"{file} was started by {reprlib.repr(value)}, which changes the weights that it "
                "is added to: get one that PEFT saved with path_initial_model_for_weight_conversion"
                "."
            )
        if name.endswith("use_dora") and value:  # whose magnitudes may be lost
            raise _no_lora(file, "DoRA", name)
    return options


def _scale_by_options(
    file: Path, options: Mapping[str, Any], part: str, key: str, rank: int
) -> float:
    """Return by what PEFT multiplies a product: alpha / rank, or 1 if there are no options.

    ``key`` is that of one half of it, in a file for that part of a model.

    Alphas of single layers stand by their names. PEFT takes these for regular expressions, and
    those that are more than a name are refused: a stranger's could run for ever.
    """

    def option(name: str) -> Any:  # which may be that of one part, or of a model that is one part
        return options.get(f"{part}.{name}", options.get(name))

    alpha = option("lora_alpha")
    if alpha is None:
        alpha = rank
    name, _ = _split_key(key)
    patterns = option("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > MOST_ALPHAS:
        shown = reprlib.repr(patterns)
        raise ValueError(f"{file} has {shown} for alpha_pattern: get it again.")
    for pattern, own_alpha in patterns.items():
        ending = pattern.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if not re.fullmatch(r"[\w.]+", ending):
            raise ValueError(
                f"{file} has an alpha for {pattern!r}, and this course reads names of layers "
                "alone: get a file with an alpha for each layer, as kohya's scripts write it."
            )
        if f".{name}".endswith(f".{ending}"):
            alpha = own_alpha
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) < 1e9:
        shown = reprlib.repr(alpha)
        raise ValueError(f"{file} has {shown} for an alpha, which is no number: get it again.")
    if option("use_rslora"):
        return alpha / rank**0.5
    return alpha / rank


# Writing files.


def save_pairs(
    file: str | Path,
    lora: Mapping[str, Mapping[str, Pair]],
    name_layer: Callable[[Layer], tuple[str, Rows | None]],
    dtype: Any = np.float16,
) -> None:
    """Write a LoRA as kohya's scripts do, which other programs read as well.

    Each layer has three arrays: ``lora_down``, ``lora_up``, and alpha. A program adds their product
    alpha / rank times. Here alpha is the rank, so it is added as it was trained. Layers that are
    one in the file get one pair of all their ranks, which does the same.

    Parameters
    ----------
    file : str or Path
        It is there whole or not at all. Its folder is made if it is not there.
    lora : dict
        For each part, pairs by the name of the weight that they change.
    name_layer : callable
        What the file shall call a layer, and in which rows of the file's layer it is.
    dtype : dtype
        Of what is written.
    """
    pairs = {}  # by the name in the file, those of one layer or more
    downs = {part: {name: pair.down for name, pair in each.items()} for part, each in lora.items()}
    for layer in model_layers(downs):
        down, up = map(np.asarray, lora[layer.part][layer.name])
        if layer.number is not None:
            down, up = down[layer.number], up[layer.number]
        name, rows = name_layer(layer)
        if rows:
            up = rows.put(up, axis=-1)
        pairs.setdefault(name, {})[rows] = Pair(down, up)
    tensors = {}
    for name, by_rows in pairs.items():
        each = [by_rows[rows] for rows in sorted(by_rows, key=lambda rows: rows or ())]
        down = np.concatenate([pair.down for pair in each], axis=-1)
        up = np.concatenate([pair.up for pair in each], axis=-2)
        tensors[f"{name}.lora_down.weight"] = to_channels_first("", down).astype(dtype)
        tensors[f"{name}.lora_up.weight"] = to_channels_first("", up).astype(dtype)
        tensors[f"{name}.alpha"] = np.asarray(down.shape[-1], dtype)
    write_safetensors(Path(file), tensors, {"ss_network_module": "networks.lora"})


# A model with a LoRA.


def merge(params: dict, lora: dict, scale: float | jax.Array = 1.0) -> dict:
    """Add a LoRA to parameters, ``scale`` times.

    The result is a new dictionary, whose other arrays are the old ones. To take the LoRA out again,
    merge it with minus the scale: that gives the old numbers up to rounding, which in bfloat16 is 1
    in 256, so keep the old parameters there. Merge before you quantize: weights in int8 raise
    ``ValueError``.
    """
    merged = dict(params)
    check_scale(scale)
    for part, pairs in lora.items():
        changed = {name: add(params[part][name], pair, scale) for name, pair in pairs.items()}
        merged[part] = params[part] | changed
    return merged


def merge_stored(
    stored: Mapping[str, Mapping[str, Stored | np.ndarray]],
    loras: Sequence[tuple[Mapping[str, Mapping[str, Pair]], float]],
    dtype: Any = None,
) -> dict[str, dict[str, Stored | np.ndarray]]:
    """Add LoRAs, each with its scale, to parameters that lie in files.

    Each sum is made when it is read, in float32, so that no model has to be in memory. Its dtype is
    ``dtype``, or by default that of the parameter.
    """
    merged = {part: dict(values) for part, values in stored.items()}
    for part, values in stored.items():
        for name, value in values.items():
            model_name, number = stacked_name(name)
            added = []
            for lora, scale in loras:
                pair = lora.get(part, {}).get(model_name)
                if pair is not None and number is None:
                    added.append((pair, scale))
                elif pair is not None and number < len(pair.down):
                    added.append((Pair(pair.down[number], pair.up[number]), scale))
            if added:
                wanted = dtype or value.dtype
                read = functools.partial(_add_all, name, value, added, wanted)
                merged[part][name] = Stored(value.shape, wanted, read)
    return merged


def _add_all(
    name: str, value: Stored | np.ndarray, added: Sequence[tuple[Pair, float]], dtype: Any
) -> np.ndarray:
    """Read a parameter, and return its sum with several products."""
    total = np.asarray(value, np.float32)
    for pair, scale in added:
        total = add(total, pair, scale)
    return cast(name, np.asarray(total), dtype)


def check_scale(scale: float | jax.Array) -> None:
    """Raise ``ValueError`` if a scale is no finite number in float32."""
    if isinstance(scale, jax.core.Tracer):
        return  # not known before the program runs
    with np.errstate(over="ignore"):
        if not np.isfinite(np.float32(scale)).all():
            raise ValueError(f"The scale of a LoRA is {scale}: give a number, such as 0.8.")


def add(weight: jax.Array, pair: Pair, scale: float | jax.Array) -> jax.Array:
    """Return the sum of a weight and a pair's product, in the weight's dtype."""
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
        """Return the matrix of a convolution of one pixel, which is ``weight[0, 0]``."""
        pair = Pair(self.pair.down[index], self.pair.up[index])
        return Adapted(self.weight[index], pair, self.scale)

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """Return ``x @ self``: from (..., inputs) to (..., outputs)."""
        y = x @ self.pair.down.astype(x.dtype)  # (..., rank)
        y = (y * self.scale).astype(x.dtype)
        return x @ self.weight + y @ self.pair.up.astype(x.dtype)


def attach(params: dict, lora: dict, scale: float | jax.Array) -> dict:
    """Put a LoRA beside the weights of a model, in the program that uses them.

    Then the scale is an input like any other, and each layer multiplies by two small matrices more.
    Only convolutions of more than one pixel are added up, for the time of the call; where they are
    in int8, that raises ``ValueError``. The other weights may be.
    """
    check_scale(scale)
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
