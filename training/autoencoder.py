"""The autoencoder of the bundled checkpoints: 64-pixel scenes to 8x8 latents with 4 channels, and back."""

import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn
from torch.nn import functional

from training import scenes
from training.loop import fit

PIXELS = 64
POOL = 40_000  # rendered once; each picture is seen about three times
BATCH = 32
LATENT_NOISE = 0.5  # of the latents' own spread: the most that is added to them before they are decoded
SMALL_SHARE = 3.0  # how often a small shape is seen, for one of another size: it is the hardest
EDGE_WEIGHT = 0.4  # of the error at the edges, which make a star a star: as much for a small one as for a large one
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
    around = partial(functional.max_pool2d, kernel_size=3, stride=1, padding=1)
    return ((around(pictures) + around(-pictures)).amax(1, keepdim=True) > 0.1).float()


def train(folder: Path, *, steps: int, seed: int, device: torch.device) -> tuple[AutoencoderKL, dict]:
    """Train the autoencoder; its posterior mean has zero mean and unit, uncorrelated channels afterwards.

    It decodes noisy latents: scenes that differ then lie apart, and what diffusion gets slightly wrong is put right
    (latent denoising, https://arxiv.org/abs/2507.15856).
    """
    torch.manual_seed(seed)
    drawn = scenes.training_scenes(POOL, seed)
    pool = np.stack([scenes.render(scene, PIXELS) for scene in drawn])
    shares = torch.tensor([SMALL_SHARE if scene.size == "small" else 1.0 for scene in drawn])

    def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        index = torch.multinomial(shares, BATCH, generator=generator)
        pictures = to_signed(pool[index.numpy()]).to(device)
        latents = model.encode(pictures).latent_dist.mean.float()
        std, mean = torch.std_mean(latents, dim=(0, 2, 3), keepdim=True)
        noise = torch.randn(latents.shape, generator=generator).to(device)
        level = LATENT_NOISE * torch.rand((BATCH, 1, 1, 1), generator=generator).to(device)
        error = model.decode((latents - mean) / std + level * noise).sample.float() - pictures
        # The squared error is what PSNR measures; the absolute one keeps pushing on flat areas that are almost right.
        error = (error.square() + 0.1 * error.abs()).mean(1, keepdim=True)
        edges = at_edges(pictures)
        return error.mean() + EDGE_WEIGHT * ((error * edges).sum((1, 2, 3)) / edges.sum((1, 2, 3))).mean()

    model, log = fit(
        AutoencoderKL(**CONFIG),
        loss_of,
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

    Both are changes of the two 1x1 convolutions around the latents. Diffusion starts from white noise; channels of one
    size and without correlation are what it learns fastest.
    """
    latents = torch.cat([model.encode(batch).latent_dist.mean for batch in pictures.split(256)])
    channels = latents.transpose(0, 1).flatten(1).double()
    std, mean = torch.std_mean(channels, dim=1)
    eigenvalues, basis = torch.linalg.eigh(torch.corrcoef(channels))
    whiten = basis.T / eigenvalues.sqrt()[:, None] / std
    unwhiten = basis * eigenvalues.sqrt()

    n = len(mean)
    encoded, decoded = model.quant_conv, model.post_quant_conv
    weight, bias = encoded.weight.double(), encoded.bias.double()
    # The first n outputs are the mean; the other n, the log-variances, say what noise the decoder has seen.
    weight = torch.cat([torch.einsum("ij,jkhw->ikhw", whiten, weight[:n]), torch.zeros_like(weight[n:])])
    bias = torch.cat([whiten @ (bias[:n] - mean), torch.full_like(bias[n:], 2 * math.log(LATENT_NOISE / 2))])
    encoded.weight.copy_(weight)
    encoded.bias.copy_(bias)
    decoded.weight.copy_(torch.einsum("ikhw,kj->ijhw", decoded.weight.double(), unwhiten))


@torch.no_grad()
def reconstruction_psnr(model: AutoencoderKL, pictures: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each reconstructed uint8 picture, in dB, from the posterior mean."""
    ratios = []
    for batch in to_signed(pictures).split(128):
        restored = model.decode(model.encode(batch).latent_dist.mean).sample.clamp(-1, 1)
        error = ((restored - batch) / 2).square().mean(dim=(1, 2, 3))
        ratios.append(-10 * torch.log10(error))
    return torch.cat(ratios).numpy()
