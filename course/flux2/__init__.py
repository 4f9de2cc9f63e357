"""FLUX.2-klein in plain JAX: functions of dictionaries of parameters."""

from course.flux2 import training
from course.flux2.configs import Config, TextConfig, TransformerConfig, VAEConfig, read_config
from course.flux2.convert import read_single_file, to_single_files
from course.flux2.folders import load, load_tokenizer, read_files, save
from course.flux2.heads import sort_columns, split_heads
from course.flux2.in_turn import generate_in_turn
from course.flux2.lora import read_lora, save_lora
from course.flux2.parameters import (
    FULLY_SHARDED,
    TENSOR_PARALLEL,
    model_parameters,
    parameter_shapes,
    shardings,
)
from course.flux2.pipeline import (
    STATIC,
    denoise,
    encode_images,
    encode_prompts,
    generate,
    make_drawing,
    positions,
    random_tokens,
    size_in_tokens,
    text_positions,
)
from course.flux2.sampler import euler, follow_map, shift_by_size, times
from course.flux2.sequence import keep_tokens, split_tokens
from course.flux2.transformer import velocity
from course.flux2.vae import decode
from course.model.guidance import is_guided
from course.model.sharding import DATA_PARALLEL

__all__ = [
    "DATA_PARALLEL",
    "FULLY_SHARDED",
    "STATIC",
    "TENSOR_PARALLEL",
    "Config",
    "TextConfig",
    "TransformerConfig",
    "VAEConfig",
    "decode",
    "denoise",
    "encode_images",
    "encode_prompts",
    "euler",
    "follow_map",
    "generate",
    "generate_in_turn",
    "is_guided",
    "keep_tokens",
    "load",
    "load_tokenizer",
    "make_drawing",
    "model_parameters",
    "parameter_shapes",
    "positions",
    "random_tokens",
    "read_config",
    "read_files",
    "read_lora",
    "read_single_file",
    "save",
    "save_lora",
    "shardings",
    "shift_by_size",
    "size_in_tokens",
    "sort_columns",
    "split_heads",
    "split_tokens",
    "text_positions",
    "times",
    "to_single_files",
    "training",
    "velocity",
]
