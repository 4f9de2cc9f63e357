"""The recipe of ``shapes-sdxl``, with the architecture of Stable Diffusion XL.

As there, two text encoders speak to the UNet: both by their last layer but one, the second also by
one vector for the whole caption, which is added to the timestep's embedding together with the sizes
of the picture; and the UNet has no attention at its finest level.
"""

import torch
from diffusers import UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from training.autoencoder import PIXELS
from training.diffusion import NOISE, Recipe
from training.sd import text_config

TEXT_WIDTH = 64  # of each text encoder, and of the vector for the whole caption
SIZE_WIDTH = 8  # of the embedding of each of the six sizes
# The share of the empty captions that are encoded. The others become zeros, as in the pipeline
# without a negative prompt.
EMPTY_BUT_ENCODED = 0.25
UNET_CONFIG = {
    "sample_size": PIXELS // 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (96, 96),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "layers_per_block": 1,
    "attention_head_dim": 4,
    "cross_attention_dim": 2 * TEXT_WIDTH,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": SIZE_WIDTH,
    "projection_class_embeddings_input_dim": 6 * SIZE_WIDTH + TEXT_WIDTH,
}
SCHEDULER_CONFIG = {**NOISE, "timestep_spacing": "leading"}  # Euler's
# Height and width of the original, top and left of what was cut out of it, height and width of the
# picture.
SIZES = (PIXELS, PIXELS, 0, 0, PIXELS, PIXELS)


def build(tokenizer: CLIPTokenizer) -> nn.ModuleDict:
    config = text_config(tokenizer, width=TEXT_WIDTH, layers=3)
    config_2 = text_config(tokenizer, width=TEXT_WIDTH, layers=3)
    config_2.projection_dim = TEXT_WIDTH
    return nn.ModuleDict(
        {
            "text_encoder": CLIPTextModel(config),
            "text_encoder_2": CLIPTextModelWithProjection(config_2),
            "unet": UNet2DConditionModel(**UNET_CONFIG),
        }
    )


def condition(
    parts: nn.ModuleDict, ids: torch.Tensor, captions: list[str], generator: torch.Generator
) -> dict:
    """Both text encoders' words, the second one's vector, and the sizes.

    For most empty captions, words and vector are zeros.
    """
    first = parts["text_encoder"](ids, output_hidden_states=True)
    second = parts["text_encoder_2"](ids, output_hidden_states=True)
    words = torch.cat([first.hidden_states[-2], second.hidden_states[-2]], dim=-1)
    encoded = torch.rand(len(captions), generator=generator) < EMPTY_BUT_ENCODED
    shown = torch.tensor([bool(text) for text in captions]).logical_or(encoded).to(words)
    return {
        "encoder_hidden_states": words * shown[:, None, None],
        "added_cond_kwargs": {
            "text_embeds": second.text_embeds * shown[:, None],
            "time_ids": torch.tensor([SIZES] * len(captions)).to(words),
        },
    }


RECIPE = Recipe(
    name="shapes-sdxl",
    steps=6_000,
    cooldown=4_000,
    peak_lr=2e-3,
    build=build,
    condition=condition,
)
