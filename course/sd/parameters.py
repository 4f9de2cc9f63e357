"""All parameters of Stable Diffusion: their names, their shapes, and where they lie."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from course.model.autoencoder import autoencoder_parameters
from course.model.layers import Parameter
from course.model.parameters import declared_shapes
from course.model.sharding import declared_shardings
from course.sd.clip import text_parameters
from course.sd.configs import Config
from course.sd.unet import unet_parameters


@functools.cache
def model_parameters(config: Config) -> dict[str, dict[str, Parameter]]:
    """Return shapes and logical axes of all parameters, for each part by name.

    The parts are "unet", "vae", "text_encoder" and, of Stable Diffusion XL, "text_encoder_2".
    """
    declared = {
        "unet": unet_parameters(config.unet),
        "vae": autoencoder_parameters(config.vae),
        "text_encoder": text_parameters(config.text[0]),
    }
    if len(config.text) == 2:
        declared["text_encoder_2"] = text_parameters(config.text[1])
    return declared


def parameter_shapes(
    config: Config, dtype: Any = jnp.float32
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of all parameters, for each part by name."""
    declared = model_parameters(config)
    return {part: declared_shapes(parameters, dtype) for part, parameters in declared.items()}


def shardings(
    config: Config, mesh: Mesh, rules: Mapping[str, str]
) -> dict[str, dict[str, NamedSharding]]:
    """Return where parameters lie by a table of rules, for ``load`` and ``jax.device_put``.

    The rules, such as ``TENSOR_PARALLEL``, and what is refused are those of
    ``course.model.sharding.declared_shardings``.
    """
    return declared_shardings(model_parameters(config), mesh, rules)
