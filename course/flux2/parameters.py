"""All parameters of FLUX.2: their names, their shapes, and where they lie."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from course.flux2.configs import Config
from course.flux2.qwen3 import text_parameters
from course.flux2.transformer import transformer_parameters
from course.flux2.vae import vae_parameters
from course.model import sharding
from course.model.layers import Parameter
from course.model.parameters import declared_shapes
from course.model.sharding import declared_shardings

# The rules for this model have one name more: that of the fused matrices in single-stream blocks.
# These, like the gates and values of double-stream blocks, are cut into equal pieces, also amid a
# head, and in tensor parallelism the compiler adds exchanges.
TENSOR_PARALLEL = sharding.TENSOR_PARALLEL | {"heads_and_mlp": "model"}
FULLY_SHARDED = sharding.FULLY_SHARDED | {"heads_and_mlp": "data"}


@functools.cache
def model_parameters(config: Config) -> dict[str, dict[str, Parameter]]:
    """Return shapes and logical axes of all parameters, for each part by name.

    The parts are "transformer", "text_encoder" and "vae".
    """
    return {
        "transformer": transformer_parameters(config.transformer),
        "text_encoder": text_parameters(config.text_encoder),
        "vae": vae_parameters(config.vae),
    }


def parameter_shapes(
    config: Config, dtype: Any = jnp.bfloat16
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of all parameters, for each part by name."""
    declared = model_parameters(config)
    return {part: declared_shapes(each, dtype) for part, each in declared.items()}


def whole_shapes(
    config: Config, dtype: Any = jnp.bfloat16
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Return the shapes of all parameters and of those that no image depends on.

    Other programs want the whole text encoder.
    """
    text = text_parameters(config.text_encoder, config.text_encoder.num_hidden_layers)
    text["model.norm.weight"] = Parameter((config.text_encoder.hidden_size,), (None,))
    return parameter_shapes(config, dtype) | {"text_encoder": declared_shapes(text, dtype)}


def shardings(
    config: Config, mesh: Mesh, rules: Mapping[str, str]
) -> dict[str, dict[str, NamedSharding]]:
    """Return where parameters lie by a table of rules, for ``load`` and ``jax.device_put``.

    The rules, such as ``TENSOR_PARALLEL``, and what is refused are those of
    ``course.model.sharding.declared_shardings``.
    """
    return declared_shardings(model_parameters(config), mesh, rules)
