"""What the configuration files of diffusers and transformers say, with their defaults, as far as this model reads it.

The classes are frozen, so that a configuration can be a static argument of ``jax.jit``.
"""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path


@dataclass(frozen=True)
class TextConfig:
    """transformers' ``CLIPTextConfig``."""

    vocab_size: int = 49408
    hidden_size: int = 512
    intermediate_size: int = 2048
    projection_dim: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    eos_token_id: int = 49407
    projects: bool = False  # whether the class is CLIPTextModelWithProjection


@dataclass(frozen=True)
class UNetConfig:
    """diffusers' ``UNet2DConditionModel``."""

    sample_size: int = 64
    in_channels: int = 4
    out_channels: int = 4
    down_block_types: tuple[str, ...] = ("CrossAttnDownBlock2D",) * 3 + ("DownBlock2D",)
    up_block_types: tuple[str, ...] = ("UpBlock2D",) + ("CrossAttnUpBlock2D",) * 3
    block_out_channels: tuple[int, ...] = (320, 640, 1280, 1280)
    layers_per_block: int = 2
    norm_num_groups: int = 32
    norm_eps: float = 1e-5
    cross_attention_dim: int = 1280
    transformer_layers_per_block: int | tuple[int, ...] = 1
    attention_head_dim: int | tuple[int, ...] = 8  # in spite of its name, how many heads there are
    use_linear_projection: bool = False
    upcast_attention: bool = False
    addition_embed_type: str | None = None  # "text_time" for Stable Diffusion XL
    addition_time_embed_dim: int | None = None

    def at_level(self, name: str, level: int) -> int:
        """An option that has one value for all levels, or one for each."""
        value = getattr(self, name)
        return value[level] if isinstance(value, tuple) else value


@dataclass(frozen=True)
class VAEConfig:
    """diffusers' ``AutoencoderKL``."""

    in_channels: int = 3
    out_channels: int = 3
    block_out_channels: tuple[int, ...] = (64,)
    layers_per_block: int = 1
    latent_channels: int = 4
    norm_num_groups: int = 32
    scaling_factor: float = 0.18215


@dataclass(frozen=True)
class ScheduleConfig:
    """What diffusers' schedulers have in common, and which of them is meant."""

    sampler: str
    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True


@dataclass(frozen=True)
class Config:
    """All of a model."""

    text: tuple[TextConfig, ...]  # one text encoder, or the two of Stable Diffusion XL
    unet: UNetConfig
    vae: VAEConfig
    schedule: ScheduleConfig

    @property
    def is_xl(self) -> bool:
        return self.unet.addition_embed_type is not None

    @property
    def pixels_per_latent(self) -> int:
        return 2 ** (len(self.vae.block_out_channels) - 1)


# fmt: off
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")
# Each class that a file can be for, what it is read into, and what it takes for granted.
CLASSES = {
    "CLIPTextModel": (TextConfig, {}),
    "CLIPTextModelWithProjection": (TextConfig, {"projects": True}),
    "UNet2DConditionModel": (UNetConfig, {}),
    "AutoencoderKL": (VAEConfig, {}),
    "DDIMScheduler": (ScheduleConfig, {"sampler": "ddim", "clip_sample": True}),
    "PNDMScheduler": (ScheduleConfig, {"sampler": "pndm", "skip_prk_steps": False, "set_alpha_to_one": False}),
    "EulerDiscreteScheduler": (ScheduleConfig, {"sampler": "euler", "timestep_spacing": "linspace"}),
    "FlaxEulerDiscreteScheduler": (  # the offset is not an option there
        ScheduleConfig, {"sampler": "euler", "timestep_spacing": "linspace", "steps_offset": 1}),
    "DPMSolverMultistepScheduler": (ScheduleConfig, {"sampler": "dpm++", "timestep_spacing": "linspace"}),
}
ALLOWED = {
    "act_fn": ("silu",), "addition_embed_type": (None, "text_time"), "algorithm_type": ("dpmsolver++",),
    "attention_type": ("default",), "beta_schedule": ("linear", "scaled_linear"), "clip_sample": (False,),
    "conv_in_kernel": (3,), "conv_out_kernel": (3,), "downsample_padding": (1,), "final_sigmas_type": ("zero",),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownEncoderBlock2D"), "flip_sin_to_cos": (True,),
    "freq_shift": (0,), "hidden_act": ("quick_gelu", "gelu"), "interpolation_type": ("linear",),
    "lambda_min_clipped": (-math.inf,), "lower_order_final": (True,), "mid_block_add_attention": (True,),
    "mid_block_scale_factor": (1,), "mid_block_type": ("UNetMidBlock2DCrossAttn",), "model_type": ("clip_text_model",),
    "prediction_type": ("epsilon", "v_prediction"), "resnet_out_scale_factor": (1,), "skip_prk_steps": (True,),
    "resnet_time_scale_shift": ("default",), "solver_order": (2,), "solver_type": ("midpoint",),
    "time_embedding_type": ("positional",), "timestep_spacing": ("leading", "linspace", "trailing"),
    "timestep_type": ("discrete",), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpDecoderBlock2D"),
    "use_post_quant_conv": (True,), "use_quant_conv": (True,),
}
# Those that matter in training only, that follow from others, or that go with one that is switched off.
NO_DIFFERENCE = {
    "addition_embed_type_num_heads", "architectures", "attention_dropout", "bos_token_id", "clip_sample_range",
    "dropout", "dtype", "dynamic_thresholding_ratio", "flow_shift", "force_upcast", "initializer_factor",
    "initializer_range", "pad_token_id", "projection_class_embeddings_input_dim", "sample_max_value", "sample_size",
    "split_head_dim", "time_shift_type", "torch_dtype", "transformers_version", "use_memory_efficient_attention",
}
# fmt: on


def read_class(options: dict, kind: str, where: str):
    """What a file's options mean for a class, with or without "Flax" in front of its name.

    Raises ``ValueError`` if the class is unknown, or an option asks for something that this model does not have.
    """
    kind = kind if kind in CLASSES else kind.removeprefix("Flax")
    if kind not in CLASSES:
        raise ValueError(f"{where} is for {kind}, which this model does not have: choose one of {', '.join(CLASSES)}.")
    config, granted = CLASSES[kind]
    types = {field.name: str(field.type) for field in fields(config)}
    found = {}
    for name, value in (granted | options).items():
        values, allowed = value if isinstance(value, list) else [value], ALLOWED.get(name)
        off = value is None or value is False  # an unknown option that is switched off asks for nothing
        known = allowed or name in types or name in NO_DIFFERENCE or name.startswith("_") or off
        fits = not isinstance(value, list) or "tuple" in types.get(name, "tuple")
        if not (known and fits and set(values) <= set(allowed or values)):
            had = f": it has {' and '.join(map(repr, allowed))}" if allowed else ""
            raise ValueError(f"{where} asks for {name} = {value!r}, which this model does not have{had}.")
        if name in types:
            found[name] = tuple(value) if isinstance(value, list) else value
    return config(**found)


def read_config(folder: str | Path) -> Config:
    """Read the configuration files of a folder in diffusers' format; errors are those of ``read_class``."""
    folder = Path(folder)
    index = json.loads((folder / "model_index.json").read_text())
    if (pipeline := index["_class_name"]).removeprefix("Flax") not in PIPELINES:
        raise ValueError(f"{folder} is for {pipeline}: this model reads folders for {' and '.join(PIPELINES)}.")

    def part(name: str, file: str = "config.json"):
        return read_class(json.loads((folder / name / file).read_text()), index[name][1], f"{name}/{file}")

    encoders = tuple(part(name) for name in ("text_encoder", "text_encoder_2") if name in index)
    return Config(encoders, part("unet"), part("vae"), part("scheduler", "scheduler_config.json"))
