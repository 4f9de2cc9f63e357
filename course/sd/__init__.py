"""Stable Diffusion 1, 2 and XL in plain JAX: functions of dictionaries of parameters."""

from course.model.attention import ATTENTION
from course.model.guidance import is_guided
from course.model.sharding import DATA_PARALLEL, FULLY_SHARDED, TENSOR_PARALLEL
from course.sd import training
from course.sd.configs import (
    Config,
    ScheduleConfig,
    TextConfig,
    UNetConfig,
    VAEConfig,
    read_config,
)
from course.sd.convert import read_single_file, to_single_files
from course.sd.folders import load, load_tokenizer, read_files, save
from course.sd.lora import read_lora, save_lora
from course.sd.parameters import model_parameters, parameter_shapes, shardings
from course.sd.pipeline import (
    STATIC,
    denoise_step,
    encode_condition,
    encode_prompts,
    generate,
    make_drawing,
)
from course.sd.samplers import SAMPLERS
from course.sd.sequence import split_pixels

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
    "is_guided",
    "load",
    "load_tokenizer",
    "make_drawing",
    "model_parameters",
    "parameter_shapes",
    "read_config",
    "read_files",
    "read_lora",
    "read_single_file",
    "save",
    "save_lora",
    "shardings",
    "split_pixels",
    "to_single_files",
    "training",
]
