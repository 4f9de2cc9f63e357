"""Layouts of files: the one file of the original release, and folders that diffusers loads."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from stable_diffusion.configs import Config, read_config
from stable_diffusion.parameters import parameter_shapes
from stable_diffusion.weights import map_safetensors, to_channels_first, unstack_layers

# Where the parts are in the original layout: what their names begin with.
UNET = "model.diffusion_model."
VAE = "first_stage_model."
TEXT_1 = "cond_stage_model.transformer."
TEXT_2 = "cond_stage_model.model."  # which has the names of OpenCLIP
XL_TEXT = "conditioner.embedders.0.transformer."
XL_TEXT_2 = "conditioner.embedders.1.model."  # which has the names of OpenCLIP

# Our names, and theirs.
RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_ENDS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
OPEN_CLIP = {
    "text_model.embeddings.token_embedding": "token_embedding",
    "text_model.embeddings.position_embedding.weight": "positional_embedding",
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
    "text_projection.weight": "text_projection",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}


def name_unet(name: str, config: Config) -> str:
    """What a parameter of the UNet is called in the original layout, without the prefix.

    >>> from helpers import bundled_checkpoint
    >>> config = read_config(bundled_checkpoint("shapes-sd").source)
    >>> name_unet("down_blocks.0.resnets.0.conv1.weight", config)
    'input_blocks.1.0.in_layers.2.weight'
    """
    layer, kind = name.rsplit(".", 1)  # kind is "weight" or "bias"
    if layer in UNET_ENDS:
        return f"{UNET_ENDS[layer]}.{kind}"

    # "mid_block.resnets.0.conv1", or "down_blocks.1.attentions.0.proj_in"
    found = re.fullmatch(r"(\w+)_blocks?(?:\.(\d+))?\.(\w+)\.(\d+)\.(.+)", layer)
    block, level, list_name, n, rest = found.groups()
    n = int(n)
    if list_name == "resnets":
        rest = RESIDUAL[rest]

    # In the middle there are a residual block, a transformer and a residual block.
    if block == "mid":
        place = 1 if list_name == "attentions" else 2 * n
        return f"middle_block.{place}.{rest}.{kind}"

    # On both ways, theirs is one list of blocks for all levels. Each block has a residual block,
    # then a transformer where there is one, then an upsampler where there is one.
    level = int(level)
    per_level = config.unet.layers_per_block + 1
    if list_name == "downsamplers":  # a block of its own, the last of a level
        return f"input_blocks.{(level + 1) * per_level}.0.op.{kind}"
    place = 1 if list_name == "attentions" else 0
    if list_name == "upsamplers":  # at the end of the last block of a level
        n = per_level - 1
        place = 2 if config.unet.up_block_types[level].startswith("CrossAttn") else 1
    if block == "down":
        return f"input_blocks.{1 + level * per_level + n}.{place}.{rest}.{kind}"
    return f"output_blocks.{level * per_level + n}.{place}.{rest}.{kind}"


def name_vae(name: str, config: Config) -> str:
    """What a parameter of the VAE is called in the original layout, without the prefix."""
    if found := re.fullmatch(r"(.+\.)mid_block\.resnets\.(\d+)\.(.+)", name):
        part, n, rest = found.groups()
        name = f"{part}mid.block_{int(n) + 1}.{rest}"
    elif found := re.fullmatch(r"(.+\.)mid_block\.attentions\.0\.(.+)\.(\w+)", name):
        part, layer, kind = found.groups()
        name = f"{part}mid.attn_1.{VAE_ATTENTION[layer]}.{kind}"
    elif found := re.fullmatch(r"(.+\.)(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name):
        part, way, level, list_name, n, rest = found.groups()
        if way == "up":  # their levels count from the image on, on both ways
            level = len(config.vae.block_out_channels) - 1 - int(level)
        if list_name == "resnets":
            name = f"{part}{way}.{level}.block.{n}.{rest}"
        else:
            name = f"{part}{way}.{level}.{way}sample.{rest}"
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")


def name_open_clip(name: str) -> tuple[str, int | None]:
    """What a text encoder's parameter is called in OpenCLIP.

    Query, key and value are in one array there. If the parameter is one of them, the second result
    says which third of that array it is, from 0 on; else it is None.
    """
    for ours, theirs in OPEN_CLIP.items():
        name = name.replace(ours, theirs)
    found = re.fullmatch(r"(.+)\.self_attn\.([qkv])_proj\.(\w+)", name)
    if found is None:
        return name, None
    layer, letter, kind = found.groups()
    return f"{layer}.attn.in_proj_{kind}", "qkv".index(letter)


def original_name(part: str, name: str, config: Config) -> tuple[str, int | None]:
    """What a parameter is called in the original layout.

    The second result is as of ``name_open_clip``: which third of that array it is, or None.
    """
    if part == "unet":
        return UNET + name_unet(name, config), None
    if part == "vae":
        return VAE + name_vae(name, config), None
    if part == "text_encoder_2":
        prefix, is_open_clip = XL_TEXT_2, True
    elif config.is_xl:
        prefix, is_open_clip = XL_TEXT, False
    elif config.text[0].hidden_act == "gelu":  # Stable Diffusion 2, whose encoder is of OpenCLIP
        prefix, is_open_clip = TEXT_2, True
    else:
        prefix, is_open_clip = TEXT_1, False
    if not is_open_clip:
        return prefix + name, None
    theirs, third = name_open_clip(name)
    return prefix + theirs, third


def read_single_file(file: str | Path, config: Config) -> dict[str, dict[str, np.ndarray]]:
    """Read a model from one file in the original layout.

    Returns
    -------
    dict
        For each part, arrays by the names of diffusers' files, which stay on disk until they are
        used.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged or a pickle, or it is not for a model of this configuration.
    """
    file = Path(file)
    if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        raise ValueError(
            f"{file} is a pickle, which can run any program when it is read: get it as safetensors."
        )
    found, _ = map_safetensors(file)
    used = set()
    params = {}
    for part, shapes in parameter_shapes(config).items():
        params[part] = {}
        for name, needed in unstack_layers(shapes).items():
            theirs, third = original_name(part, name, config)
            if theirs not in found:
                raise ValueError(
                    f"{file} has no {theirs}: it is for a different model, or has no {part} in it."
                )
            used.add(theirs)
            value = found[theirs]
            if theirs.endswith(("positional_embedding", "text_projection")):
                # Neither is a linear layer's weight in OpenCLIP, so their axes were in our order.
                value = value.T
            if third is not None:
                value = np.split(value, 3, axis=-1)[third]
            if value.ndim == 4 and len(needed.shape) == 2:
                value = value[0, 0]  # the VAE's attention was made of convolutions of one pixel
            if value.shape != needed.shape:
                raise ValueError(
                    f"{file} has {theirs} as {value.shape}, "
                    f"and the model of {part} has {needed.shape}."
                )
            params[part][name] = value
    unused = []
    for name in found.keys() - used:
        if name.startswith((UNET, VAE)) and ".loss." not in name:
            unused.append(name)
    if unused:
        raise ValueError(
            f"{file} has {len(unused)} names too many, such as {min(unused)}: "
            "it is for a different model."
        )
    return params


def save(params: dict[str, dict[str, jax.Array]], source: str | Path, folder: str | Path) -> None:
    """Write a folder that PyTorch's diffusers loads, with parameters as safetensors.

    Parameters
    ----------
    params : dict
        As ``stable_diffusion.load`` or ``read_single_file`` gives them. They keep their dtype.
    source : str or Path
        A folder in diffusers' format of the same model, for configurations and tokenizers. They may
        be Flax'. The safety checker, if it has one, is left out.
    folder : str or Path
        Where to write. What is there is replaced.
    """
    source = Path(source)
    folder = Path(folder)
    copy_settings(params.keys(), source, folder)
    for part, values in params.items():
        tensors = {}
        for name, value in unstack_layers(values).items():
            tensors[name] = to_channels_first(name, value)
        stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        save_file(tensors, folder / part / f"{stem}.safetensors", metadata={"format": "pt"})


def copy_settings(parts: Iterable[str], source: Path, folder: Path) -> None:
    """Copy what a folder in diffusers' format has besides parameters, for PyTorch's classes."""
    index = json.loads((source / "model_index.json").read_text())
    for name in index:
        if name.startswith("_"):
            continue
        if name in parts or name.startswith(("tokenizer", "scheduler")):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for file in (source / name).iterdir():
                is_index = ".index" in file.name  # of parameters in several files
                if file.suffix in (".json", ".txt") and not is_index:
                    (folder / name / file.name).write_text(without_flax(file.read_text()))
        else:
            index[name] = [None, None]  # as diffusers writes it
    (folder / "model_index.json").write_text(without_flax(json.dumps(index, indent=2)))
    # Where the file does not say something, Flax' classes have other defaults than PyTorch's.
    file = folder / "scheduler" / "scheduler_config.json"
    schedule = asdict(read_config(source).schedule)
    del schedule["sampler"]
    options = json.loads(file.read_text()) | schedule
    file.write_text(json.dumps(options, indent=2))


def without_flax(text: str) -> str:
    """The text of a JSON file, with PyTorch's classes in place of Flax'."""
    return text.replace('"Flax', '"')
