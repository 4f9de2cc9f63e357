"""Stable Diffusion 1, 2 and XL in plain JAX: functions of dictionaries of parameters."""

from stable_diffusion.attention import ATTENTION
from stable_diffusion.configs import (
    Config,
    ScheduleConfig,
    TextConfig,
    UNetConfig,
    VAEConfig,
    read_config,
)
from stable_diffusion.pipeline import STATIC, encode_prompts, generate
from stable_diffusion.samplers import SAMPLERS
from stable_diffusion.weights import load, parameter_shapes

__all__ = [
    "ATTENTION",
    "SAMPLERS",
    "STATIC",
    "Config",
    "ScheduleConfig",
    "TextConfig",
    "UNetConfig",
    "VAEConfig",
    "encode_prompts",
    "generate",
    "load",
    "parameter_shapes",
    "read_config",
]
