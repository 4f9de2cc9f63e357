"""From the trained PyTorch modules to the two checkpoint formats: Flax to ship, PyTorch to compare with."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    FlaxAutoencoderKL,
    FlaxDDIMScheduler,
    FlaxStableDiffusionPipeline,
    FlaxUNet2DConditionModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.models.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax as convert_diffusers
from transformers import CLIPTextModel, CLIPTokenizer, FlaxCLIPTextModel
from transformers.modeling_flax_pytorch_utils import convert_pytorch_state_dict_to_flax as convert_transformers

from training import autoencoder, diffusion


def save_pytorch(
    vae: AutoencoderKL, text_encoder: CLIPTextModel, unet: UNet2DConditionModel, tokenizer: CLIPTokenizer, folder: Path
) -> None:
    """Write a ``StableDiffusionPipeline`` with float32 weights in safetensors."""
    StableDiffusionPipeline(
        vae=vae.float(),
        text_encoder=text_encoder.float(),
        tokenizer=tokenizer,
        unet=unet.float(),
        scheduler=DDIMScheduler(**diffusion.SCHEDULER_CONFIG),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)


def to_flax(pytorch_folder: Path, folder: Path, dtype: jnp.dtype) -> None:
    """Write a ``FlaxStableDiffusionPipeline`` whose parameters are stored in ``dtype``."""
    source = StableDiffusionPipeline.from_pretrained(pytorch_folder, safety_checker=None)
    text_encoder = FlaxCLIPTextModel(source.text_encoder.config, _do_init=False)
    unet = FlaxUNet2DConditionModel(**diffusion.UNET_CONFIG)
    vae = FlaxAutoencoderKL(**autoencoder.CONFIG)
    pipeline = FlaxStableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=source.tokenizer,
        unet=unet,
        scheduler=FlaxDDIMScheduler(**diffusion.SCHEDULER_CONFIG),
        safety_checker=None,
        feature_extractor=None,
    )
    text_params = convert_transformers(
        source.text_encoder.state_dict(),
        FlaxCLIPTextModel(source.text_encoder.config),
    )
    params = {
        "text_encoder": text_params,
        "unet": convert_diffusers(source.unet.state_dict(), unet),
        "vae": convert_diffusers(source.vae.state_dict(), vae),
    }
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    pipeline.save_pretrained(folder, params=params)
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Leave out of the configurations what depends on the machine that wrote them."""
    for file in folder.glob("*/*config.json"):
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
