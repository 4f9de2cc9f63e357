"""How the bundled diffusion models are trained: the UNet and its text encoders, on latents.

What differs between the models is a ``Recipe``: ``training/sd.py`` and ``training/sdxl.py`` have
one each.
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
from torch.nn import functional
from tqdm import tqdm
from transformers import CLIPTokenizer

from course.shapes import scenes
from training.autoencoder import to_signed
from training.loop import fit

POOL = 100_000  # scenes to train on, the same for every model, as their latents are
POOL_SEED = 1
BATCH = 128
TIMESTEPS = 1000
# The timesteps in which a picture gets its shape: every other one is drawn from them.
MIDDLE = (100, 600)
EMPTY_CAPTIONS = 0.1  # the share that names nothing: what the pipeline's unconditional half sees
FULL_CAPTIONS = 0.5  # the share that names every attribute
DROPPED_ATTRIBUTES = 0.35  # of each attribute in the remaining captions
# Stable Diffusion's own betas end at a signal-to-noise ratio that leaks the mean colour; these come
# nearer to noise. At so much noise, predicting the velocity keeps the picture in the loss, which
# predicting the noise does not.
NOISE = {
    "beta_schedule": "linear",
    "beta_start": 1e-4,
    "beta_end": 0.02,
    "prediction_type": "v_prediction",
}


@dataclass(frozen=True)
class Recipe:
    """What one model has of its own.

    Attributes
    ----------
    name : str
        The checkpoint's.
    steps, cooldown : int
        Of training, and those at the end of it in which the learning rate falls to zero.
    peak_lr : float
        The learning rate before that.
    build : callable
        From the tokenizer to the parts: a ``unet``, and whatever ``condition`` needs.
    condition : callable
        From the parts, token ids of shape (batch, 77), the captions and a generator to the keyword
        arguments that the UNet takes besides latents and timesteps.
    pool_size : int
        The number of scenes to train on.
    """

    name: str
    steps: int
    cooldown: int
    peak_lr: float
    build: Callable[[CLIPTokenizer], nn.ModuleDict]
    condition: Callable[[nn.ModuleDict, torch.Tensor, list[str], torch.Generator], dict]
    pool_size: int = POOL


def random_attributes(scene: scenes.Scene, generator: torch.Generator) -> dict[str, str | None]:
    """What a training caption names of a scene: everything, some attributes, or nothing."""
    drawn = torch.rand(1 + len(scenes.ATTRIBUTES), generator=generator).tolist()
    named = {}
    for name, drop in zip(scenes.ATTRIBUTES, drawn[1:], strict=True):
        if drawn[0] < EMPTY_CAPTIONS:
            is_named = False
        elif drawn[0] < EMPTY_CAPTIONS + FULL_CAPTIONS:
            is_named = True
        else:
            is_named = drop > DROPPED_ATTRIBUTES
        named[name] = getattr(scene, name) if is_named else None
    return named


def random_timesteps(generator: torch.Generator) -> torch.Tensor:
    """A timestep for each example of a batch, int64, (batch,).

    There is one in each of as many equal intervals: the same mean as of independent ones, with less
    variance. Half of the intervals divide the ``MIDDLE``, and half of them all timesteps.
    """
    places = (torch.arange(BATCH) + torch.rand(BATCH, generator=generator)) / BATCH
    timesteps = places * TIMESTEPS
    low, high = MIDDLE
    timesteps[1::2] = low + places[1::2] * (high - low)
    return timesteps.long()


@torch.no_grad()
def encode_pool(
    autoencoder: AutoencoderKL, pool: list[scenes.Scene], folder: Path, device: torch.device
) -> torch.Tensor:
    """The latents of the pool, float32, (scenes, 4, 8, 8).

    They are kept in the folder, because rendering the scenes takes minutes.
    """
    file = folder / f"latents-{len(pool)}.pt"
    if file.exists():
        return torch.load(file, map_location=device, weights_only=True).float()
    encoded = []
    for start in tqdm(range(0, len(pool), 500), desc="latents", unit_scale=500):
        pictures = np.stack([scenes.render(scene) for scene in pool[start : start + 500]])
        with torch.autocast(device.type, dtype=torch.bfloat16):
            latents = autoencoder.encode(to_signed(pictures).to(device)).latent_dist.mean
        encoded.append(latents.half())
    latents = torch.cat(encoded)
    torch.save(latents, file)
    return latents.float()


def start_from(parts: nn.ModuleDict, earlier: nn.ModuleDict) -> None:
    """Take over each tensor of an earlier model that has the same name and shape here."""
    weights = parts.state_dict()
    for name, weight in earlier.state_dict().items():
        if name in weights and weights[name].shape == weight.shape:
            weights[name] = weight
    parts.load_state_dict(weights)


def train(
    recipe: Recipe,
    autoencoder: AutoencoderKL,
    tokenizer: CLIPTokenizer,
    folder: Path,
    *,
    earlier: nn.ModuleDict | None,
    seed: int,
    device: torch.device,
    compiled: bool,
) -> tuple[nn.ModuleDict, dict]:
    """Train the recipe's parts, and return them with a log of the losses.

    Parameters
    ----------
    folder : Path
        Holds the states to resume from, and the latents.
    earlier : nn.ModuleDict, optional
        A model to start from, wherever names and shapes of the weights agree.
    compiled : bool
        By ``torch.compile``, which needs a C++ compiler on a CPU.
    """
    torch.manual_seed(seed)
    pool = scenes.training_scenes(recipe.pool_size, POOL_SEED)
    latents = encode_pool(autoencoder.to(device), pool, folder, device)
    parts = recipe.build(tokenizer)
    if earlier is not None:
        start_from(parts, earlier)
    # Faster than the fused attention on a CPU, for maps this small.
    parts["unet"].set_attn_processor(AttnProcessor())
    if compiled:
        parts["unet"].compile()
    noise_schedule = DDIMScheduler(**NOISE)

    @cache  # there are a few thousand captions, and the tokenizer is slow Python
    def token_ids(text: str) -> list[int]:
        return tokenizer(
            text, padding="max_length", max_length=tokenizer.model_max_length
        ).input_ids

    def loss_fn(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        captions = [scenes.caption(**random_attributes(pool[i], generator)) for i in index.tolist()]
        ids = torch.tensor([token_ids(text) for text in captions], device=device)
        noise = torch.randn((BATCH, *latents.shape[1:]), generator=generator).to(device)
        timesteps = random_timesteps(generator).to(device)
        clean = latents[index.to(device)]
        noisy = noise_schedule.add_noise(clean, noise, timesteps)
        velocity = noise_schedule.get_velocity(clean, noise, timesteps)
        condition = recipe.condition(model, ids, captions, generator)
        predicted = model["unet"](noisy, timesteps, **condition).sample
        return functional.mse_loss(predicted.float(), velocity)

    return fit(
        parts,
        loss_fn,
        name=recipe.name,
        folder=folder,
        steps=recipe.steps,
        peak_lr=recipe.peak_lr,
        cooldown=recipe.cooldown,
        seed=seed,
        device=device,
    )
