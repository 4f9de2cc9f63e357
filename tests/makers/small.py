"""Small models with made-up parameters, whose images mean nothing: what is true of any model."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from course import sd
from tests.makers.common import FIXTURES, made_up

SD = sd.Config(
    text=(
        sd.TextConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=7,
            eos_token_id=98,
        ),
    ),
    unet=sd.UNetConfig(
        sample_size=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
    ),
    vae=sd.VAEConfig(block_out_channels=(8,), norm_num_groups=4),
    schedule=sd.ScheduleConfig("ddim", steps_offset=1),
)


def sd_parameters() -> dict:
    """Parameters for ``SD``."""
    random = np.random.default_rng(0)

    def make_up(shape: jax.ShapeDtypeStruct) -> jax.Array:
        numbers = random.standard_normal(shape.shape, shape.dtype)
        return jnp.asarray(numbers / np.sqrt(np.prod(shape.shape[:-1]), dtype=shape.dtype))

    return jax.tree.map(make_up, sd.parameter_shapes(SD))


def write_flux2(folder: Path) -> Path:
    """Write the folder that diffusers saved, with the parameters that its maker made up."""
    recorded = np.load(FIXTURES / "flux2_parts.npz")
    saved = json.loads(str(recorded["folder"]))
    for place, content in saved["texts"].items():
        file = folder / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    for place, shapes in saved["tensors"].items():
        tensors = {}
        for name, shape in shapes.items():
            kept = name in recorded  # the statistics of the VAE are
            tensors[name] = recorded[name] if kept else made_up(name, tuple(shape))
        save_file(tensors, folder / place, {"format": "pt"})
    return folder
