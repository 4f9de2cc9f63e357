"""All parameters of a model: their names, their shapes, and over which devices they are split.

A table of *rules* says over which axis of a mesh the axes of a logical name are split, as Google's
jax-llm-examples do it: so one model serves every way to split it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.flux2.configs import Config
from course.flux2.layers import Parameter
from course.flux2.text import text_parameters
from course.flux2.transformer import transformer_parameters
from course.flux2.vae import vae_parameters

# Each device has all parameters, and draws images of its own (data parallelism).
DATA_PARALLEL = {}
# Each device has some heads of all attentions, and some channels of all feed-forward layers
# (tensor parallelism: Shoeybi et al., 2019). Fused matrices are an exception, in single-stream
# blocks as well as the gates and values of double-stream blocks: they are cut into equal pieces,
# also amid a head, and the compiler adds exchanges.
TENSOR_PARALLEL = {"heads": "model", "mlp": "model", "heads_and_mlp": "model"}


@functools.cache
def model_parameters(config: Config) -> dict[str, dict[str, Parameter]]:
    """Shapes and logical axes of all parameters, for each part by name."""
    return {
        "transformer": transformer_parameters(config.transformer),
        "text_encoder": text_parameters(config.text_encoder),
        "vae": vae_parameters(config.vae),
    }


def parameter_shapes(
    config: Config, dtype: Any = jnp.bfloat16
) -> dict[str, dict[str, jax.ShapeDtypeStruct]]:
    """Shapes of all parameters, for each part by name."""
    return {
        part: {name: jax.ShapeDtypeStruct(each.shape, dtype) for name, each in parameters.items()}
        for part, parameters in model_parameters(config).items()
    }


def shardings(
    config: Config, mesh: Mesh, rules: Mapping[str, str]
) -> dict[str, dict[str, NamedSharding]]:
    """Where parameters lie by a table of rules, for each part by name.

    Parameters
    ----------
    config : Config
    mesh : jax.sharding.Mesh
    rules : dict
        For a logical name an axis of the mesh, such as ``TENSOR_PARALLEL``. What no rule names is
        on every device.

    Raises
    ------
    ValueError
        If a rule is for a name that no parameter has, or names an axis that the mesh does not have,
        or devices do not divide an axis. Whether each device gets whole heads is not checked.
    """
    declared = model_parameters(config)
    known = {axis for part in declared.values() for each in part.values() for axis in each.axes}
    for name in rules:
        if name not in known:
            names = ", ".join(sorted(known - {None}))
            raise ValueError(f"No parameter has an axis {name!r}: choose one of {names}.")
    for axis in rules.values():
        if axis not in mesh.shape:
            names = ", ".join(mesh.axis_names)
            raise ValueError(f"The mesh has no axis {axis!r}: choose one of {names}.")
    found = {}
    for part, parameters in declared.items():
        found[part] = {}
        for name, parameter in parameters.items():
            spec = [rules.get(axis) for axis in parameter.axes]
            for size, axis in zip(parameter.shape, spec, strict=True):
                if axis and size % mesh.shape[axis]:
                    raise ValueError(
                        f"{name} of {part} is {parameter.shape}, and {mesh.shape[axis]} devices do "
                        f"not divide {size}: choose another number of devices, or other rules."
                    )
            found[part][name] = NamedSharding(mesh, P(*spec))
    return found
