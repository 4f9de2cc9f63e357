"""The configuration files of diffusers and transformers, as far as this model reads them.

Each class has the options of one of theirs, by the same names and with the same defaults. They are
frozen, so that a configuration can be a static argument of ``jax.jit``.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints


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
    attention_head_dim: int | tuple[int, ...] = 8  # how many heads there are, in spite of its name
    use_linear_projection: bool = False
    upcast_attention: bool = False
    addition_embed_type: str | None = None  # "text_time" for Stable Diffusion XL
    addition_time_embed_dim: int | None = None
    projection_class_embeddings_input_dim: int | None = None  # channels of all that XL adds

    def heads(self, level: int) -> int:
        """How many heads the attention of a level has."""
        return _at_level(self.attention_head_dim, level)

    def depth(self, level: int) -> int:
        """How many layers each transformer of a level has."""
        return _at_level(self.transformer_layers_per_block, level)


def _at_level(option: int | tuple[int, ...], level: int) -> int:
    """The value of an option that has one value for all levels, or one for each."""
    if isinstance(option, tuple):
        return option[level]
    return option


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
    """What diffusers' schedulers have in common."""

    sampler: str  # a name from ``stable_diffusion.SAMPLERS``
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
    """The configuration of a whole model."""

    text: tuple[TextConfig, ...]  # one text encoder, or the two of Stable Diffusion XL
    unet: UNetConfig
    vae: VAEConfig
    schedule: ScheduleConfig

    @property
    def is_xl(self) -> bool:
        """Whether the UNet is told sizes and a vector of the whole prompt, as that of XL is."""
        return self.unet.addition_embed_type is not None

    @property
    def pixels_per_latent(self) -> int:
        """How many pixels of an image one latent stands for, in each direction."""
        return 2 ** (len(self.vae.block_out_channels) - 1)

    @property
    def side_multiple(self) -> int:
        """Sides of images are multiples of so many pixels, so that the UNet can halve them."""
        return self.pixels_per_latent * 2 ** (len(self.unet.block_out_channels) - 1)


PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")

# For each class that a file can be for: what it is read into, and the class's defaults where they
# differ from ours.
CLASSES = {
    "CLIPTextModel": (TextConfig, {}),
    "CLIPTextModelWithProjection": (TextConfig, {"projects": True}),
    "UNet2DConditionModel": (UNetConfig, {}),
    "AutoencoderKL": (VAEConfig, {}),
    "DDIMScheduler": (ScheduleConfig, {"sampler": "ddim", "clip_sample": True}),
    "PNDMScheduler": (
        ScheduleConfig,
        {"sampler": "pndm", "skip_prk_steps": False, "set_alpha_to_one": False},
    ),
    "EulerDiscreteScheduler": (
        ScheduleConfig,
        {"sampler": "euler", "timestep_spacing": "linspace"},
    ),
    "FlaxEulerDiscreteScheduler": (  # its offset is no option
        ScheduleConfig,
        {"sampler": "euler", "timestep_spacing": "linspace", "steps_offset": 1},
    ),
    "DPMSolverMultistepScheduler": (
        ScheduleConfig,
        {"sampler": "dpm++", "timestep_spacing": "linspace"},
    ),
}

# The values that this model has for an option. If the option is a list, each of its values is one
# of these.
ALLOWED = {
    "act_fn": ("silu",),
    "addition_embed_type": (None, "text_time"),
    "algorithm_type": ("dpmsolver++",),
    "attention_type": ("default",),
    "beta_schedule": ("linear", "scaled_linear"),
    "clip_sample": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownEncoderBlock2D"),
    "downsample_padding": (1,),
    "final_sigmas_type": ("zero",),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "hidden_act": ("quick_gelu", "gelu"),
    "interpolation_type": ("linear",),
    "lambda_min_clipped": (-math.inf,),
    "lower_order_final": (True,),
    "mid_block_add_attention": (True,),
    "mid_block_scale_factor": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "model_type": ("clip_text_model",),
    "prediction_type": ("epsilon", "v_prediction"),
    "resnet_out_scale_factor": (1,),
    "resnet_time_scale_shift": ("default",),
    "skip_prk_steps": (True,),
    "solver_order": (2,),
    "solver_type": ("midpoint",),
    "time_embedding_type": ("positional",),
    "timestep_spacing": ("leading", "linspace", "trailing"),
    "timestep_type": ("discrete",),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D", "UpDecoderBlock2D"),
    "use_post_quant_conv": (True,),
    "use_quant_conv": (True,),
}

# Options that change nothing here: they matter in training only, follow from others, or go with one
# that is switched off.
NO_DIFFERENCE = {
    "addition_embed_type_num_heads",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "clip_sample_range",
    "dropout",
    "dtype",
    "dynamic_thresholding_ratio",
    "flow_shift",
    "force_upcast",
    "initializer_factor",
    "initializer_range",
    "pad_token_id",
    "sample_max_value",
    "sample_size",
    "split_head_dim",
    "time_shift_type",
    "torch_dtype",
    "transformers_version",
    "use_memory_efficient_attention",
}


def read_class(options: dict, kind: str, where: str) -> Any:
    """Read the options that a file has for a class.

    Parameters
    ----------
    options : dict
        As the file has them.
    kind : str
        A key of ``CLASSES``, with or without "Flax" in front.
    where : str
        The file, for messages.

    Returns
    -------
    TextConfig, UNetConfig, VAEConfig or ScheduleConfig

    Raises
    ------
    ValueError
        If the class is unknown, or an option asks for something that this model does not have.
    """
    if kind not in CLASSES:
        kind = kind.removeprefix("Flax")
    if kind not in CLASSES:
        names = ", ".join(CLASSES)
        raise ValueError(
            f"{where} is for {kind}, which this model does not have: choose one of {names}."
        )
    config, defaults = CLASSES[kind]
    types = get_type_hints(config)
    known = {}
    for name, value in (defaults | options).items():
        if not _is_possible(name, value, types):
            message = f"{where} asks for {name} = {value!r}, which this model does not have"
            if name in ALLOWED:
                message += f": it has {' and '.join(map(repr, ALLOWED[name]))}"
            raise ValueError(f"{message}.")
        if name in types:
            known[name] = tuple(value) if isinstance(value, list) else value
    return config(**known)


def _is_possible(name: str, value: Any, types: dict[str, Any]) -> bool:
    """Whether this model has an option with this value; ``types`` are those of what it reads."""
    if name in types and isinstance(value, list) and not _may_be_tuple(types[name]):
        return False
    if name in ALLOWED:
        values = value if isinstance(value, list) else [value]
        return all(each in ALLOWED[name] for each in values)
    if name in types or name in NO_DIFFERENCE or name.startswith("_"):
        return True
    return value is None or value is False  # unknown, but switched off


def _may_be_tuple(annotation: Any) -> bool:
    """Whether a type is a tuple, or a union of which one is."""
    return any(get_origin(kind) is tuple for kind in (annotation, *get_args(annotation)))


def read_config(folder: str | Path) -> Config:
    """Read the configuration files of a folder in diffusers' format.

    Raises
    ------
    ValueError
        If the folder is for a different pipeline, lacks a text encoder, or as for ``read_class``.
    """
    folder = Path(folder)
    index = json.loads((folder / "model_index.json").read_text())
    pipeline = index["_class_name"]
    if pipeline.removeprefix("Flax") not in PIPELINES:
        raise ValueError(
            f"{folder} is for {pipeline}: this model reads folders for {' and '.join(PIPELINES)}."
        )

    def read_part(name: str, file: str = "config.json") -> Any:
        options = json.loads((folder / name / file).read_text())
        _, kind = index[name]  # the library and the class
        return read_class(options, kind, f"{name}/{file}")

    encoders = [read_part("text_encoder")]
    if "text_encoder_2" in index:
        encoders.append(read_part("text_encoder_2"))
    unet = read_part("unet")
    if unet.addition_embed_type is not None and len(encoders) != 2:
        raise ValueError(
            f"{folder} is not a whole folder: its UNet is that of Stable Diffusion XL, and there "
            "is no text_encoder_2. Download it again."
        )
    return Config(
        text=tuple(encoders),
        unet=unet,
        vae=read_part("vae"),
        schedule=read_part("scheduler", "scheduler_config.json"),
    )
