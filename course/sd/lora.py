"""What LoRA files call the layers of Stable Diffusion.

Files are read in the formats of diffusers and PEFT, and of kohya's scripts (``lora_unet_…``), and
written in the latter, which most programs read.
"""

from pathlib import Path
from typing import Any

import numpy as np

from course.model.lora import (
    Layer,
    Pair,
    Target,
    model_layers,
    name_targets,
    read_pairs,
    save_pairs,
)
from course.sd.configs import Config
from course.sd.convert import PREFIXES, name_unet

# What kohya's scripts put in front of the names of a part's layers.
KOHYA = {
    "unet": "lora_unet",
    "text_encoder": "lora_te",
    "text_encoder_2": "lora_te2",
}
# What files may call a part, besides what single files do (``course.sd.convert.PREFIXES``).
PARTS = {
    "unet": ("prior_unet",),
    "text_encoder": ("te", "te1"),
    "text_encoder_2": ("te2",),
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
        kohya (``lora_unet_….lora_down.weight``) with or without convolutions, by the names that
        diffusers had before (``….processor.to_q_lora.down.weight``), or with the prefixes of other
        programs (``lycoris_…``, ``diffusion_model.…``).
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


def name_layers(params: dict, config: Config) -> dict[str, list[Target]]:
    """Return all layers of a model by all names that LoRA files have for them, as flat names.

    Programs differ in what they call a part, and in which names of layers they have: those of
    diffusers, new or old, or those of the original layout.
    """

    def name_layer(layer: Layer) -> list[tuple[str, None]]:
        names = old_and_new_names(layer.file_name)
        if layer.part == "unet":
            names.append(_original_layer(layer, config))
        names += [name.removeprefix("text_model.") for name in names]
        return [(name, None) for name in names]

    prefixes = {part: (*PREFIXES[part], *PARTS.get(part, ())) for part in params}
    return name_targets(model_layers(params), prefixes, name_layer)


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

    def name_layer(layer: Layer) -> tuple[str, None]:
        """Return what kohya's scripts call it: ``lora_unet_mid_block_resnets_0_conv1``."""
        prefix = KOHYA[layer.part]
        name = layer.file_name
        if config.is_xl and layer.part == "text_encoder":
            prefix = "lora_te1"
        if config.is_xl and layer.part == "unet":
            name = _original_layer(layer, config)
        return f"{prefix}_{name.replace('.', '_')}", None

    save_pairs(file, lora, name_layer, dtype)
