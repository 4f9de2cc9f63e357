"""How the bundled diffusion models are trained: on the autoencoder's latents, the text encoders together with the UNet.

What differs between them is a ``Recipe``: ``training/sd.py`` and ``training/sdxl.py`` have one each.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler
from diffusers.models.attention_processor import AttnProcessor
from torch import nn
from tqdm import tqdm
from transformers import CLIPTokenizer

from training import scenes
from training.autoencoder import to_signed
from training.loop import fit

# How pictures are drawn from the result where it is scored. Most chapters take half of the steps.
STEPS = 30
GUIDANCE_SCALE = 3.0
POOL = 100_000  # scenes to train on, the same for every model, as their latents are
POOL_SEED = 1
BATCH = 128
EMPTY_CAPTIONS = 0.1  # what the pipeline's unconditional half sees
FULL_CAPTIONS = 0.5
DROPPED_ATTRIBUTES = 0.35  # of each attribute in the remaining captions
MIDDLE = (100, 600)  # the timesteps, of 1000, in which a picture gets its shape: every other one is drawn from them
# Stable Diffusion's own betas end at a signal-to-noise ratio that leaks the mean colour; these come nearer to noise.
# At so much noise, predicting the velocity keeps the picture in the loss, which predicting the noise does not.
NOISE = {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02, "prediction_type": "v_prediction"}


@dataclass(frozen=True)
class Recipe:
    """What one model has of its own.

    Attributes
    ----------
    name : str
        The checkpoint's.
    pixels : int
        The pictures' width and height; the latents have an eighth of it.
    steps, cooldown : int
        Of training, and those at the end of it in which the learning rate falls to zero.
    peak_lr : float
        The learning rate before that.
    build : callable
        From the tokenizer to the parts: a ``unet``, and whatever ``condition`` needs.
    condition : callable
        From the parts, token ids of shape (batch, 77), the captions and a generator to the keyword arguments that the
        UNet takes besides latents and timesteps.
    """

    name: str
    pixels: int
    steps: int
    cooldown: int
    peak_lr: float
    build: Callable[[CLIPTokenizer], nn.ModuleDict]
    condition: Callable[[nn.ModuleDict, torch.Tensor, list[str], torch.Generator], dict]


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
def encode_pool(
    autoencoder: AutoencoderKL, pool: list[scenes.Scene], pixels: int, folder: Path, device: torch.device
) -> torch.Tensor:
    """The latents of the pool, kept in the folder, because rendering them takes minutes."""
    file = folder / f"latents-{pixels}.pt"
    if file.exists():
        return torch.load(file, map_location=device, weights_only=True).float()
    latents = []
    for start in tqdm(range(0, len(pool), 500), desc="latents", unit_scale=500):
        pictures = np.stack([scenes.render(scene, pixels) for scene in pool[start : start + 500]])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            latents.append(autoencoder.encode(to_signed(pictures).to(device)).latent_dist.mean.half())
    torch.save(torch.cat(latents), file)
    return torch.cat(latents).float()


def start_from(parts: nn.ModuleDict, earlier: nn.ModuleDict) -> None:
    """Take over each tensor of an earlier model that has the same name and shape here."""
    known, own = earlier.state_dict(), parts.state_dict()
    parts.load_state_dict(own | {k: v for k, v in known.items() if k in own and v.shape == own[k].shape})


def train(
    recipe: Recipe,
    autoencoder: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    folder: Path,
    *,
    earlier: nn.ModuleDict | None = None,
    seed: int,
    device: torch.device,
    compiled: bool = False,
) -> tuple[nn.ModuleDict, dict]:
    """Train the recipe's parts, from an earlier model's where they agree; returns them with a log of the losses.

    ``compiled``: by ``torch.compile``, which needs a C++ compiler on a CPU.
    """
    torch.manual_seed(seed)
    pool = scenes.training_scenes(POOL, POOL_SEED)
    latents = encode_pool(autoencoder.to(device), pool, recipe.pixels, folder, device)
    parts = recipe.build(tokenizer)
    if earlier is not None:
        start_from(parts, earlier)
    parts["unet"].set_attn_processor(AttnProcessor())  # faster than the fused one on a CPU, for maps this small
    noise_schedule = DDIMScheduler(**NOISE)

    @cache  # there are a few thousand captions, and the tokenizer is slow Python
    def token_ids(text: str) -> list[int]:
        return tokenizer(text, padding="max_length", max_length=tokenizer.model_max_length).input_ids

    def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        captions = [scenes.caption(**random_attributes(pool[i], generator)) for i in index.tolist()]
        ids = torch.tensor([token_ids(text) for text in captions], device=device)
        noise = torch.randn((BATCH, *latents.shape[1:]), generator=generator).to(device)
        # One timestep from each of BATCH equal intervals: the same mean as independent ones, with less variance.
        timesteps = (torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) * (1000 / BATCH)
        low, high = MIDDLE
        timesteps[1::2] = low + timesteps[1::2] * (high - low) / 1000
        timesteps = timesteps.long().to(device)
        clean = latents[index.to(device)]
        noisy = noise_schedule.add_noise(clean, noise, timesteps)
        velocity = model["unet"](noisy, timesteps, **recipe.condition(model, ids, captions, generator)).sample
        return (velocity.float() - noise_schedule.get_velocity(clean, noise, timesteps)).square().mean()

    if compiled:
        parts["unet"].compile()
    return fit(
        parts,
        loss_of,
        name=recipe.name,
        folder=folder,
        steps=recipe.steps,
        peak_lr=recipe.peak_lr,
        cooldown=recipe.cooldown,
        seed=seed,
        device=device,
    )
