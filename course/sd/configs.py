"""The configuration files of diffusers and transformers, as far as this model reads them.

Each class has the options of one of theirs, by the same names and with the same defaults. They are
frozen, so that a configuration can be a static argument of ``jax.jit``.
"""

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from course.model.autoencoder import AutoencoderConfig
from course.model.configs import check_parts_fit, part_class, read_options
from course.model.files import find_inside, read_json


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
        """Return how many heads the attention of a level has."""
        return _at_level(self.attention_head_dim, level)

    def depth(self, level: int) -> int:
        """Return how many layers each transformer of a level has."""
        return _at_level(self.transformer_layers_per_block, level)


def _at_level(option: int | tuple[int, ...], level: int) -> int:
    """Return the value of an option that has one value for all levels, or one for each."""
    if isinstance(option, tuple):
        return option[level]
    return option


@dataclass(frozen=True)
class VAEConfig(AutoencoderConfig):
    """diffusers' ``AutoencoderKL``."""

    scaling_factor: float = 0.18215


@dataclass(frozen=True)
class ScheduleConfig:
    """What diffusers' schedulers have in common."""

    sampler: str  # a name from ``course.sd.SAMPLERS``
    num_train_timesteps: int = 1000
    beta_start: float = 0.0001
    beta_end: float = 0.02
    beta_schedule: str = "linear"
    prediction_type: str = "epsilon"
    timestep_spacing: str = "leading"
    steps_offset: int = 0
    set_alpha_to_one: bool = True
    # Whether the noisiest timestep is nothing but noise (zero terminal SNR): Lin et al., 2023.
    rescale_betas_zero_snr: bool = False


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
    def side(self) -> int:
        """Height and width of the images that the model was trained for, in pixels."""
        return self.unet.sample_size * self.pixels_per_latent

    @property
    def side_multiple(self) -> int:
        """Sides of images are multiples of so many pixels, so that the UNet can halve them."""
        return self.pixels_per_latent * 2 ** (len(self.unet.block_out_channels) - 1)


INPAINTING = (
    "its UNet reads a picture and a mask beside the latents, which this one does not. Take the "
    "model that it was made of: course.sd.edit fills in what a mask leaves free with any "
    "of them."
)
PIPELINES = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")

# For each class of a part: what it is read into, and the class's defaults where they differ.
CLASSES = {
    "CLIPTextModel": (TextConfig, {}),
    "CLIPTextModelWithProjection": (TextConfig, {"projects": True}),
    "UNet2DConditionModel": (UNetConfig, {}),
    "AutoencoderKL": (VAEConfig, {}),
}


class Scheduler(NamedTuple):
    """What a scheduler of diffusers is here.

    A scheduler only says in which steps a model is asked, so any sampler draws with any model.
    """

    sampler: str  # which draws as it does, or which is the nearest
    defaults: dict  # of the class, where they differ from those of ``ScheduleConfig``
    is_nearest: bool = False
    begins_at_noise: bool = False  # whether the class in diffusers can begin at pure noise


LINSPACE = {"timestep_spacing": "linspace"}
SCALED = LINSPACE | {"beta_start": 0.00085, "beta_end": 0.012}
OF_LCM = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SCHEDULERS = {
    "DDIMScheduler": Scheduler("ddim", {"clip_sample": True}, begins_at_noise=True),
    "DDPMScheduler": Scheduler("ddim", {"clip_sample": True}, is_nearest=True),
    "LCMScheduler": Scheduler("ddim", OF_LCM, is_nearest=True),
    "TCDScheduler": Scheduler("ddim", OF_LCM, is_nearest=True),
    "PNDMScheduler": Scheduler("pndm", {"set_alpha_to_one": False}),
    "EulerDiscreteScheduler": Scheduler("euler", LINSPACE, begins_at_noise=True),
    # Its offset is no option.
    "FlaxEulerDiscreteScheduler": Scheduler("euler", LINSPACE | {"steps_offset": 1}),
    "DPMSolverMultistepScheduler": Scheduler("dpm++", LINSPACE, begins_at_noise=True),
    "DEISMultistepScheduler": Scheduler("dpm++", LINSPACE, is_nearest=True),
    "DPMSolverSDEScheduler": Scheduler("dpm++", SCALED, is_nearest=True),
    "DPMSolverSinglestepScheduler": Scheduler("dpm++", LINSPACE, is_nearest=True),
    "EulerAncestralDiscreteScheduler": Scheduler(
        "euler", LINSPACE, is_nearest=True, begins_at_noise=True
    ),
    "HeunDiscreteScheduler": Scheduler("euler", SCALED, is_nearest=True),
    "KDPM2AncestralDiscreteScheduler": Scheduler("dpm++", SCALED, is_nearest=True),
    "KDPM2DiscreteScheduler": Scheduler("dpm++", SCALED, is_nearest=True),
    "LMSDiscreteScheduler": Scheduler("euler", LINSPACE, is_nearest=True),
    "UniPCMultistepScheduler": Scheduler("dpm++", LINSPACE, is_nearest=True, begins_at_noise=True),
}

# Options of schedulers that say how steps are taken, and not what the model was trained for, by
# samplers. If they ask for something else than this, there is a warning, and steps are taken in
# this way. A file may have those of other schedulers, too, which diffusers does not look at.
SIGMAS = {
    "final_sigmas_type": "zero",
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
STEPS_ONLY = {
    "ddim": {"thresholding": False},
    "pndm": {"skip_prk_steps": True},
    "euler": SIGMAS | {"interpolation_type": "linear", "timestep_type": "discrete"},
    "dpm++": SIGMAS
    | {
        "algorithm_type": "dpmsolver++",
        "euler_at_final": False,
        "lambda_min_clipped": -math.inf,
        "lower_order_final": True,
        "solver_order": 2,
        "solver_type": "midpoint",
        "thresholding": False,
        "use_lu_lambdas": False,
    },
}

# The values that this model has for an option. If the option is a list, each of its values is one
# of these.
ALLOWED = {
    "act_fn": ("silu",),
    "addition_embed_type": (None, "text_time"),
    "attention_type": ("default",),
    "beta_schedule": ("linear", "scaled_linear"),
    "clip_sample": (False,),
    "conv_in_kernel": (3,),
    "conv_out_kernel": (3,),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "DownEncoderBlock2D"),
    "downsample_padding": (1,),
    "flip_sin_to_cos": (True,),
    "freq_shift": (0,),
    "hidden_act": ("quick_gelu", "gelu"),
    "mid_block_add_attention": (True,),
    "mid_block_scale_factor": (1,),
    "mid_block_type": ("UNetMidBlock2DCrossAttn",),
    "model_type": ("clip_text_model",),
    "prediction_type": ("epsilon", "v_prediction"),
    "resnet_out_scale_factor": (1,),
    "resnet_time_scale_shift": ("default",),
    "time_embedding_type": ("positional",),
    "timestep_spacing": ("leading", "linspace", "trailing"),
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
    "corrector_order",
    "disable_corrector",
    "dropout",
    "dtype",
    "dynamic_thresholding_ratio",
    "flow_shift",
    "force_upcast",
    "initializer_factor",
    "initializer_range",
    "noise_sampler_seed",
    "original_inference_steps",
    "pad_token_id",
    "predict_x0",
    "predictor_order",
    "rho",
    "sample_max_value",
    "sample_size",
    "sigma_data",
    "sigma_max",
    "sigma_min",
    "sigma_schedule",
    "solver_p",
    "split_head_dim",
    "time_shift_type",
    "timestep_scaling",
    "torch_dtype",
    "transformers_version",
    "use_memory_efficient_attention",
    "variance_type",
}


def read_class(options: dict, kind: str, where: str | Path) -> Any:
    """Read the options that a file has for a class.

    Parameters
    ----------
    options : dict
        As the file has them.
    kind : str
        A key of ``CLASSES`` or ``SCHEDULERS``, with or without "Flax" in front.
    where : str or Path
        The file, for messages.

    Returns
    -------
    TextConfig, UNetConfig, VAEConfig or ScheduleConfig

    Raises
    ------
    ValueError
        If the class is unknown, or an option asks for something that this model does not have.

    Warns
    -----
    UserWarning
        If a scheduler has no sampler here, and the nearest one draws in its place.
    """
    known = CLASSES.keys() | SCHEDULERS.keys()
    if kind not in known:
        kind = kind.removeprefix("Flax")
    if kind not in known:
        names = ", ".join([*CLASSES, *SCHEDULERS])
        raise ValueError(
            f"{where} is for {kind}, which this model does not have: choose one of {names}."
        )
    if kind in CLASSES:
        config, defaults = CLASSES[kind]
    else:
        config = ScheduleConfig
        scheduler = SCHEDULERS[kind]
        defaults = {"sampler": scheduler.sampler} | scheduler.defaults
        options = _without_other_steps(options, kind, where)
    return read_options(config, defaults | options, where, ALLOWED, NO_DIFFERENCE)


def _without_other_steps(options: dict, kind: str, where: str | Path) -> dict:
    """Return a scheduler's options without those that ask for steps that no sampler here takes.

    If there are such options, or there is no sampler for this kind, a warning says so.
    """
    scheduler = SCHEDULERS[kind]
    asks = [kind] if scheduler.is_nearest else []
    its_own = {} if scheduler.is_nearest else STEPS_ONLY[scheduler.sampler]
    left = {}
    for name, value in options.items():
        if name == "clip_sample" and scheduler.sampler != "ddim":
            continue
        if not any(name in others for others in STEPS_ONLY.values()):
            left[name] = value
        elif name in its_own and value not in (its_own[name], None):
            asks.append(f"{name} = {value!r}")
    if kind == "PNDMScheduler" and "skip_prk_steps" not in options:
        asks.append("skip_prk_steps = False")
    if asks:
        warnings.warn(
            f"{where} asks for {' and '.join(asks)}, which is not here: {scheduler.sampler!r} "
            "draws in its place, and images differ a little from those of diffusers.",
            stacklevel=5,  # whoever called read_config
        )
    return left


def read_config(folder: str | Path) -> Config:
    """Read the configuration files of a folder in diffusers' format.

    Raises
    ------
    ValueError
        If the folder is for a different pipeline, lacks a text encoder, or as for ``read_class``.
    """
    folder = Path(folder)
    index = read_json(find_inside(folder, "model_index.json"))
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str):
        raise ValueError(
            f"{folder} is not a whole folder in diffusers' format: its model_index.json does not "
            "say for which pipeline it is. Download it again."
        )
    if "Inpaint" in pipeline or "InstructPix2Pix" in pipeline:
        raise ValueError(f"{folder} is for {pipeline}: {INPAINTING}")
    if pipeline.removeprefix("Flax") not in PIPELINES:
        raise ValueError(
            f"{folder} is for {pipeline}: this model reads folders for {' and '.join(PIPELINES)}."
        )

    def read_part(name: str, file: str = "config.json") -> Any:
        where = find_inside(folder, name, file)
        return read_class(read_json(where), part_class(folder, index, name), where)

    encoders = [read_part("text_encoder")]
    if "text_encoder_2" in index:
        encoders.append(read_part("text_encoder_2"))
    unet = read_part("unet")
    if unet.in_channels != unet.out_channels:
        raise ValueError(
            f"{folder} has a UNet with {unet.in_channels} channels in and {unet.out_channels} "
            f"out, as for inpainting: {INPAINTING}"
        )
    if unet.addition_embed_type is not None and len(encoders) != 2:
        raise ValueError(
            f"{folder} is not a whole folder: its UNet is that of Stable Diffusion XL, and there "
            "is no text_encoder_2. Download it again."
        )
    schedule = read_part("scheduler", "scheduler_config.json")
    if not schedule.beta_start <= schedule.beta_end < 1:
        raise ValueError(
            f"{folder} has a scheduler whose noise goes from beta_start = {schedule.beta_start} to "
            f"beta_end = {schedule.beta_end}, which has to be more, and below 1: download the "
            "folder again."
        )
    vae = read_part("vae")
    sizes = {
        "cross_attention_dim": (
            unet.cross_attention_dim,
            sum(encoder.hidden_size for encoder in encoders),
        ),
        "in_channels": (unet.in_channels, vae.latent_channels),
    }
    if unet.addition_embed_type is not None:
        sizes["projection_class_embeddings_input_dim"] = (
            unet.projection_class_embeddings_input_dim,
            encoders[1].projection_dim + 6 * (unet.addition_time_embed_dim or 0),
        )
    check_parts_fit(folder, sizes)
    return Config(text=tuple(encoders), unet=unet, vae=vae, schedule=schedule)
