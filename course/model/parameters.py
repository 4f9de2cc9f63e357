"""Parameters of a whole model, which declares them part by part: their shapes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from course.model.layers import Parameter

# By the names of parts, what each part declares by the names of its parameters.
Parts = Mapping[str, Mapping[str, Parameter]]


def declared_shapes(
    parameters: Mapping[str, Parameter], dtype: Any = jnp.float32
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of declared parameters, such as those of one part or layer, by name."""
    return {
        name: jax.ShapeDtypeStruct(parameter.shape, dtype) for name, parameter in parameters.items()
    }


def check_parameters(params: dict, declared: Parts) -> None:
    """Raise ``ValueError`` and name the parameter, if one is missing or has a different shape."""
    for part, parameters in declared.items():
        for name, parameter in parameters.items():
            value = params.get(part, {}).get(name)
            if value is None:
                fault = "is missing"
            elif value.shape != parameter.shape:
                fault = f"has the shape {value.shape}"
            else:
                continue
            raise ValueError(
                f"The parameter {name} of {part} {fault}: give parameters of this model, which has "
                f"it as {parameter.shape}."
            )
