"""What a model's configuration files say of its sizes."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from course.model.autoencoder import AutoencoderConfig
from course.model.configs import check_options, check_parts_fit, read_options
from course.model.files import find_inside, read_json


@dataclass(frozen=True)
class TransformerConfig:
    """diffusers' ``Flux2Transformer2DModel``: the defaults are FLUX.2-klein-4B's."""

    in_channels: int = 128  # of a token of the image: 32 channels of 2 x 2 latents
    num_layers: int = 5  # double-stream blocks
    num_single_layers: int = 20
    attention_head_dim: int = 128
    num_attention_heads: int = 24
    joint_attention_dim: int = 7680  # of a token of the text: three layers of the text encoder
    timestep_guidance_channels: int = 256
    mlp_ratio: float = 3.0
    axes_dims_rope: tuple[int, ...] = (32, 32, 32, 32)
    rope_theta: float = 2000.0
    eps: float = 1e-6
    # Whether there is an embedder for a second number beside the time. FLUX.2-dev has it for the
    # scale of guidance, and a flow map, here, for the time that a step goes to.
    guidance_embeds: bool = False

    @property
    def width(self) -> int:
        return self.num_attention_heads * self.attention_head_dim


@dataclass(frozen=True)
class TextConfig:
    """transformers' ``Qwen3ForCausalLM``: the defaults are Qwen3-4B's."""

    vocab_size: int = 151_936
    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6

    @property
    def read_layers(self) -> tuple[int, int, int]:
        """After how many layers the text is read: of 36, after 9, 18 and 27; of 4, 1, 2 and 3."""
        quarter = self.num_hidden_layers // 4
        return (quarter, 2 * quarter, 3 * quarter)


@dataclass(frozen=True)
class VAEConfig(AutoencoderConfig):
    """diffusers' ``AutoencoderKLFlux2``: the defaults are FLUX.2's."""

    block_out_channels: tuple[int, ...] = (128, 256, 512, 512)
    layers_per_block: int = 2
    latent_channels: int = 32
    sample_size: int = 1024  # of the images that the model was trained for, in pixels
    batch_norm_eps: float = 1e-4
    patch_size: tuple[int, int] = (2, 2)

    @property
    def pixels_per_token(self) -> int:
        """How many pixels high and wide the part of an image is that becomes one token."""
        return 2 ** (len(self.block_out_channels) - 1) * self.patch_size[0]


@dataclass(frozen=True)
class Config:
    """All parts of a model. It is hashable, so that ``jax.jit`` takes it as a static argument."""

    transformer: TransformerConfig = TransformerConfig()
    text_encoder: TextConfig = TextConfig()
    vae: VAEConfig = VAEConfig()
    shift: float | None = None  # of the sampler's times; None: by the number of tokens
    is_distilled: bool = True  # then draw in four steps, without guidance; nothing checks it

    @property
    def side(self) -> int:
        """Height and width of the images that the model was trained for, in pixels."""
        return self.vae.sample_size

    @property
    def side_multiple(self) -> int:
        """Sides of images are multiples of so many pixels, so that they can be cut into tokens."""
        return self.vae.pixels_per_token


# The values that this model has for options that it does not read.
ALLOWED = {
    "scheduler": {
        "_class_name": ("FlowMatchEulerDiscreteScheduler",),
        "time_shift_type": ("exponential",),
        "shift_terminal": (None,),
        "invert_sigmas": (False,),
        "stochastic_sampling": (False,),
        "use_beta_sigmas": (False,),
        "use_exponential_sigmas": (False,),
        "use_karras_sigmas": (False,),
    },
    "transformer": {"_class_name": ("Flux2Transformer2DModel",)},
    "text_encoder": {
        "model_type": ("qwen3",),
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "rope_scaling": (None,),
        "rope_type": ("default",),
    },
    "vae": {
        "_class_name": ("AutoencoderKLFlux2",),
        "act_fn": ("silu",),
        "mid_block_add_attention": (True,),
        "use_quant_conv": (True,),
        "use_post_quant_conv": (True,),
    },
}


def read_config(folder: str | Path) -> Config:
    """Read the configuration of a folder in diffusers' format. No weights are needed.

    Raises
    ------
    FileNotFoundError
        If a file is missing.
    ValueError
        If the model is of another kind, or has what this code does not compute.
    """
    folder = Path(folder)
    index = read_json(find_inside(folder, "model_index.json"))
    if index.get("_class_name") != "Flux2KleinPipeline":
        raise ValueError(
            f"{folder} is made for {index.get('_class_name')}, and this code reads "
            "Flux2KleinPipeline, such as black-forest-labs/FLUX.2-klein-4B."
        )
    file = find_inside(folder, "scheduler", "scheduler_config.json")
    scheduler = read_json(file)
    check_options(scheduler, file, ALLOWED["scheduler"], types={"shift": float})
    transformer = _read_part(folder, "transformer", TransformerConfig)
    axes, head = transformer.axes_dims_rope, transformer.attention_head_dim
    if len(axes) != 4 or sum(axes) != head or any(channels % 2 for channels in axes):
        raise ValueError(
            f"{folder} has a transformer with axes_dims_rope = {axes}, which are not four even "
            f"numbers that add up to attention_head_dim = {head}: download the folder again."
        )
    text, vae = _read_part(folder, "text_encoder", TextConfig), _read_part(folder, "vae", VAEConfig)
    check_parts_fit(
        folder,
        {
            "joint_attention_dim": (
                transformer.joint_attention_dim,
                len(text.read_layers) * text.hidden_size,
            ),
            "in_channels": (transformer.in_channels, vae.latent_channels * prod(vae.patch_size)),
        },
    )
    return Config(
        transformer=transformer,
        text_encoder=text,
        vae=vae,
        shift=None if scheduler.get("use_dynamic_shifting") else scheduler.get("shift", 1.0),
        is_distilled=index.get("is_distilled", False),
    )


def _read_part(folder: Path, part: str, kind: type) -> Any:
    """Return the configuration of a part. What it lacks is as FLUX.2-klein-4B has it."""
    file = find_inside(folder, part, "config.json")
    options = read_json(file)
    # Newer versions of transformers write settings of rotary positions in here.
    rotary = options.get("rope_parameters")
    if isinstance(rotary, dict):
        options = rotary | options
    return read_options(kind, options, file, ALLOWED[part])
