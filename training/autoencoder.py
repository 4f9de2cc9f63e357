"""The autoencoder of the bundled checkpoints: 64-pixel scenes to 8x8 latents with 4 channels, and back."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from training import scenes
from training.loop import WARMUP, fit

PIXELS = 64
POOL = 40_000  # rendered once; each picture is seen about three times
BATCH = 32
KL_WEIGHT = 1e-5
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


def render_pool(count: int, seed: int) -> np.ndarray:
    return np.stack([scenes.render(scene, PIXELS) for scene in scenes.training_scenes(count, seed)])


def train(folder: Path, *, steps: int, seed: int, device: torch.device) -> tuple[AutoencoderKL, dict]:
    """Train the autoencoder; its posterior mean has zero mean and unit, uncorrelated channels afterwards."""
    torch.manual_seed(seed)
    pool = render_pool(POOL, seed)

    def loss_of(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        index = torch.randint(len(pool), (BATCH,), generator=generator)
        pictures = to_signed(pool[index.numpy()]).to(device)
        posterior = model.encode(pictures).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator).to(device)
        error = model.decode(posterior.mean + posterior.std * noise).sample.float() - pictures
        # The squared error is what PSNR measures; the absolute one keeps pushing on flat areas that are almost right.
        return error.square().mean() + 0.1 * error.abs().mean() + KL_WEIGHT * posterior.kl().mean() / noise[0].numel()

    model, log = fit(
        AutoencoderKL(**CONFIG),
        loss_of,
        name="autoencoder",
        folder=folder,
        steps=steps,
        peak_lr=1e-3,
        cooldown=steps - WARMUP,
        seed=seed,
        device=device,
    )
    normalize_latents(model, to_signed(pool[:2048]).to(device))
    return model, log


@torch.no_grad()
def normalize_latents(model: AutoencoderKL, pictures: torch.Tensor) -> None:
    """Whiten the latents' channels, exactly, by changing the two 1x1 convolutions around them.

    Diffusion starts from white noise; channels of one size and without correlation are what it learns fastest.
    """
    latents = torch.cat([model.encode(batch).latent_dist.mean for batch in pictures.split(256)])
    channels = latents.transpose(0, 1).flatten(1).double()
    mean = channels.mean(1)
    eigenvalues, basis = torch.linalg.eigh(torch.cov(channels))
    whiten = basis.T / eigenvalues.sqrt()[:, None]
    unwhiten = torch.linalg.inv(whiten)

    n = len(mean)
    encoded, decoded = model.quant_conv, model.post_quant_conv
    weight, bias = encoded.weight.double(), encoded.bias.double()
    # The first n outputs are the mean. The log-variances, the other n, keep their meaning only channel by channel;
    # nothing samples from them after training, so they stay as they are.
    weight[:n] = torch.einsum("ij,jkhw->ikhw", whiten, weight[:n])
    bias[:n] = whiten @ (bias[:n] - mean)
    encoded.weight.copy_(weight)
    encoded.bias.copy_(bias)
    weight = decoded.weight.double()
    decoded.bias.copy_(decoded.bias.double() + weight[:, :, 0, 0] @ mean)
    decoded.weight.copy_(torch.einsum("ikhw,kj->ijhw", weight, unwhiten))


@torch.no_grad()
def reconstruction_psnr(model: AutoencoderKL, pictures: np.ndarray) -> np.ndarray:
    """Peak signal-to-noise ratio of each reconstructed uint8 picture, in dB, from the posterior mean."""
    ratios = []
    for batch in to_signed(pictures).split(128):
        restored = model.decode(model.encode(batch).latent_dist.mean).sample.clamp(-1, 1)
        error = ((restored - batch) / 2).square().mean(dim=(1, 2, 3))
        ratios.append(-10 * torch.log10(error))
    return torch.cat(ratios).numpy()
