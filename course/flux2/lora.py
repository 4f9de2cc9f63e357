"""What LoRA files call the layers of FLUX.2.

Files are read by the names of diffusers, and by those of Black Forest Labs, which ComfyUI,
ai-toolkit and kohya's musubi-tuner have as well; and written by the latter, which all of them read.
"""

from pathlib import Path
from typing import Any

import numpy as np

from course.flux2.configs import Config
from course.flux2.convert import PREFIXES, name_transformer
from course.model.files import Rows
from course.model.lora import (
    Layer,
    Pair,
    Target,
    model_layers,
    name_targets,
    read_pairs,
    save_pairs,
)

# What kohya's scripts put in front of the names of a part's layers.
KOHYA = {"transformer": "lora_unet", "text_encoder": "lora_te"}
# What files may call a part, besides what single files do (``course.flux2.convert.PREFIXES``).
PARTS = {"transformer": ("unet",), "text_encoder": ("te", "te1")}


def read_lora(file: str | Path, params: dict, config: Config) -> dict[str, dict[str, Pair]]:
    """Read a LoRA file for a model.

    Parameters
    ----------
    file : str or Path
        Safetensors by the names of diffusers and PEFT (``transformer.….lora_A.weight``, or without
        the part's name), of Black Forest Labs and ComfyUI (``diffusion_model.double_blocks.…``), or
        of kohya (``lora_unet_double_blocks_….lora_down.weight``). Layers of the text encoder that
        no image depends on are left out.
    params, config : dict, Config
        The model's, as ``course.flux2.load`` gives them. Shapes are enough, as of
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
    """Return all layers of a model by all names that LoRA files have for them, as flat names."""

    def name_layer(layer: Layer) -> list[tuple[str, Rows | None]]:
        name = layer.file_name
        names = [(name, None), (name.removeprefix("model."), None)]
        if layer.part == "transformer":
            # diffusers reads "sformer_blocks", too, as some program cut the name.
            names += [name_transformer(name), (name.removeprefix("tran"), None)]
        return names

    layers = model_layers(params)
    unused = []
    depth = config.text_encoder.read_layers[-1]
    for layer in layers:
        if layer.part == "text_encoder" and layer.number == 0:
            for number in range(depth, config.text_encoder.num_hidden_layers):
                name = layer.name.replace("*", str(number)).removesuffix(".weight")
                unused.append(layer._replace(number=number, file_name=name))
    prefixes = {part: (*PREFIXES[part], *PARTS.get(part, ())) for part in params}
    return name_targets([*layers, *unused], prefixes, name_layer, frozenset(unused))


def save_lora(
    file: str | Path, lora: dict[str, dict[str, Pair]], config: Config, dtype: Any = np.float16
) -> None:
    """Write a LoRA by the names of kohya's scripts, which other programs read as well.

    diffusers (``load_lora_weights``), ComfyUI, kohya's musubi-tuner and ``read_lora`` find every
    key in it, but that diffusers knows no name for the modulation and the last norm there. Queries,
    keys and values are one layer with three times the rank. Alpha is the rank, so the product is
    added as it was trained.

    Parameters
    ----------
    file : str or Path
        It is there whole or not at all. Its folder is made if it is not there.
    lora : dict
        For each part, pairs by the name of the weight that they change.
    config : Config
        The model's.
    dtype : dtype
        Of what is written.
    """

    def name_layer(layer: Layer) -> tuple[str, Rows | None]:
        """Return what kohya's scripts call it: ``lora_unet_double_blocks_0_img_attn_qkv``."""
        name, rows = layer.file_name, None
        if layer.part == "transformer":
            name, rows = name_transformer(name)
        return f"{KOHYA[layer.part]}_{name.replace('.', '_')}", rows

    save_pairs(file, lora, name_layer, dtype)
