"""Files of Black Forest Labs and ComfyUI: what they call the parameters, and reading them."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from course.flux2.configs import Config
from course.flux2.parameters import whole_shapes
from course.model.autoencoder import name_original
from course.model.files import Rows, Stored
from course.model.singles import Layout, Naming, read_arrays, read_model, to_single

# Where the parts are in files with more than one, ComfyUI's and others'.
PREFIXES = {
    "transformer": ("model.diffusion_model.", "diffusion_model.", "transformer."),
    "text_encoder": (
        "text_encoders.qwen3_4b.transformer.",
        "text_encoders.qwen3_4b.",
        "qwen3_4b.transformer.",
        "qwen3_4b.",
        "text_encoder.",
    ),
    "vae": ("first_stage_model.", "vae."),
}
# By which names a part may be there, behind the prefix: ComfyUI's differ a little from those of the
# release, and transformers 5 leaves out "model.".
NAMES = {
    "transformer": ("original", "comfy", "diffusers"),
    "text_encoder": ("diffusers", "short"),
    "vae": ("original", "comfy", "diffusers"),
}

# Our names and theirs, of the transformer outside of its blocks, and in both kinds of blocks.
OUTSIDE = {
    "x_embedder": "img_in",
    "context_embedder": "txt_in",
    "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_guidance_embed.guidance_embedder.linear_1": "guidance_in.in_layer",
    "time_guidance_embed.guidance_embedder.linear_2": "guidance_in.out_layer",
    "double_stream_modulation_img.linear": "double_stream_modulation_img.lin",
    "double_stream_modulation_txt.linear": "double_stream_modulation_txt.lin",
    "single_stream_modulation.linear": "single_stream_modulation.lin",
    "norm_out.linear": "final_layer.adaLN_modulation.1",
    "proj_out": "final_layer.linear",
}
DOUBLE = {
    "attn.to_q": "img_attn.qkv",
    "attn.to_k": "img_attn.qkv",
    "attn.to_v": "img_attn.qkv",
    "attn.to_out.0": "img_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm",
    "attn.norm_k": "img_attn.norm.key_norm",
    "attn.add_q_proj": "txt_attn.qkv",
    "attn.add_k_proj": "txt_attn.qkv",
    "attn.add_v_proj": "txt_attn.qkv",
    "attn.to_add_out": "txt_attn.proj",
    "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.linear_in": "img_mlp.0",
    "ff.linear_out": "img_mlp.2",
    "ff_context.linear_in": "txt_mlp.0",
    "ff_context.linear_out": "txt_mlp.2",
}
SINGLE = {
    "attn.to_qkv_mlp_proj": "linear1",
    "attn.to_out": "linear2",
    "attn.norm_q": "norm.query_norm",
    "attn.norm_k": "norm.key_norm",
}
BLOCKS = {
    "transformer_blocks": ("double_blocks", DOUBLE),
    "single_transformer_blocks": ("single_blocks", SINGLE),
}
# Queries, keys and values are one array in their files, and shift and scale of the last norm are
# the other way round.
SWAPPED = Rows(2, (1, 0))


def name_transformer(layer: str) -> tuple[str, Rows | None]:
    """Return what a layer of the transformer is called in files of Black Forest Labs.

    The second result says which rows of the file's array it is, if it is not just the array.

    >>> name_transformer("transformer_blocks.3.attn.to_k")
    ('double_blocks.3.img_attn.qkv', Rows(pieces=3, taken=(1,)))
    """
    match = re.fullmatch(r"((?:single_)?transformer_blocks)\.(\d+)\.(.+)", layer)
    if match is None:
        return OUTSIDE[layer], SWAPPED if layer == "norm_out.linear" else None
    kind, number, name = match.groups()
    blocks, names = BLOCKS[kind]
    theirs = f"{blocks}.{number}.{names[name]}"
    if not theirs.endswith(".qkv"):
        return theirs, None
    letter = name.removesuffix("_proj")[-1]
    return theirs, Rows(3, ("qkv".index(letter),))


def name_in_layout(layout: Layout, part: str, name: str, config: Config) -> tuple[str, Rows | None]:
    """Return what a parameter is called in a layout, as of ``name_transformer``."""
    rows = None
    if layout.names == "short":
        name = name.removeprefix("model.")
    elif layout.names != "diffusers" and part == "vae":
        name = name_original(name, config.vae)
        if layout.names == "original":
            name = re.sub("^quant_conv", "encoder.quant_conv", name)
            name = re.sub("^post_quant_conv", "decoder.post_quant_conv", name)
    elif layout.names != "diffusers" and part == "transformer":
        name, rows = name_transformer(name.removesuffix(".weight"))
        is_scale = name.endswith("_norm") and layout.names == "original"
        name = f"{name}.scale" if is_scale else f"{name}.weight"
    return layout.prefix + name, rows


NAMING = Naming(
    kinds=re.compile(r"FLUX(\.2|$)"),
    called="FLUX.2-klein",
    denoiser="transformer",
    prefixes=PREFIXES,
    names=NAMES,
    probes={
        "transformer": ("x_embedder.weight", "single_transformer_blocks.0.attn.norm_q.weight"),
        "text_encoder": ("model.layers.0.input_layernorm.weight",),
        "vae": ("encoder.conv_norm_out.weight", "quant_conv.weight"),
    },
    beginnings={
        "transformer": ("double_blocks.", "single_blocks.", "transformer_blocks.", "single_transf"),
        "vae": ("encoder.", "decoder."),
    },
    unread=re.compile(r"\.num_batches_tracked$"),
    name=name_in_layout,
)
# How each part is in a file of its own: the transformer and the VAE as Black Forest Labs publish
# them, the text encoder as Qwen does.
RELEASED = {
    "transformer": Layout("", "original"),
    "text_encoder": Layout("", "diffusers"),
    "vae": Layout("", "original"),
}


def read_single_file(
    file: str | Path,
    config: Config,
    vae: str | Path | None = None,
    text_encoder: str | Path | None = None,
) -> dict[str, dict[str, Stored | np.ndarray]]:
    """Read a model from one file, or from one for each part.

    Parameters
    ----------
    file : str or Path
        Safetensors with the transformer, and with the other parts if they are not given, by the
        names of Black Forest Labs, ComfyUI or diffusers.
    config : Config
        The configuration of such a model, which the file does not have.
    vae, text_encoder : str or Path, optional
        Files or folders of parts that take the place of the file's own.

    Returns
    -------
    dict
        For each part, arrays by the names of diffusers' files, which stay on disk until they are
        used. Of the text encoder there are all layers, for programs that want them.

    Raises
    ------
    FileNotFoundError, ValueError
        If a file is missing, damaged or a pickle, or it is not for a model of this configuration.
    """
    file = Path(file)
    others = {"vae": vae, "text_encoder": text_encoder}
    params = read_model(file, read_arrays(file), whole_shapes(config), NAMING, config, others)
    # PyTorch's batch norm counts its batches, and diffusers wants that number.
    return params | {"vae": params["vae"] | {"bn.num_batches_tracked": np.zeros((), np.int64)}}


def to_single_files(
    params: dict[str, dict[str, Any]], config: Config
) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield the names of the files that Black Forest Labs and Qwen publish, and the arrays of each.

    ComfyUI takes them from its folders diffusion_models, text_encoders and vae. Parameters are as
    ``course.flux2.read_files`` gives them.
    """
    for part, values in params.items():
        yield f"{part}.safetensors", to_single(values, RELEASED[part], part, NAMING, config)
