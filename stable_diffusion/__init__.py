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
from stable_diffusion.parameters import (
    DATA_PARALLEL,
    FULLY_SHARDED,
    TENSOR_PARALLEL,
    model_parameters,
    parameter_shapes,
    shardings,
)
from stable_diffusion.pipeline import (
    STATIC,
    denoise_step,
    encode_condition,
    encode_prompts,
    generate,
)
from stable_diffusion.samplers import SAMPLERS
from stable_diffusion.weights import load

__all__ = [
    "ATTENTION",
    "DATA_PARALLEL",
    "FULLY_SHARDED",
    "SAMPLERS",
    "STATIC",
    "TENSOR_PARALLEL",
    "Config",
    "ScheduleConfig",
    "TextConfig",
    "UNetConfig",
    "VAEConfig",
    "denoise_step",
    "encode_condition",
    "encode_prompts",
    "generate",
    "load",
    "model_parameters",
    "parameter_shapes",
    "read_config",
    "shardings",
]
