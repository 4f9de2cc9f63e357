"""Which model a file with parameters or a LoRA is for, as far as its names and shapes tell."""

import re
from collections.abc import Mapping

# By what is in the names of a file's arrays, with "_" in place of each ".".
NAMED = {
    r"joint_": "Stable Diffusion 3",
    r"(noise|context)_refiner|layers_\d+_(attention_(to_|qkv|out)|feed_forward_w)": "Z-Image",
    r"img_mod_1|(img|txt)_mlp_net_": "Qwen-Image",
}
FLUX = r"(double|single|single_transformer)_blocks_\d|attn_add_[qkv]_proj|stream_modulation"
# What FLUX.1 has and FLUX.2 has not: modulation by each block, MLPs without gates, more blocks.
FLUX1 = (
    r"(img|txt)_mod_lin|blocks_\d+_modulation_lin|norm1(_context)?_linear|ff(_context)?_net|vector_in"
    r"|double_blocks_(8|9|1\d)_|single_transformer_blocks_\d+_(attn_to_[qkv]_|proj_|norm)"
)
FLUX2 = r"stream_modulation|to_qkv_mlp_proj|ff(_context)?_linear_"
# By the width of the transformer, which all of its layers read that are named here.
FLUX2_WIDTHS = {
    3072: "FLUX.2-klein-4B",
    4096: "FLUX.2-klein-9B",
    6144: "FLUX.2-dev",
}
READ_WIDTH = r"attn_(qkv|to_[qkv]|add_[qkv]_proj|to_qkv_mlp_proj)|linear1|mlp_0|linear_in"
XL = r"te2_|text_encoder_2|clip_g|conditioner_embedders_1"
# By how many numbers the UNet of Stable Diffusion reads for each token of the text.
TOKEN_WIDTHS = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    1280: "the refiner of Stable Diffusion XL",
    2048: "Stable Diffusion XL",
}
READ_TOKENS = r"attn2_to_[kv]"
# The end of a name whose array has what a layer reads on its last axis, as PyTorch has axes.
INPUTS = r"(_processor)?(_lora_A|_lora_down|_lora_linear_layer_down)?(_default)?_weight$"


def made_for(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return for which model a file is, by the names and shapes of its arrays; None if not known.

    >>> made_for({"diffusion_model.double_blocks.0.img_attn.qkv.lora_A.weight": (16, 4096)})
    'FLUX.2-klein-9B'
    >>> made_for({"lora_unet_mid_block_attn2_to_k.lora_down.weight": (4, 2048)})
    'Stable Diffusion XL'
    """
    flat = {name.replace(".", "_"): shape for name, shape in shapes.items()}

    def has(pattern: str) -> bool:
        return any(re.search(pattern, name) for name in flat)

    def by_width(pattern: str, kinds: Mapping[int, str]) -> str | None:
        """Return the kind of which such a layer reads so many numbers."""
        for name, shape in flat.items():
            if re.search(f"({pattern}){INPUTS}", name) and shape and shape[-1] in kinds:
                return kinds[shape[-1]]
        return None

    for pattern, kind in NAMED.items():
        if has(pattern):
            return kind
    if has(FLUX):
        if has(FLUX1):
            return "FLUX.1"
        known = by_width(READ_WIDTH, FLUX2_WIDTHS)
        return known or ("FLUX.2" if has(FLUX2) else "FLUX")
    return "Stable Diffusion XL" if has(XL) else by_width(READ_TOKENS, TOKEN_WIDTHS)
