"""The text encoder and the UNet of ``shapes-sd``, trained together on the autoencoder's latents."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from training import scenes
from training.autoencoder import PIXELS, to_signed
from training.loop import fit

# How pictures are drawn from the result, wherever it is scored or compared; the chapters draw them so, too.
STEPS = 30
GUIDANCE_SCALE = 3.0
POOL = 100_000
POOL_SEED = 1
BATCH = 128
EMPTY_CAPTIONS = 0.1  # what the pipeline's unconditional half sees
FULL_CAPTIONS = 0.5
DROPPED_ATTRIBUTES = 0.35  # of each attribute in the remaining captions
TEXT_WIDTH = 64


@dataclass(frozen=True)
class Round:
    """One run of the training loop. The next one starts from its averaged weights, with a fresh optimizer."""

    steps: int
    cooldown: int  # steps at the end of it
    emphasis: bool  # whether every other timestep is drawn from MIDDLE


ROUNDS = (Round(steps=6_000, cooldown=2_000, emphasis=False), Round(steps=4_200, cooldown=4_100, emphasis=True))
MIDDLE = (100, 600)  # the timesteps, of 1000, in which a picture gets its shape
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
# Stable Diffusion's own betas end at a signal-to-noise ratio that leaks the mean colour; these come nearer to noise.
# At so much noise, predicting the velocity keeps the picture in the loss, which predicting the noise does not.
SCHEDULER_CONFIG = {
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "clip_sample": False,
    "steps_offset": 1,
    "prediction_type": "v_prediction",
}


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=tokenizer.model_max_length,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def random_attributes(scene: scenes.Scene, generator: torch.Generator) -> dict[str, str | None]:
    """What a training caption names of a scene: everything, some attributes, or nothing (the empty caption)."""
    kind, *drops = torch.rand(1 + len(scenes.ATTRIBUTES), generator=generator).tolist()
    empty = kind < EMPTY_CAPTIONS
    full = not empty and kind < EMPTY_CAPTIONS + FULL_CAPTIONS
    return {
        name: getattr(scene, name) if full or (not empty and drop > DROPPED_ATTRIBUTES) else None
        for name, drop in zip(scenes.ATTRIBUTES, drops, strict=True)
    }


@torch.no_grad()
def encode_pool(autoencoder: AutoencoderKL, pool: list[scenes.Scene], device: torch.device) -> torch.Tensor:
    latents = []
    for start in range(0, len(pool), 500):
        pictures = np.stack([scenes.render(scene, PIXELS) for scene in pool[start : start + 500]])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            latents.append(autoencoder.encode(to_signed(pictures).to(device)).latent_dist.mean.float())
    return torch.cat(latents)


def train(
    autoencoder: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    folder: Path,
    *,
    rounds: tuple[Round, ...] = ROUNDS,
    seed: int,
    device: torch.device,
) -> tuple[nn.ModuleDict, list[dict]]:
    """Train the text encoder and the UNet; returns them by these names (``text_encoder``), and a log of each round."""
    torch.manual_seed(seed)
    pool = scenes.training_scenes(POOL, POOL_SEED)
    latents = encode_pool(autoencoder.to(device), pool, device)
    parts = nn.ModuleDict({"text_encoder": build_text_encoder(tokenizer), "unet": UNet2DConditionModel(**UNET_CONFIG)})
    parts["unet"].set_attn_processor(AttnProcessor())  # faster than the fused one on a CPU, for maps this small
    scheduler = DDIMScheduler(**SCHEDULER_CONFIG)

    @cache  # there are a few thousand captions, and the tokenizer is slow Python
    def token_ids(text: str) -> list[int]:
        return tokenizer(text, padding="max_length", max_length=tokenizer.model_max_length).input_ids

    def loss_of(model: nn.Module, generator: torch.Generator, emphasis: bool) -> torch.Tensor:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        captions = [scenes.caption(**random_attributes(pool[i], generator)) for i in index.tolist()]
        ids = torch.tensor([token_ids(text) for text in captions], device=device)
        noise = torch.randn((BATCH, *latents.shape[1:]), generator=generator).to(device)
        # One timestep from each of BATCH equal intervals: the same mean as independent ones, with less variance.
        timesteps = (torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) * (1000 / BATCH)
        if emphasis:
            low, high = MIDDLE
            timesteps[1::2] = low + timesteps[1::2] * (high - low) / 1000
        timesteps = timesteps.long().to(device)
        clean = latents[index.to(device)]
        context = model["text_encoder"](ids)[0]
        velocity = model["unet"](scheduler.add_noise(clean, noise, timesteps), timesteps, context).sample
        return (velocity.float() - scheduler.get_velocity(clean, noise, timesteps)).square().mean()

    logs = []
    for number, training_round in enumerate(rounds, 1):
        parts, log = fit(
            parts,
            partial(loss_of, emphasis=training_round.emphasis),
            name=f"diffusion-{number}",
            folder=folder,
            steps=training_round.steps,
            peak_lr=1e-3,
            cooldown=training_round.cooldown,
            seed=seed + number - 1,
            device=device,
        )
        parts.requires_grad_(True)
        logs.append(log)
    return parts, logs
