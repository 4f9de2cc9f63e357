"""From the trained PyTorch modules to the checkpoint that ships, in Flax's format."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from diffusers import (
    AutoencoderKL,
    FlaxAutoencoderKL,
    FlaxDDIMScheduler,
    FlaxEulerDiscreteScheduler,
    FlaxStableDiffusionPipeline,
    FlaxStableDiffusionXLPipeline,
    FlaxUNet2DConditionModel,
)
from diffusers.models.modeling_flax_pytorch_utils import (
    convert_pytorch_state_dict_to_flax as convert_diffusers,
)
from torch import nn
from transformers import CLIPTokenizer, FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from transformers.modeling_flax_pytorch_utils import (
    convert_pytorch_state_dict_to_flax as convert_transformers,
)

from training import autoencoder, sd, sdxl

TEXT_ENCODERS = {
    "text_encoder": FlaxCLIPTextModel,
    "text_encoder_2": FlaxCLIPTextModelWithProjection,
}


def to_flax(
    vae: AutoencoderKL,
    parts: nn.ModuleDict,
    tokenizer: CLIPTokenizer,
    folder: Path,
) -> None:
    """Write the Flax pipeline for these parts, with its parameters in float32.

    Other files of the folder, such as a card, stay what they are.
    """
    is_xl = "text_encoder_2" in parts
    unet_config = sdxl.UNET_CONFIG if is_xl else sd.UNET_CONFIG
    modules = {
        "vae": FlaxAutoencoderKL(**autoencoder.CONFIG),
        "unet": FlaxUNet2DConditionModel(**unet_config),
    }
    params = {
        "vae": convert_diffusers(vae.state_dict(), modules["vae"]),
        "unet": convert_diffusers(parts["unet"].state_dict(), modules["unet"]),
    }
    for name in parts.keys() - {"unet"}:
        modules[name] = TEXT_ENCODERS[name](parts[name].config)
        params[name] = convert_transformers(parts[name].state_dict(), modules[name])

    if is_xl:
        pipeline = FlaxStableDiffusionXLPipeline(
            **modules,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            scheduler=FlaxEulerDiscreteScheduler(**sdxl.SCHEDULER_CONFIG),
        )
    else:
        pipeline = FlaxStableDiffusionPipeline(
            **modules,
            tokenizer=tokenizer,
            scheduler=FlaxDDIMScheduler(**sd.SCHEDULER_CONFIG),
            safety_checker=None,
            feature_extractor=None,
        )
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    pipeline.save_pretrained(folder, params=params)
    _tidy(folder)


def _tidy(folder: Path) -> None:
    """Leave out of the configurations what depends on the machine that wrote them."""
    for file in folder.glob("*/*config.json"):
        config = json.loads(file.read_text())
        config.pop("_name_or_path", None)
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
