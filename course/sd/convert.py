"""Files with a whole model: the names of the original release and of others, and reading them."""

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from course.model.autoencoder import name_original
from course.model.files import (
    Rows,
    Stored,
    find_inside,
    read_json,
    read_safetensors,
    unstack_layers,
)
from course.model.singles import (
    Layout,
    Naming,
    find_layout,
    read_arrays,
    read_model,
    to_single,
)
from course.sd.configs import INPAINTING, Config, ScheduleConfig
from course.sd.parameters import parameter_shapes

# Where the parts are in the original layout: what their names begin with.
UNET = "model.diffusion_model."
VAE = "first_stage_model."
TEXT_1 = "cond_stage_model.transformer."
TEXT_2 = "cond_stage_model.model."  # which has the names of OpenCLIP
XL_TEXT = "conditioner.embedders.0.transformer."
XL_TEXT_2 = "conditioner.embedders.1.model."  # which has the names of OpenCLIP

# And in all files, those of the original layout first. Programs that were made for Stable Diffusion
# XL save the older models by XL's prefixes, ComfyUI has its own, and some put diffusers' folders
# into one file.
PREFIXES = {
    "unet": (UNET, "diffusion_model.", "unet."),
    "vae": (VAE, "vae."),
    "text_encoder": (
        TEXT_1,
        TEXT_2,
        XL_TEXT,
        "conditioner.embedders.0.model.",
        "cond_stage_model.clip_l.transformer.",
        "text_encoders.clip_l.transformer.",
        "text_encoders.clip_l.",
        "clip_l.transformer.",
        "clip_l.",
        "text_encoder.",
    ),
    "text_encoder_2": (
        XL_TEXT_2,
        "conditioner.embedders.1.transformer.",
        "cond_stage_model.clip_g.transformer.",
        "cond_stage_model.clip_g.model.",
        "text_encoders.clip_g.transformer.",
        "text_encoders.clip_g.",
        "clip_g.transformer.",
        "clip_g.",
        "text_encoder_2.",
    ),
}
# By which names a part may be there, behind the prefix: "short" is without "text_model.".
NAMES = {
    "unet": ("original", "diffusers"),
    "vae": ("original", "diffusers"),
    "text_encoder": ("diffusers", "short", "open_clip"),
    "text_encoder_2": ("open_clip", "diffusers", "short"),
}

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
    """Return what a parameter of the UNet is called in the original layout, without the prefix.

    >>> from helpers import bundled_checkpoint
    >>> from course import sd
    >>> config = sd.read_config(bundled_checkpoint("shapes-sd").source)
    >>> name_unet("down_blocks.0.resnets.0.conv1.weight", config)
    'input_blocks.1.0.in_layers.2.weight'
    """
    layer, kind = name.rsplit(".", 1)  # kind is "weight" or "bias"
    if layer in UNET_ENDS:
        return f"{UNET_ENDS[layer]}.{kind}"

    # "mid_block.resnets.0.conv1", or "down_blocks.1.attentions.0.proj_in"
    match = re.fullmatch(r"(\w+)_blocks?(?:\.(\d+))?\.(\w+)\.(\d+)\.(.+)", layer)
    block, level, list_name, n, rest = match.groups()
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


def name_open_clip(name: str) -> tuple[str, Rows | None]:
    """Return what a text encoder's parameter is called in OpenCLIP.

    Query, key and value are in one array there. If the parameter is one of them, the second result
    says which rows of that array it is; else it is None.
    """
    for ours, theirs in OPEN_CLIP.items():
        name = name.replace(ours, theirs)
    match = re.fullmatch(r"(.+)\.self_attn\.([qkv])_proj\.(\w+)", name)
    if match is None:
        return name, None
    layer, letter, kind = match.groups()
    return f"{layer}.attn.in_proj_{kind}", Rows(3, ("qkv".index(letter),))


# What the names of a part begin with that is alone in its file.
BEGINNINGS = {
    "unet": ("input_blocks.", "output_blocks.", "down_blocks.", "up_blocks."),
    "vae": ("encoder.", "decoder."),
}
# A name by which one sees whether a part is there in some layout.
PROBES = {
    "unet": ("time_embedding.linear_1.weight",),
    "vae": ("encoder.conv_norm_out.weight",),
    "text_encoder": ("text_model.final_layer_norm.weight",),
    "text_encoder_2": ("text_model.final_layer_norm.weight",),
}


def name_in_layout(layout: Layout, part: str, name: str, config: Config) -> tuple[str, Rows | None]:
    """Return what a parameter is called in a layout.

    The second result is as of ``name_open_clip``: which rows of that array it is, or None.
    """
    rows = None
    if layout.names == "open_clip":
        name, rows = name_open_clip(name)
    elif layout.names == "short":
        name = name.removeprefix("text_model.")
    elif layout.names == "original":
        name = name_unet(name, config) if part == "unet" else name_original(name, config.vae)
    return layout.prefix + name, rows


NAMING = Naming(
    kinds=re.compile("Stable Diffusion (1|2|XL)|the refiner"),
    called="Stable Diffusion 1, 2 or XL",
    denoiser="unet",
    prefixes=PREFIXES,
    names=NAMES,
    probes=PROBES,
    beginnings=BEGINNINGS,
    unread=re.compile(r"\.loss\."),
    name=name_in_layout,
)


def original_layout(part: str, config: Config) -> Layout:
    """Return in which layout the original release has a part."""
    if part == "text_encoder" and config.is_xl:
        return Layout(XL_TEXT, "diffusers")
    if part == "text_encoder" and config.text[0].hidden_act == "gelu":
        return Layout(TEXT_2, "open_clip")  # of Stable Diffusion 2
    return Layout(PREFIXES[part][0], NAMES[part][0])


def original_name(part: str, name: str, config: Config) -> tuple[str, Rows | None]:
    """Return what a parameter is called in the original layout, as of ``name_in_layout``."""
    return name_in_layout(original_layout(part, config), part, name, config)


def read_single_file(
    file: str | Path,
    config: Config,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
    text_encoder_2: str | Path | None = None,
) -> dict[str, dict[str, Stored]]:
    """Read a model from one file, in the original layout or by diffusers' names.

    Parameters
    ----------
    file : str or Path
        Safetensors. Of numbers that are there twice, as an average over the training (EMA) and as
        they are, the latter are read.
    config : Config
        The configuration of such a model, which the file does not have.
    vae, text_encoder, text_encoder_2 : str or Path, optional
        Files or folders of parts that take the place of the file's own.

    Returns
    -------
    dict
        For each part, arrays by the names of diffusers' files, which stay on disk until they are
        used.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing, damaged or a pickle, or it is not for a model of this configuration.
    """
    file = Path(file)
    arrays = read_arrays(file)
    others = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
    _check_inpainting(file, arrays, config)
    if vae is not None:
        _check_scale(Path(vae), config)
    return read_model(file, arrays, parameter_shapes(config), NAMING, config, others)


def _check_inpainting(file: Path, arrays: Mapping[str, Stored], config: Config) -> None:
    """Raise ``ValueError`` if a single file has a UNet that reads a picture and a mask."""
    firsts = ("input_blocks.0.0.weight", "conv_in.weight")
    for name in map("".join, itertools.product((*PREFIXES["unet"], ""), firsts)):
        if name in arrays and arrays[name].shape[1] > config.unet.out_channels:
            raise ValueError(
                f"{file} has a UNet with {arrays[name].shape[1]} channels in, as for inpainting: "
                f"{INPAINTING}"
            )


def _check_scale(place: Path, config: Config) -> None:
    """Raise ``ValueError`` if the folder of a VAE says that it scales latents in another way."""
    folder = find_inside(place, "vae") if (place / "vae").is_dir() else place
    if (folder / "config.json").is_file():
        options = read_json(find_inside(folder, "config.json"))
        scale = options.get("scaling_factor", config.vae.scaling_factor)
        if scale != config.vae.scaling_factor:
            raise ValueError(
                f"{folder} has a VAE that scales latents by {scale}, and this model is for "
                f"{config.vae.scaling_factor}: take a VAE for this kind of model."
            )


def to_single_files(
    params: dict[str, dict[str, Any]], config: Config
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the name of a file with a whole model in the original layout, and its arrays."""
    tensors = {}
    for part, values in params.items():
        tensors |= to_single(values, original_layout(part, config), part, NAMING, config)
    yield "model.safetensors", tensors


PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction"}


def guess_schedule(
    file: str | Path, config: Config, prediction: str | None = None
) -> ScheduleConfig:
    """Return what a single file says about its model's training, else what ``config`` says.

    Some files have arrays without use, called ``v_pred`` and ``ztsnr``: the model predicts
    velocities, and was trained down to pure noise. Others say the former in their header.

    Parameters
    ----------
    file : str or Path
    config : Config
        That of ``read_single_file``.
    prediction : str, optional
        "epsilon" or "v_prediction", if you know it better.

    Raises
    ------
    ValueError
        If the numbers of a Stable Diffusion 2 look as if the model predicted what the
        configuration does not say.
    """
    _, metadata = read_safetensors(file)
    arrays = read_arrays(Path(file))
    schedule = config.schedule
    if "ztsnr" in arrays:
        # Drawing has to begin where there is nothing but noise, which only this spacing does.
        schedule = replace(schedule, rescale_betas_zero_snr=True, timestep_spacing="trailing")
    said = PREDICTIONS.get(metadata.get("modelspec.prediction_type"))
    if prediction is not None:
        said = prediction
    elif "v_pred" in arrays:
        said = "v_prediction"
    if said is not None:
        return replace(schedule, prediction_type=said)
    looks = _looks_like(arrays, config)
    if looks not in (None, schedule.prediction_type):
        raise ValueError(
            f"{file} does not say what its model predicts. By its numbers it is {looks}, and the "
            f"configuration (--like) says {schedule.prediction_type}: say it by --prediction."
        )
    return schedule


def _looks_like(arrays: Mapping[str, Stored], config: Config) -> str | None:
    """Return what a Stable Diffusion 2 predicts by its numbers, or None for the other models.

    Of the two models of the release, the last norm before an attention is wider in the one that
    predicts velocities; ComfyUI tells them apart by that.
    """
    if config.is_xl or config.text[0].hidden_act != "gelu":
        return None
    layout = find_layout(arrays, "unet", NAMING, config, may_be_alone=True)
    if layout is None:
        return None
    norms = []
    for name in unstack_layers(parameter_shapes(config)["unet"]):
        if name.startswith("up_blocks.") and name.endswith("transformer_blocks.0.norm1.bias"):
            norms.append(name)
    theirs, _ = name_in_layout(layout, "unet", max(norms), config)
    deviation = np.std(np.asarray(arrays[theirs], np.float32))
    return "v_prediction" if deviation > 0.09 else "epsilon"
