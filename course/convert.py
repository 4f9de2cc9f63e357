"""Folders that PyTorch's diffusers loads: ``python -m course.convert MODEL.safetensors FOLDER --like SOURCE``.

The command takes one file in the original layout, as on sites where models are shared, and writes a folder in
diffusers' format. Such a file has no configuration and no tokenizer: they are taken from the folder SOURCE, for a model
of the same kind, whose own parameters are not looked at.
"""

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from stable_diffusion import Config, parameter_shapes, read_config
from stable_diffusion.weights import map_safetensors, turn

UNET, VAE = "model.diffusion_model.", "first_stage_model."
# Where text encoders are, and whether they are called as in OpenCLIP: of Stable Diffusion 1 and 2, and of XL.
TEXT = {"quick_gelu": ("cond_stage_model.transformer.", False), "gelu": ("cond_stage_model.model.", True)}
XL_TEXT = {
    "text_encoder": ("conditioner.embedders.0.transformer.", False),
    "text_encoder_2": ("conditioner.embedders.1.model.", True),
}
RESIDUAL = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
ENDS = {
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
    "text_model.final_layer_norm": "ln_final",
    "text_model.encoder.layers": "transformer.resblocks",
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
    per_level = config.unet.layers_per_block + 1
    layer, kind = name.rsplit(".", 1)
    if layer in ENDS:
        return f"{ENDS[layer]}.{kind}"
    block, number, inside, n, rest = re.fullmatch(r"(\w+?)_blocks?(?:\.(\d+))?\.(\w+)\.(\d+)\.(.+)", layer).groups()
    level, n, place = int(number or 0), int(n), {"resnets": 0, "attentions": 1}.get(inside, 0)
    rest = RESIDUAL[rest] if inside == "resnets" else rest
    if block == "mid":
        return f"middle_block.{1 if place else 2 * n}.{rest}.{kind}"
    if inside == "downsamplers":
        return f"input_blocks.{(level + 1) * per_level}.0.op.{kind}"
    if inside == "upsamplers":
        place = 2 if config.unet.up_block_types[level].startswith("CrossAttn") else 1
        n = per_level - 1
    first = 1 + level * per_level if block == "down" else level * per_level
    return f"{'input' if block == 'down' else 'output'}_blocks.{first + n}.{place}.{rest}.{kind}"


def name_vae(name: str, config: Config) -> str:
    """What a parameter of the VAE is called in the original layout, without the prefix."""
    last = len(config.vae.block_out_channels) - 1
    name = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
    name = re.sub(r"up_blocks\.(\d+)\.resnets", lambda match: f"up.{last - int(match[1])}.block", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda match: f"up.{last - int(match[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d+)", lambda match: f"mid.block_{int(match[1]) + 1}", name)
    inside = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
    name = re.sub(r"mid_block\.attentions\.0\.(.+)(?=\.)", lambda match: f"mid.attn_1.{inside[match[1]]}", name)
    return name.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")


def name_open_clip(name: str) -> tuple[str, int | None]:
    """What a text encoder's parameter is called in OpenCLIP, and which third of the file's array it is, if one is."""
    for ours, theirs in OPEN_CLIP.items():
        name = name.replace(ours, theirs)
    if match := re.fullmatch(r"(.+)\.self_attn\.([qkv])_proj\.(\w+)", name):
        return f"{match[1]}.attn.in_proj_{match[3]}", "qkv".index(match[2])
    special = {
        "text_model.embeddings.position_embedding.weight": "positional_embedding",
        "text_projection.weight": "text_projection",
    }
    return special.get(name, name), None


def original_name(part: str, name: str, config: Config) -> tuple[str, int | None]:
    """What a parameter is called in the original layout, and which third of that array it is, if it is one."""
    if part == "unet":
        return UNET + name_unet(name, config), None
    if part == "vae":
        return VAE + name_vae(name, config), None
    if config.is_xl:
        place, is_open_clip = XL_TEXT[part]
    else:  # Stable Diffusion 2 has a text encoder of OpenCLIP, whose activation is the exact GELU
        place, is_open_clip = TEXT[config.text[0].hidden_act]
    theirs, third = name_open_clip(name) if is_open_clip else (name, None)
    return place + theirs, third


def read_single_file(file: str | Path, config: Config) -> dict[str, dict[str, np.ndarray]]:
    """Read a model from one file in the original layout, by our names; only its header is read at first.

    Raises
    ------
    FileNotFoundError, ValueError
        If the file is missing, damaged or a pickle, or it is not for a model of this configuration.
    """
    file = Path(file)
    if file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        raise ValueError(f"{file} is a pickle, which can run any program when it is read: get it as safetensors.")
    found, used, params = map_safetensors(file), set(), {}
    for part, shapes in parameter_shapes(config).items():
        params[part] = {}
        for name, needed in shapes.items():
            theirs, third = original_name(part, name, config)
            if theirs not in found:
                raise ValueError(f"{file} has no {theirs}: it is for a different model, or has no {part} in it.")
            used.add(theirs)
            value = found[theirs]
            if theirs.endswith(("positional_embedding", "text_projection")):
                value = value.T  # in OpenCLIP neither is a linear layer's weight, so the axes were in our order
            if third is not None:
                value = np.split(value, 3, axis=-1)[third]
            if value.ndim == 4 and len(needed.shape) == 2:
                value = value[0, 0]  # the VAE's attention was made of convolutions of one pixel
            if value.shape != needed.shape:
                raise ValueError(f"{file} has {theirs} as {value.shape}, and the model of {part} has {needed.shape}.")
            params[part][name] = value
    if left := [name for name in found.keys() - used if name.startswith((UNET, VAE)) and ".loss." not in name]:
        raise ValueError(f"{file} has {len(left)} names too many, such as {min(left)}: it is for a different model.")
    return params


def turn_back(name: str, value: np.ndarray | jax.Array) -> np.ndarray:
    """A parameter with its axes in PyTorch's order in place of ours."""
    value = np.asarray(value)
    return np.ascontiguousarray(value.transpose(3, 2, 0, 1) if value.ndim == 4 else turn(name, value))


def save(params: dict, source: str | Path, folder: str | Path) -> None:
    """Write a folder that PyTorch's diffusers loads: parameters as safetensors, and the other files of a folder.

    Parameters
    ----------
    params : dict
        As ``stable_diffusion.load`` gives them. They keep their dtype.
    source : str or Path
        A folder in diffusers' format of the same model, for configurations and tokenizers. They may be Flax'. The
        safety checker, if it has one, is left out.
    folder : str or Path
        Where to write. What is there is replaced.
    """
    source, folder = Path(source), Path(folder)
    index = json.loads((source / "model_index.json").read_text())
    parts = [name for name in index if name in params or name.startswith(("tokenizer", "scheduler"))]
    for part in parts:
        (folder / part).mkdir(parents=True, exist_ok=True)
        for file in [file for file in (source / part).iterdir() if file.suffix in (".json", ".txt")]:
            if ".index" not in file.name:  # that of several files, which become one
                (folder / part / file.name).write_text(file.read_text().replace('"Flax', '"'))
    index = {name: value if name in parts or name[0] == "_" else [None, None] for name, value in index.items()}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2).replace('"Flax', '"'))
    schedule = folder / "scheduler" / "scheduler_config.json"  # Flax' classes take other things for granted
    known = {name: value for name, value in asdict(read_config(source).schedule).items() if name != "sampler"}
    schedule.write_text(json.dumps(json.loads(schedule.read_text()) | known, indent=2))
    for part, values in params.items():
        stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        turned = {name: turn_back(name, value) for name, value in values.items()}
        save_file(turned, folder / part / f"{stem}.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="one file in the original layout")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("--like", type=Path, required=True, help="a folder with the configuration and the tokenizers")
    arguments = parser.parse_args()
    try:
        params = read_single_file(arguments.file, read_config(arguments.like))
        save(params, arguments.like, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    counts = ", ".join(f"{part} {len(values)}" for part, values in params.items())
    print(f"Wrote {arguments.folder}, with so many parameters: {counts}.")


if __name__ == "__main__":
    main()
