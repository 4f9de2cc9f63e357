"""Layouts of files: the one file of the original release, and folders that diffusers loads."""

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from course.sd.configs import INPAINTING, Config, ScheduleConfig, read_config
from course.sd.parameters import parameter_shapes
from course.sd.weights import (
    check_numbers,
    map_safetensors,
    new_name,
    read_part,
    to_channels_first,
    unstack_layers,
)

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


class Layout(NamedTuple):
    """How a single file may name the parameters of a part."""

    prefix: str  # what its names begin with
    names: str  # "original", "diffusers", "open_clip", or "short": without "text_model."


# For each part, the layouts that files have, the usual ones first. Programs that were made for
# Stable Diffusion XL save the older models by XL's prefixes, some put diffusers' folders into one
# file, and a part may be alone in its file, without a prefix.
ALONE = {
    "unet": [Layout("", "original"), Layout("", "diffusers")],
    "vae": [Layout("", "original"), Layout("", "diffusers")],
    "text_encoder": [Layout("", "diffusers"), Layout("", "open_clip")],
    "text_encoder_2": [Layout("", "diffusers"), Layout("", "open_clip")],
}
LAYOUTS = {
    "unet": [Layout(UNET, "original"), Layout("unet.", "diffusers")],
    "vae": [Layout(VAE, "original"), Layout("vae.", "diffusers")],
    "text_encoder": [
        Layout(TEXT_1, "diffusers"),
        Layout(TEXT_1, "short"),
        Layout(TEXT_2, "open_clip"),
        Layout(XL_TEXT, "diffusers"),
        Layout("conditioner.embedders.0.model.", "open_clip"),
        Layout("text_encoder.", "diffusers"),
    ],
    "text_encoder_2": [Layout(XL_TEXT_2, "open_clip"), Layout("text_encoder_2.", "diffusers")],
}
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
    """What a parameter is called in a layout.

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
    """What a parameter is called in the original layout, as of ``name_in_layout``."""
    layout = LAYOUTS[part][0]
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
) -> dict[str, dict[str, np.ndarray]]:
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
    found, _ = map_safetensors(file)
    _check_kind(file, found, config)
    others = {"vae": vae, "text_encoder": text_encoder, "text_encoder_2": text_encoder_2}
    layouts = {}
    missing = []
    needed = parameter_shapes(config)
    for part in needed:
        if others.get(part) is not None:
            continue
        known = LAYOUTS[part] + (ALONE["unet"] if part == "unet" else [])
        layouts[part] = _find_layout(found, known, part, config)
        if layouts[part] is None:
            missing.append(part)
    if missing:
        options = " and ".join(f"--{part.replace('_', '-')}" for part in missing if part in others)
        advice = f"give it by {options}" if options else "get one with all parts"
        raise ValueError(
            f"{file} has no {' and '.join(missing)} in it, or is for a different model: {advice}. "
            f"{_whose(found)}"
        )
    params = {}
    for part, shapes in needed.items():
        shapes = unstack_layers(shapes)
        if others.get(part) is not None:
            params[part] = _read_other(Path(others[part]), part, shapes, config)
        else:
            params[part] = _read_part_of(file, found, layouts[part], part, shapes, config)
    return params


def _find_layout(found: dict, layouts: list[Layout], part: str, config: Config) -> Layout | None:
    """The first layout in which a file has a part; None if there is none."""
    for layout in layouts:
        if name_in_layout(layout, part, PROBES[part], config)[0] in found:
            return layout
    return None


def _read_part_of(
    file: Path, found: dict, layout: Layout, part: str, shapes: dict, config: Config
) -> dict[str, np.ndarray]:
    """The arrays of one part out of those of a file, by the names of diffusers' files."""
    if layout.names == "diffusers":
        found = {new_name(name): value for name, value in found.items()}
    used = set()
    arrays = {}
    for name, needed in shapes.items():
        theirs, third = name_in_layout(layout, part, name, config)
        if theirs not in found:
            raise ValueError(
                f"{file} has no {theirs}: its {part} is that of a different model. {_whose(found)}"
            )
        used.add(theirs)
        value = found[theirs]
        check_numbers(file, value)
        if layout.names == "open_clip" and theirs.endswith(
            ("positional_embedding", "text_projection")
        ):
            # Neither is a linear layer's weight in OpenCLIP, so their axes were in our order.
            value = value.T
        if third is not None:
            value = np.split(value, 3, axis=-1)[third]
        if value.ndim == 4 and len(needed.shape) == 2:
            value = value[0, 0]  # the VAE's attention was made of convolutions of one pixel
        if value.shape != needed.shape:
            raise ValueError(
                f"{file} has {theirs} as {value.shape}, and the model of {part} has "
                f"{needed.shape}. {_whose(found)}"
            )
        arrays[name] = value
    unused = []
    for name in found.keys() - used:
        # A text encoder may have more layers than are used, and numbers of positions.
        is_of_part = name.startswith(layout.prefix or BEGINNINGS.get(part, ()))
        if part in BEGINNINGS and is_of_part and ".loss." not in name:
            unused.append(name)
    if unused:
        raise ValueError(
            f"{file} has {len(unused)} names too many, such as {min(unused)}: "
            f"it is for a different model. {_whose(found)}"
        )
    return arrays


def _read_other(place: Path, part: str, shapes: dict, config: Config) -> dict[str, np.ndarray]:
    """The arrays of a part that comes from a file or a folder of its own."""
    if not place.is_dir():
        found, _ = map_safetensors(place)
        layout = _find_layout(found, [*LAYOUTS[part], *ALONE[part]], part, config)
        if layout is None:
            raise ValueError(f"{place} has no {part} in it: give a different file.")
        return _read_part_of(place, found, layout, part, shapes, config)
    folder = place / part if (place / part).is_dir() else place
    if part == "vae" and (folder / "config.json").is_file():
        options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        scale = options.get("scaling_factor", config.vae.scaling_factor)
        if scale != config.vae.scaling_factor:
            raise ValueError(
                f"{place} has a VAE that scales latents by {scale}, and this model is for "
                f"{config.vae.scaling_factor}: take a VAE for this kind of model."
            )
    found = read_part(folder)
    return _read_part_of(place, found, Layout("", "diffusers"), part, shapes, config)


# Which model a file is for, by a name in it: for the first two that are refused in any case.
FOREIGN = {
    "joint_blocks.": "Stable Diffusion 3",
    "double_blocks.": "Flux",
    "edm_mean": "Playground 2.5, which was trained for other amounts of noise (EDM)",
    "edm_vpred.": "a model that was trained for other amounts of noise (EDM)",
}
# And by how many numbers the UNet reads for each token.
TOKEN_WIDTHS = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    1280: "the refiner of Stable Diffusion XL",
    2048: "Stable Diffusion XL",
}


def _check_kind(file: Path, found: dict, config: Config) -> None:
    """Raise ``ValueError`` if a single file is of a kind that can be named, and is not read."""
    for word, kind in FOREIGN.items():
        if any(word in name for name in found):
            raise ValueError(
                f"{file} is for {kind}: this model is Stable Diffusion 1, 2 or XL, so take a "
                "file for one of these."
            )
    first = "input_blocks.0.0.weight"
    for name in (f"{UNET}{first}", first, "unet.conv_in.weight", "conv_in.weight"):
        if name in found and found[name].shape[2] > config.unet.out_channels:
            raise ValueError(
                f"{file} has a UNet with {found[name].shape[2]} channels in, as for inpainting: "
                f"{INPAINTING}"
            )


def _whose(found: dict) -> str:
    """A sentence that says for which model a file is, as far as one can see it."""
    for name, value in found.items():
        if "mid" in name and name.endswith("transformer_blocks.0.attn2.to_k.weight"):
            kind = TOKEN_WIDTHS.get(value.shape[0])
            if kind:
                return f"By its sizes it is for {kind}: take a configuration (--like) of that."
    return "Take a configuration (--like) of the same kind of model."


PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "v_prediction": "v_prediction"}


def read_schedule(
    file: str | Path, config: Config, prediction: str | None = None
) -> ScheduleConfig:
    """What a single file says about its model's training, in the place of what ``config`` says.

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
    found, metadata = map_safetensors(file)
    schedule = config.schedule
    if "ztsnr" in found:
        # Drawing has to begin where there is nothing but noise, which only this spacing does.
        schedule = replace(schedule, rescale_betas_zero_snr=True, timestep_spacing="trailing")
    said = PREDICTIONS.get(metadata.get("modelspec.prediction_type"))
    if prediction is not None:
        said = prediction
    elif "v_pred" in found:
        said = "v_prediction"
    if said is not None:
        return replace(schedule, prediction_type=said)
    looks = _looks_like(found, config)
    if looks not in (None, schedule.prediction_type):
        raise ValueError(
            f"{file} does not say what its model predicts. By its numbers it is {looks}, and the "
            f"configuration (--like) says {schedule.prediction_type}: say it by --prediction."
        )
    return schedule


def _looks_like(found: dict, config: Config) -> str | None:
    """What a Stable Diffusion 2 predicts by its numbers, or None for the other models.

    Of the two models of the release, the last norm before an attention is wider in the one that
    predicts velocities; ComfyUI tells them apart by that.
    """
    if config.is_xl or config.text[0].hidden_act != "gelu":
        return None
    layout = _find_layout(found, LAYOUTS["unet"], "unet", config)
    if layout is None:
        return None
    norms = []
    for name in unstack_layers(parameter_shapes(config)["unet"]):
        if name.startswith("up_blocks.") and name.endswith("transformer_blocks.0.norm1.bias"):
            norms.append(name)
    theirs, _ = name_in_layout(layout, "unet", max(norms), config)
    deviation = np.std(np.float32(found[theirs]))
    return "v_prediction" if deviation > 0.09 else "epsilon"


def save(
    params: dict[str, dict[str, jax.Array]],
    source: str | Path,
    folder: str | Path,
    dtype: Any = None,
    schedule: ScheduleConfig | None = None,
) -> None:
    """Write a folder that PyTorch's diffusers loads, with parameters as safetensors.

    Parameters
    ----------
    params : dict
        As ``course.sd.load`` or ``read_single_file`` gives them.
    source : str or Path
        A folder in diffusers' format of the same model, for configurations and tokenizers. They may
        be Flax'. The safety checker, if it has one, is left out.
    folder : str or Path
        Where to write. What is there is replaced.
    dtype : dtype or dict, optional
        What to save the numbers in: one for all, or one for each part. By default they keep theirs.
    schedule : ScheduleConfig, optional
        What to write in place of the source's, as ``read_schedule`` gives it.

    Raises
    ------
    ValueError
        If a number is too large for float16.
    """
    source = Path(source)
    folder = Path(folder)
    copy_settings(params.keys(), source, folder, schedule)
    for part, values in params.items():
        wanted = dtype.get(part) if isinstance(dtype, dict) else dtype
        tensors = {}
        for name, value in unstack_layers(values).items():
            tensors[name] = _cast(name, to_channels_first(name, value), wanted)
        stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        save_file(tensors, folder / part / f"{stem}.safetensors", metadata={"format": "pt"})


def _cast(name: str, value: np.ndarray, dtype: Any) -> np.ndarray:
    """An array in a dtype, or as it is if that is None."""
    if dtype is None or value.dtype == dtype:
        return value
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if not np.isfinite(np.float32(cast)).all() and np.isfinite(np.float32(value)).all():
        raise ValueError(
            f"{name} has numbers up to {np.abs(np.float32(value)).max():.3g}, too large for "
            f"{jnp.dtype(dtype).name}: choose bfloat16 or float32."
        )
    return cast


# Schedulers of diffusers that can begin at pure noise.
ZERO_SNR = (
    "DDIMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "UniPCMultistepScheduler",
)


def copy_settings(
    parts: Iterable[str], source: Path, folder: Path, schedule: ScheduleConfig | None = None
) -> None:
    """Copy what a folder in diffusers' format has besides parameters, for PyTorch's classes."""
    index = _read_json(source / "model_index.json")
    is_flax = index["scheduler"][1].startswith("Flax")
    for name, value in index.items():
        if not isinstance(value, list):  # a name that begins with "_", or an option
            continue
        if name in parts or name.startswith(("tokenizer", "scheduler")):
            (folder / name).mkdir(parents=True, exist_ok=True)
            for file in (source / name).iterdir():
                if file.suffix not in (".json", ".txt") or ".index" in file.name:
                    continue  # parameters, or the index of those in several files
                copy = folder / name / file.name
                if file.name.endswith("config.json"):
                    _write_json(copy, _without_flax(_read_json(file)))
                else:
                    copy.write_bytes(file.read_bytes())
        else:
            index[name] = [None, None]  # as diffusers writes it
    index = _without_flax(index)
    own = read_config(source).schedule
    schedule = schedule or own
    file = folder / "scheduler" / "scheduler_config.json"
    options = _read_json(file)
    if schedule.rescale_betas_zero_snr and index["scheduler"][1] not in ZERO_SNR:
        index["scheduler"] = ["diffusers", "DDIMScheduler"]
        options |= {"_class_name": "DDIMScheduler", "clip_sample": False}
    _write_json(folder / "model_index.json", index)
    for name, value in asdict(schedule).items():
        # Where the file does not say something, Flax' classes have other defaults than PyTorch's.
        if name != "sampler" and (is_flax or value != getattr(own, name)):
            options[name] = value
    _write_json(file, options)


def _read_json(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    file.write_text(f"{text}\n", encoding="utf-8")


def _without_flax(options: dict) -> dict:
    """What a JSON file of a folder has, with PyTorch's classes in place of Flax'."""
    changed = {}
    for name, value in options.items():
        if name == "_class_name":
            value = value.removeprefix("Flax")
        elif isinstance(value, list):  # a library and a class, in model_index.json
            value = [each.removeprefix("Flax") if isinstance(each, str) else each for each in value]
        changed[name] = value
    return changed
