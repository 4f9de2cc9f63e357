"""What the tests and the makers of their fixtures have in common. It needs no PyTorch."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np

from course.sd import Config, ScheduleConfig
from course.sd.configs import read_class

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
CHECKPOINTS = ROOT / "checkpoints"

PROMPTS = ["a small red heart on a white background", "a large blue star on a yellow background"]
GUIDANCE = 3.0
STEPS = {"ddim": 30, "euler": 30, "dpm++": 15, "pndm": 15}

# diffusers' classes and transformers', by our names.
SCHEDULERS = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "pndm": "PNDMScheduler",
}
PARTS = {
    "unet": "UNet2DConditionModel",
    "vae": "AutoencoderKL",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
}

# With what schedulers are compared.
SPACINGS = ("leading", "linspace", "trailing")
PREDICTIONS = ("epsilon", "v_prediction")
COUNTS = (1, 2, 5, 13, 50)  # of steps

# Stable Diffusion 2.1 for 768 x 768 pixels, as its files on the Hub had it.
SD21 = {
    "unet": {
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": [5, 10, 20, 20],
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 1024,
        "down_block_types": [
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "CrossAttnDownBlock2D",
            "DownBlock2D",
        ],
        "up_block_types": [
            "UpBlock2D",
            "CrossAttnUpBlock2D",
            "CrossAttnUpBlock2D",
            "CrossAttnUpBlock2D",
        ],
        "dual_cross_attention": False,
        "sample_size": 96,
        "upcast_attention": True,
        "use_linear_projection": True,
    },
    "text_encoder": {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "model_type": "clip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 23,
        "pad_token_id": 1,
        "projection_dim": 512,
        "vocab_size": 49408,
    },
}

# Small modules that have what the bundled checkpoints do not: several depths and numbers of heads,
# an end token that the configuration does not know, plain GELU, two residual blocks, more than one
# level without attention.
SMALL_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "projection_dim": 24,
    "eos_token_id": 2,
}
SMALL_UNETS = {
    "sd2": {
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "block_out_channels": [16, 24],
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "attention_head_dim": [2, 3],
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "sdxl": {
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "block_out_channels": [16, 24, 32],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 1, 2],
        "attention_head_dim": [2, 3, 4],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 24,
    },
}
SMALL_VAE = {
    "block_out_channels": [16, 24],
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "scaling_factor": 0.5,
}
SIZES = [64, 96, 0, 8, 64, 96]  # of an image, as Stable Diffusion XL is told them


def made_up(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter that follows from its name and its shape in PyTorch, so that none is kept."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) > 1:
        return values / np.sqrt(np.prod(shape[1:]), dtype=np.float32)
    return (name.endswith("weight") + values / 10).astype(np.float32)


def made_up_input(name: str, *shape: int) -> np.ndarray:
    """An input that follows from its name and shape."""
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)


def stand_in(x, timestep):
    """A smooth function of arrays, NumPy's or PyTorch's, which schedulers get for a model."""
    return 0.3 * x + 0.0004 * timestep * (1 - x * x / (1 + x * x))


def schedule_options(spacing: str, prediction: str) -> dict:
    """The configuration of a scheduler."""
    return {
        "beta_start": 0.00085,
        "beta_end": 0.012,
        "beta_schedule": "scaled_linear",
        "steps_offset": 1,
        "timestep_spacing": spacing,
        "prediction_type": prediction,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "clip_sample": False,
    }


def read_model(configurations: dict[str, dict]) -> Config:
    """Our configuration of a model, from those of its parts."""
    found = {}
    for part, options in configurations.items():
        found[part] = read_class(options, PARTS[part], part)
    encoders = [found["text_encoder"]]
    if "text_encoder_2" in found:
        encoders.append(found["text_encoder_2"])
    return Config(tuple(encoders), found["unet"], found["vae"], ScheduleConfig("ddim"))


def write_json(file: Path, versions: dict, models: dict) -> None:
    """Write a fixture, whose bytes depend on nothing but what is in it."""
    text = json.dumps({"versions": versions, "models": models}, separators=(",", ":"))
    with gzip.GzipFile(file, "wb", mtime=0) as opened:
        opened.write(text.encode())


def read_json(name: str) -> dict:
    """What is in one of the fixtures that ``write_json`` wrote, by model."""
    return json.loads(gzip.decompress((FIXTURES / f"{name}.json.gz").read_bytes()))["models"]


def to_16_bits(images: np.ndarray) -> np.ndarray:
    """Images from 0 to 1 as whole numbers, whose step is 0.004 of 255."""
    return np.round(images * 65535).astype(np.uint16)
