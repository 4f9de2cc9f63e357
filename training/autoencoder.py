"""The autoencoder: scenes of 64 × 64 pixels to latents, 8 × 8 with 4 channels, and back."""

import math
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn
from torch.nn import functional

from course.shapes import scenes
from training.loop import fit

PIXELS = 64
STEPS = 3_000
POOL = 40_000  # scenes, rendered once; each is seen about three times
BATCH = 32
# The most noise that is added to the latents before they are decoded, in their own spread.
LATENT_NOISE = 0.5
# How often a small shape is seen, for one of another size: it is the hardest.
SMALL_SHARE = 3.0
# Of the error at the edges, which make a star a star: as much for a small one as for a large one.
EDGE_WEIGHT = 0.4
CONFIG = {
    "sample_size": PIXELS,
    "latent_channels": 4,
    "block_out_channels": (32, 32, 64, 64),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "scaling_factor": 1.0,  # normalize_latents folds the scale into the weights
}


def to_signed(pictures: np.ndarray) -> torch.Tensor:
    """uint8 pictures of shape (n, h, w, 3) as float32 of shape (n, 3, h, w) in [-1, 1]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def at_edges(pictures: torch.Tensor) -> torch.Tensor:
    """1 where the colour changes within a pixel's distance, 0 elsewhere: shape (n, 1, h, w)."""
    highest = functional.max_pool2d(pictures, kernel_size=3, stride=1, padding=1)
    lowest = -functional.max_pool2d(-pictures, kernel_size=3, stride=1, padding=1)
    return ((highest - lowest).amax(1, keepdim=True) > 0.1).float()


def picture_loss(restored: torch.Tensor, pictures: torch.Tensor) -> torch.Tensor:
    """How far restored pictures are from the true ones, edges counting more: both (n, 3, h, w)."""
    difference = restored - pictures
    # The squared error is what PSNR measures; the absolute one keeps pushing on flat areas that are
    # almost right.
    error = (difference.square() + 0.1 * difference.abs()).mean(1, keepdim=True)  # (n, 1, h, w)
    edges = at_edges(pictures)
    error_at_edges = (error * edges).sum((1, 2, 3)) / edges.sum((1, 2, 3))  # (n,)
    return error.mean() + EDGE_WEIGHT * error_at_edges.mean()


def train(
    folder: Path, *, steps: int, pool_size: int, seed: int, device: torch.device
) -> tuple[AutoencoderKL, dict]:
    """Train the autoencoder, and return it with a log of the losses.

    It decodes noisy latents: scenes that differ then lie apart, and what diffusion gets slightly
    wrong is put right (latent denoising, https://arxiv.org/abs/2507.15856). Afterwards the channels
    of its latents have zero mean, a variance of 1 and no correlation.
    """
    torch.manual_seed(seed)
    drawn = scenes.training_scenes(pool_size, seed)
    pool = np.stack([scenes.render(scene, PIXELS) for scene in drawn])
    shares = torch.tensor([SMALL_SHARE if scene.size == "small" else 1.0 for scene in drawn])

    def loss_fn(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        index = torch.multinomial(shares, BATCH, generator=generator)
        pictures = to_signed(pool[index.numpy()]).to(device)
        latents = model.encode(pictures).latent_dist.mean.float()
        std, mean = torch.std_mean(latents, dim=(0, 2, 3), keepdim=True)
        noise = torch.randn(latents.shape, generator=generator).to(device)
        level = LATENT_NOISE * torch.rand((BATCH, 1, 1, 1), generator=generator).to(device)
        noisy = (latents - mean) / std + level * noise
        return picture_loss(model.decode(noisy).sample.float(), pictures)

    model, log = fit(
        AutoencoderKL(**CONFIG),
        loss_fn,
        name="autoencoder",
        folder=folder,
        steps=steps,
        peak_lr=2e-3,
        cooldown=steps * 2 // 3,
        seed=seed,
        device=device,
    )
    normalize_latents(model, to_signed(pool[:2048]).to(device))
    return model, log


@torch.no_grad()
def normalize_latents(model: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Put into the weights what training did to the latents, and whiten their channels, exactly.

    Both are changes of the two 1x1 convolutions around the latents. Diffusion starts from white
    noise; channels of one size and without correlation are what it learns fastest.
    """
    latents = torch.cat([model.encode(batch).latent_dist.mean for batch in pictures.split(256)])
    channels = latents.transpose(0, 1).flatten(1).double()  # (4, pictures x 8 x 8)
    std, mean = torch.std_mean(channels, dim=1)
    eigenvalues, basis = torch.linalg.eigh(torch.corrcoef(channels))
    whiten = basis.T / eigenvalues.sqrt()[:, None] / std
    unwhiten = basis * eigenvalues.sqrt()

    # The encoder's convolution has 8 outputs: the first 4 are the mean, the others the logarithm of
    # the variance, which says what noise the decoder has seen.
    encoded = model.quant_conv
    n = len(mean)
    mean_weight = encoded.weight[:n].double()
    mean_bias = encoded.bias[:n].double()
    encoded.weight[:n] = torch.einsum("ij,jkhw->ikhw", whiten, mean_weight)
    encoded.weight[n:] = 0
    encoded.bias[:n] = whiten @ (mean_bias - mean)
    encoded.bias[n:] = 2 * math.log(LATENT_NOISE / 2)

    decoded = model.post_quant_conv
    weight = decoded.weight.double()
    decoded.weight.copy_(torch.einsum("ikhw,kj->ijhw", weight, unwhiten))


@torch.no_grad()
def reconstruction_psnr(model: AutoencoderKL, pictures: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each picture's reconstruction, in dB, float32, (n,).

    Pictures are uint8, (n, h, w, 3), and are decoded from the posterior mean.
    """
    ratios = []
    for batch in to_signed(pictures).split(128):
        restored = model.decode(model.encode(batch).latent_dist.mean).sample.clamp(-1, 1)
        error = ((restored - batch) / 2).square().mean(dim=(1, 2, 3))
        ratios.append(-10 * torch.log10(error))
    return torch.cat(ratios).numpy()
