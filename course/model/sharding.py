"""Over which devices the parameters of a model are split.

A model declares its parameters with a *logical name* for each axis. A table of *rules* says over
which axis of a mesh the axes of a name are split, as Google's jax-llm-examples do it: so one model
serves every way to split it.
"""

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.model.layers import Parameter
from course.model.parameters import Parts

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


def declared_shardings(
    declared: Parts, mesh: Mesh, rules: Mapping[str, str]
) -> dict[str, dict[str, NamedSharding]]:
    """Return where declared parameters lie by a table of rules, for each part by name.

    Parameters
    ----------
    declared : dict
        For each part, its parameters by name.
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
    names = {axis for part in declared.values() for each in part.values() for axis in each.axes}
    names = sorted(names - {None})
    for name, axis in rules.items():
        if name not in names:
            choice = ", ".join(names)
            raise ValueError(f"No parameter has an axis {name!r}: choose one of {choice}.")
        if axis not in mesh.shape:
            choice = ", ".join(mesh.axis_names)
            raise ValueError(f"The mesh has no axis {axis!r}: choose one of {choice}.")
    shardings = {}
    for part, parameters in declared.items():
        shardings[part] = {}
        for name, parameter in parameters.items():
            spec = split_axes(f"{name} of {part}", parameter, mesh, rules)
            shardings[part][name] = NamedSharding(mesh, spec)
    return shardings


def split_axes(name: str, parameter: Parameter, mesh: Mesh, rules: Mapping[str, str]) -> P:
    """Return over which axis of the mesh each axis of one parameter is split.

    An axis of the mesh can split one axis of a parameter only: the last one that has a rule for it.
    """
    spec = [rules.get(axis) for axis in parameter.axes]
    for n, axis in enumerate(spec):
        if axis in spec[n + 1 :]:
            spec[n] = None
    for size, axis in zip(parameter.shape, spec, strict=True):
        if axis and size % mesh.shape[axis]:
            raise ValueError(
                f"{name} is {parameter.shape}, and {mesh.shape[axis]} devices do not divide "
                f"{size}: choose another number of devices, or other rules."
            )
    return P(*spec)
