"""All parameters of a model: their names, their shapes, and over which devices they are split.

The modules of the parts declare their own, beside the functions that use them, with a *logical
name* for each axis. A table of *rules* says over which axis of a mesh the axes of a name are split,
as Google's jax-llm-examples do it: so one model serves every way to split it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.sd.configs import Config
from course.sd.layers import Parameter
from course.sd.text import text_parameters
from course.sd.unet import unet_parameters
from course.sd.vae import vae_parameters

# Rules: for a logical name the axis of a mesh. Axes whose names are not here stay whole.
# Each device has all parameters, and draws images of its own (data parallelism).
DATA_PARALLEL = {}
# Each device has some heads of all attentions, and some channels of all feed-forward layers
# (tensor parallelism): Shoeybi et al., 2019.
TENSOR_PARALLEL = {"heads": "model", "mlp": "model"}
# Each device has a part of every large parameter, of a weight some of its outputs, and the parts
# are gathered where they are used (fully sharded data parallelism): Rajbhandari et al., 2019.
FULLY_SHARDED = {
    "embed": "data",
    "heads": "data",
    "mlp": "data",
    "outputs": "data",
}


@functools.cache
def model_parameters(config: Config) -> dict[str, dict[str, Parameter]]:
    """Shapes and logical axes of all parameters, for each part by name.

    The parts are "unet", "vae", "text_encoder" and, of Stable Diffusion XL, "text_encoder_2".
    """
    found = {
        "unet": unet_parameters(config.unet),
        "vae": vae_parameters(config.vae),
        "text_encoder": text_parameters(config.text[0]),
    }
    if len(config.text) == 2:
        found["text_encoder_2"] = text_parameters(config.text[1])
    return found


def parameter_shapes(
    config: Config, dtype: Any = jnp.float32
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of all parameters, for each part by name."""
    declared = model_parameters(config)
    return {part: declared_shapes(parameters, dtype) for part, parameters in declared.items()}


def declared_shapes(
    parameters: Mapping[str, Parameter], dtype: Any = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of declared parameters, such as those of one part or one layer, by name."""
    return {
        name: jax.ShapeDtypeStruct(parameter.shape, dtype) for name, parameter in parameters.items()
    }


def check_parameters(params: dict, config: Config) -> None:
    """Raise ``ValueError`` and name the parameter, if one is missing or has a different shape."""
    for part, parameters in model_parameters(config).items():
        for name, parameter in parameters.items():
            value = params.get(part, {}).get(name)
            if value is None:
                found = "is missing"
            elif value.shape != parameter.shape:
                found = f"has the shape {value.shape}"
            else:
                continue
            raise ValueError(
                f"The parameter {name} of {part} {found}: give parameters of this model, which has "
                f"it as {parameter.shape}."
            )


def shardings(
    config: Config, mesh: Mesh, rules: Mapping[str, str]
) -> dict[str, dict[str, NamedSharding]]:
    """Where parameters lie by a table of rules, for each part by name.

    Parameters
    ----------
    config : Config
    mesh : jax.sharding.Mesh
    rules : dict
        For a logical name an axis of the mesh, such as ``TENSOR_PARALLEL``.

    Returns
    -------
    dict
        For ``load`` and ``jax.device_put``.

    Raises
    ------
    ValueError
        If a rule names an axis that the mesh does not have, or devices do not divide an axis.
    """
    for axis in rules.values():
        if axis not in mesh.shape:
            names = ", ".join(mesh.axis_names)
            raise ValueError(f"The mesh has no axis {axis!r}: choose one of {names}.")
    found = {}
    for part, parameters in model_parameters(config).items():
        found[part] = {}
        for name, parameter in parameters.items():
            spec = [rules.get(axis) for axis in parameter.axes]
            for n, axis in enumerate(spec):
                if axis in spec[n + 1 :]:  # it can split one axis of an array only: the last one
                    spec[n] = None
            for size, axis in zip(parameter.shape, spec, strict=True):
                if axis and size % mesh.shape[axis]:
                    raise ValueError(
                        f"{name} of {part} is {parameter.shape}, and {mesh.shape[axis]} devices do "
                        f"not divide {size}: choose another number of devices, or other rules."
                    )
            found[part][name] = NamedSharding(mesh, P(*spec))
    return found
