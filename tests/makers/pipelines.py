"""diffusers' pipelines on PyTorch, and what else the makers share that need PyTorch."""

import argparse
import json
import os
from pathlib import Path
from types import ModuleType

os.environ["USE_FLAX"] = "0"
import diffusers
import numpy as np
import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from course.model.files import read_part, to_channels_first
from tests.makers.common import (
    CHECKPOINTS,
    FIXTURES,
    GUIDANCE,
    made_up,
    made_up_input,
    to_16_bits,
)

MODULES = {
    "unet": diffusers.UNet2DConditionModel,
    "vae": diffusers.AutoencoderKL,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}
diffusers.logging.set_verbosity_error()


def read_configurations(folder: Path) -> dict[str, dict]:
    """The configurations of a folder's parts, as their files have them."""
    found = {}
    for file in sorted(folder.glob("*/config.json")):
        found[file.parent.name] = json.loads(file.read_text())
    return found


def build_module(part: str, options: dict) -> torch.nn.Module:
    """The module of a part with its first numbers, from the configuration for PyTorch or Flax."""
    if part.startswith("text_encoder"):
        return MODULES[part](CLIPTextConfig(**options))
    return MODULES[part](**without_flax(options))


def without_flax(options: dict) -> dict:
    """Those options of a configuration that PyTorch's class has, too."""
    flax_only = ("split_head_dim", "use_memory_efficient_attention")
    return {
        name: value
        for name, value in options.items()
        if name not in flax_only and not name.startswith("_")
    }


def build_pipeline(name: str) -> diffusers.DiffusionPipeline:
    """The pipeline of a bundled checkpoint, with DDIM for its scheduler."""
    folder = CHECKPOINTS / name
    modules = {}
    for part, options in read_configurations(folder).items():
        module = build_module(part, options)
        parameters = {}
        for key, value in read_part(folder / part).items():
            parameters[key] = torch.from_numpy(to_channels_first(key, value))
        module.load_state_dict(parameters)
        modules[part] = module.eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    schedule = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    schedule = without_flax(schedule) | {
        "clip_sample": False,
        "skip_prk_steps": True,
        "set_alpha_to_one": True,
        "steps_offset": 1,
        "timestep_spacing": "leading",
    }
    scheduler = diffusers.DDIMScheduler.from_config(schedule)
    if "text_encoder_2" in modules:
        pipeline = diffusers.StableDiffusionXLPipeline(
            **modules,
            tokenizer=tokenizer,
            tokenizer_2=tokenizer,
            scheduler=scheduler,
            add_watermarker=False,
        )
    else:
        pipeline = diffusers.StableDiffusionPipeline(
            **modules,
            tokenizer=tokenizer,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def draw(
    pipeline: diffusers.DiffusionPipeline, prompts: list[str], latents: np.ndarray, steps: int
) -> np.ndarray:
    """Images of prompts, 16 bits for each number."""
    images = pipeline(
        prompts,
        latents=torch.from_numpy(latents),
        num_inference_steps=steps,
        guidance_scale=GUIDANCE,
        output_type="np",
    ).images
    return to_16_bits(images)


def fill(module: torch.nn.Module) -> torch.nn.Module:
    """Give a module made-up parameters. What it has besides, such as statistics, stays."""
    for name, parameter in module.named_parameters():
        parameter.data = torch.from_numpy(made_up(name, tuple(parameter.shape)))
    return module.eval()


def given(name: str, *shape: int) -> torch.Tensor:
    """A made-up input."""
    return torch.from_numpy(made_up_input(name, *shape))


def folder_to_write(about: str) -> Path:
    """Where a maker's command is to write its fixtures."""
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    return parser.parse_args().folder


def versions(*modules: ModuleType) -> dict[str, str]:
    """The versions of what made a fixture, to be kept in it."""
    return {module.__name__: module.__version__ for module in modules}
