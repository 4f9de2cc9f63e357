"""Files with a whole model: the names of the original release and of others, and reading them."""

import functools
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from course.model.files import (
    Stored,
    check_numbers,
    find_inside,
    new_name,
    read_json,
    read_part,
    read_safetensors,
    to_channels_last,
    unstack_layers,
)
from course.model.lora import WRAPPERS
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


def name_vae(name: str, config: Config) -> str:
    """Return what a parameter of the VAE is called in the original layout, without the prefix."""
    if match := re.fullmatch(r"(.+\.)mid_block\.resnets\.(\d+)\.(.+)", name):
        part, n, rest = match.groups()
        name = f"{part}mid.block_{int(n) + 1}.{rest}"
    elif match := re.fullmatch(r"(.+\.)mid_block\.attentions\.0\.(.+)\.(\w+)", name):
        part, layer, kind = match.groups()
        name = f"{part}mid.attn_1.{VAE_ATTENTION[layer]}.{kind}"
    elif match := re.fullmatch(r"(.+\.)(down|up)_blocks\.(\d+)\.(\w+)\.(\d+)\.(.+)", name):
        part, way, level, list_name, n, rest = match.groups()
        if way == "up":  # their levels count from the image on, on both ways
            level = len(config.vae.block_out_channels) - 1 - int(level)
        if list_name == "resnets":
            name = f"{part}{way}.{level}.block.{n}.{rest}"
        else:
            name = f"{part}{way}.{level}.{way}sample.{rest}"
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")


def name_open_clip(name: str) -> tuple[str, int | None]:
    """Return what a text encoder's parameter is called in OpenCLIP.

    Query, key and value are in one array there. If the parameter is one of them, the second result
    says which third of that array it is, from 0 on; else it is None.
    """
    for ours, theirs in OPEN_CLIP.items():
        name = name.replace(ours, theirs)
    match = re.fullmatch(r"(.+)\.self_attn\.([qkv])_proj\.(\w+)", name)
    if match is None:
        return name, None
    layer, letter, kind = match.groups()
    return f"{layer}.attn.in_proj_{kind}", "qkv".index(letter)


class Layout(NamedTuple):
    """How a single file may name the parameters of a part."""

    prefix: str  # what its names begin with
    names: str  # one of ``NAMES``


# What the names of a part begin with that is alone in its file.
BEGINNINGS = {
    "unet": ("input_blocks.", "output_blocks.", "down_blocks.", "up_blocks."),
    "vae": ("encoder.", "decoder."),
}
# A name by which one sees whether a part is there in some layout.
PROBES = {
    "unet": "time_embedding.linear_1.weight",
    "vae": "encoder.conv_norm_out.weight",
    "text_encoder": "text_model.final_layer_norm.weight",
    "text_encoder_2": "text_model.final_layer_norm.weight",
}


def name_in_layout(layout: Layout, part: str, name: str, config: Config) -> tuple[str, int | None]:
    """Return what a parameter is called in a layout.

    The second result is as of ``name_open_clip``: which third of that array it is, or None.
    """
    third = None
    if layout.names == "open_clip":
        name, third = name_open_clip(name)
    elif layout.names == "short":
        name = name.removeprefix("text_model.")
    elif layout.names == "original":
        name = name_unet(name, config) if part == "unet" else name_vae(name, config)
    return layout.prefix + name, third


def original_name(part: str, name: str, config: Config) -> tuple[str, int | None]:
    """Return what a parameter is called in the original layout, as of ``name_in_layout``."""
    layout = Layout(PREFIXES[part][0], NAMES[part][0])
    if part == "text_encoder" and config.is_xl:
        layout = Layout(XL_TEXT, "diffusers")
    elif part == "text_encoder" and config.text[0].hidden_act == "gelu":
        layout = Layout(TEXT_2, "open_clip")  # of Stable Diffusion 2
    return name_in_layout(layout, part, name, config)


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
    arrays = _read_arrays(file)
    _check_kind(file, arrays, config)
    others = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
    needed = {part: unstack_layers(each) for part, each in parameter_shapes(config).items()}
    layouts = {}
    for part in needed:
        if others.get(part) is None:
            layouts[part] = _find_layout(arrays, part, config, may_be_alone=part == "unet")
    missing = [part for part, layout in layouts.items() if layout is None]
    if missing:
        options = " and ".join(f"--{part.replace('_', '-')}" for part in missing if part in others)
        advice = f"give it by {options}" if options else "get one with all parts"
        raise ValueError(
            f"{file} has no {' and '.join(missing)} in it, or is for a different model: {advice}. "
            f"{_whose(arrays)}"
        )
    params = {}
    for part, shapes in needed.items():
        if part in layouts:
            params[part] = _take_part(file, arrays, layouts[part], part, shapes, config)
        else:
            params[part] = _read_other(Path(others[part]), part, shapes, config)
    return params


def _read_arrays(file: Path) -> dict[str, Stored]:
    """Read the arrays of a single file, without what wrappers put in front of their names."""
    arrays, _ = read_safetensors(file)
    unwrapped = {}
    for name, value in arrays.items():
        unwrapped[WRAPPERS.sub("", name).removeprefix("state_dict.")] = value
    return unwrapped


def _find_layout(
    arrays: Mapping[str, Stored], part: str, config: Config, may_be_alone: bool
) -> Layout | None:
    """Return the first layout in which a file has a part; None if there is none.

    A part that is alone in its file may be without a prefix.
    """
    prefixes = PREFIXES[part] + (("",) if may_be_alone else ())
    for prefix, names in itertools.product(prefixes, NAMES[part]):
        layout = Layout(prefix, names)
        if name_in_layout(layout, part, PROBES[part], config)[0] in arrays:
            return layout
    return None


def _take_part(
    file: Path,
    arrays: Mapping[str, Stored],
    layout: Layout,
    part: str,
    shapes: Mapping,
    config: Config,
) -> dict[str, Stored]:
    """Return the arrays of one part out of those of a file, by the names of diffusers' files."""
    if layout.names == "diffusers":
        arrays = {new_name(name): value for name, value in arrays.items()}
    taken = {}
    used = set()
    for name, needed in shapes.items():
        theirs, third = name_in_layout(layout, part, name, config)
        if theirs.endswith("text_projection") and f"{theirs}.weight" in arrays:
            theirs = f"{theirs}.weight"  # as diffusers' own script for XL writes it
        if theirs not in arrays:
            raise ValueError(
                f"{file} has no {theirs}: its {part} is that of a different model. {_whose(arrays)}"
            )
        used.add(theirs)
        check_numbers(file, arrays[theirs])
        to_ours = functools.partial(
            _to_our_axes, name=name, theirs=theirs, third=third, axes=len(needed.shape)
        )
        taken[name] = arrays[theirs].change(to_ours)
        if taken[name].shape != needed.shape:
            raise ValueError(
                f"{file} has {theirs} as {taken[name].shape}, and the model of {part} has "
                f"{needed.shape}. {_whose(arrays)}"
            )
    _refuse_more(file, arrays, used, layout, part)
    return taken


def _to_our_axes(
    value: np.ndarray, name: str, theirs: str, third: int | None, axes: int
) -> np.ndarray:
    """Return an array of a file with the axes of ours, or a third of an array that is three."""
    if third is not None:
        rows = len(value) // 3
        value = value[third * rows : (third + 1) * rows]
    if value.ndim == 4 and axes == 2:
        value = value[:, :, 0, 0]  # the VAE's attention was made of convolutions of one pixel
    if theirs.endswith("text_projection"):
        return value  # of OpenCLIP, where it is no linear layer's weight: the order is ours
    return to_channels_last(name, value)


def _refuse_more(
    file: Path, arrays: Mapping, used: Collection[str], layout: Layout, part: str
) -> None:
    """Raise ``ValueError`` if a file has more of a UNet or a VAE than this model does.

    A text encoder may have more layers than are used, and numbers of positions.
    """
    if part not in BEGINNINGS:
        return
    unused = []
    for name in arrays.keys() - set(used):
        is_of_part = name.startswith(layout.prefix or BEGINNINGS[part])
        if is_of_part and ".loss." not in name:
            unused.append(name)
    if unused:
        raise ValueError(
            f"{file} has {len(unused)} names too many, such as {min(unused)}: "
            f"it is for a different model. {_whose(arrays)}"
        )


def _read_other(
    place: Path, part: str, shapes: Mapping, config: Config
) -> dict[str, Stored | np.ndarray]:
    """Return the arrays of a part that comes from a file or a folder of its own."""
    if place.is_dir():
        folder = find_inside(place, part) if (place / part).is_dir() else place
        return _read_other_folder(folder, part, shapes, config)
    arrays = _read_arrays(place)
    layout = _find_layout(arrays, part, config, may_be_alone=True)
    if layout is None:
        raise ValueError(f"{place} has no {part} in it: give a different file.")
    return _take_part(place, arrays, layout, part, shapes, config)


def _read_other_folder(
    folder: Path, part: str, shapes: Mapping, config: Config
) -> dict[str, Stored | np.ndarray]:
    """Return the arrays of a part that comes from a folder in diffusers' format."""
    if part == "vae" and (folder / "config.json").is_file():
        options = read_json(find_inside(folder, "config.json"))
        scale = options.get("scaling_factor", config.vae.scaling_factor)
        if scale != config.vae.scaling_factor:
            raise ValueError(
                f"{folder} has a VAE that scales latents by {scale}, and this model is for "
                f"{config.vae.scaling_factor}: take a VAE for this kind of model."
            )
    arrays = read_part(folder)
    taken = {}
    for name, needed in shapes.items():
        value = arrays.get(name)
        if isinstance(value, Stored) and len(value.shape) == 4 and len(needed.shape) == 2:
            # The VAE's attention was made of convolutions of one pixel.
            value = value.change(lambda convolution: convolution[0, 0])
        have = "nothing" if value is None else value.shape
        if have != needed.shape:
            raise ValueError(
                f"{folder} has {have} for {name}, and this model has {needed.shape}: its {part} is "
                f"that of a different model. {_whose(arrays)}"
            )
        check_numbers(folder, value)
        taken[name] = value
    _refuse_more(folder, arrays, taken, Layout("", "diffusers"), part)
    return taken


# What a file is, by a name in it, if it is nothing that is read here.
FOREIGN = {
    "joint_blocks.": "is for Stable Diffusion 3",
    "double_stream_modulation_img.": "is for FLUX.2",
    "double_blocks.": "is for FLUX.1 or one of its relatives",
    "noise_refiner.": "is for Z-Image or Lumina 2",
    ".img_mod.": "is for Qwen-Image",
    "control_model.": "is for ControlNet",
    "controlnet_": "is for ControlNet",
    ".lora_": "is a LoRA, which course.lora builds into a model",
    "edm_mean": "is for Playground 2.5, which was trained for other amounts of noise (EDM)",
    "edm_vpred.": "is for a model that was trained for other amounts of noise (EDM)",
}
# And by how many numbers the UNet reads for each token.
TOKEN_WIDTHS = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    1280: "the refiner of Stable Diffusion XL",
    2048: "Stable Diffusion XL",
}


def _check_kind(file: Path, arrays: Mapping[str, Stored], config: Config) -> None:
    """Raise ``ValueError`` if a single file is of a kind that can be named, and is not read."""
    for word, kind in FOREIGN.items():
        if any(word in name for name in arrays):
            raise ValueError(
                f"{file} {kind}: this model is Stable Diffusion 1, 2 or XL, so take a file for one "
                "of these."
            )
    firsts = ("input_blocks.0.0.weight", "conv_in.weight")
    for name in map("".join, itertools.product((*PREFIXES["unet"], ""), firsts)):
        if name in arrays and arrays[name].shape[1] > config.unet.out_channels:
            raise ValueError(
                f"{file} has a UNet with {arrays[name].shape[1]} channels in, as for inpainting: "
                f"{INPAINTING}"
            )


def _whose(arrays: Mapping[str, Stored | np.ndarray]) -> str:
    """Return a sentence that says for which model a file is, as far as one can see it."""
    for name, value in arrays.items():
        if "mid" in name and name.endswith("transformer_blocks.0.attn2.to_k.weight"):
            kind = TOKEN_WIDTHS.get(value.shape[-1])
            if kind:
                return f"By its sizes it is for {kind}: take a configuration (--like) of that."
    return "Take a configuration (--like) of the same kind of model."


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
    arrays = _read_arrays(Path(file))
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
    layout = _find_layout(arrays, "unet", config, may_be_alone=True)
    if layout is None:
        return None
    norms = []
    for name in unstack_layers(parameter_shapes(config)["unet"]):
        if name.startswith("up_blocks.") and name.endswith("transformer_blocks.0.norm1.bias"):
            norms.append(name)
    theirs, _ = name_in_layout(layout, "unet", max(norms), config)
    deviation = np.std(np.asarray(arrays[theirs], np.float32))
    return "v_prediction" if deviation > 0.09 else "epsilon"
