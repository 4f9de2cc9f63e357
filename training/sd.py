"""The recipe of ``shapes-sd``, with the architecture of Stable Diffusion 1."""

from dataclasses import replace

import torch
from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from training.autoencoder import PIXELS
from training.diffusion import NOISE, Recipe

TEXT_WIDTH = 64
UNET_CONFIG = {
    "sample_size": PIXELS // 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (96, 96),
    "down_block_types": ("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 4,  # diffusers reads this as the number of heads
    "cross_attention_dim": TEXT_WIDTH,
}
SCHEDULER_CONFIG = {**NOISE, "clip_sample": False, "steps_offset": 1}  # DDIM's


def text_config(tokenizer: CLIPTokenizer, *, width: int, layers: int) -> CLIPTextConfig:
    """A CLIP text encoder for this vocabulary."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def build(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    text_encoder = CLIPTextModel(text_config(tokenizer, width=TEXT_WIDTH, layers=2))
    return nn.ModuleDict(
        {"text_encoder": text_encoder, "unet": UNet2DConditionModel(**UNET_CONFIG)}
    )


def condition(
    parts: nn.ModuleDict, ids: torch.Tensor, captions: list[str], generator: torch.Generator
) -> dict:
    """The last layer of the text encoder.

    An empty caption is encoded like any other, as in the pipeline's unconditional half.
    """
    return {"encoder_hidden_states": parts["text_encoder"](ids)[0]}


# Long and at a high learning rate: both checkpoints start from what it gives.
FIRST = Recipe(
    name="shapes-sd-first",
    steps=6_000,
    cooldown=4_000,
    peak_lr=2e-3,
    build=build,
    condition=condition,
)
RECIPE = replace(FIRST, name="shapes-sd", steps=3_000, cooldown=2_900, peak_lr=1e-3)
