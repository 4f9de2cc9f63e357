"""How parameters can be split over devices, and what the devices then have to tell each other."""

import json
import re
from collections import Counter
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Layers that come in pairs, with something between them that treats every channel, or every head, by itself. The
# first of a pair is split by its outputs and the second by its inputs, so the split half-way result stays where it is.
FIRST = {"to_q", "to_k", "to_v", "proj", "conv1", "time_emb_proj", "q_proj", "k_proj", "v_proj", "fc1"}
SECOND = {"to_out_0", "net_2", "conv2", "out_proj", "fc2"}
# Installed from a wheel, the record lies inside the package; in a clone of the repository, beside it.
_RECORDS = (Path(__file__).with_name("shardings.json"), Path(__file__).parents[1] / "benchmarks" / "shardings.json")
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def split_pairs(params, mesh: Mesh, axis: str = "model"):
    """Say for each parameter how it is split over an axis of a mesh.

    The way of Megatron-LM (https://arxiv.org/abs/1909.08053), for the attentions, feed-forward layers and residual
    blocks of Stable Diffusion's networks: one sum over the devices for each pair of layers. What belongs to no pair
    stays whole on every device, and so does a kernel that the axis does not divide.

    Parameters
    ----------
    params : tree
        Parameters of a Flax pipeline, or their ``jax.ShapeDtypeStruct``.
    mesh : jax.sharding.Mesh
    axis : str
        One of its axes.

    Returns
    -------
    tree
        A ``jax.sharding.NamedSharding`` for each leaf, as ``jax.device_put`` takes them.

    Raises
    ------
    ValueError
        If the mesh has no such axis.

    Examples
    --------
    >>> mesh = Mesh(jax.devices()[:1], ("model",))
    >>> kernel = jax.ShapeDtypeStruct((96, 64), "float32")
    >>> split_pairs({"to_q": {"kernel": kernel}, "to_out_0": {"kernel": kernel}}, mesh)["to_out_0"]["kernel"].spec
    PartitionSpec('model', None)
    """
    if axis not in mesh.shape:
        raise ValueError(f"The mesh has no axis {axis!r}: choose one of {', '.join(mesh.axis_names)}.")

    def sharding(path, leaf):
        names = [getattr(entry, "key", None) for entry in path]
        spec = [None] * len(leaf.shape)
        if names[-1] == "kernel" and names[-2] in FIRST | SECOND:
            # A kernel's last two axes are its inputs and its outputs, in convolutions too.
            split = -1 if names[-2] in FIRST else -2
            if leaf.shape[split] % mesh.shape[axis] == 0:
                spec[split] = axis
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(sharding, params)


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Count by kind the instructions of a compiled program by which devices exchange data.

    Builds on ``Compiled.as_text``. One in the body of a loop counts once, however often the loop runs.

    Examples
    --------
    >>> count_collectives(jax.jit(lambda x: 2 * x).lower(1.0).compile())
    {}
    """
    # An accelerator may split an instruction into a start and a done, with other work between the two.
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    return dict(sorted(Counter(found).items()))


def recorded_shardings() -> dict:
    """What the TPU compiler said about Stable Diffusion XL with its parameters split over chips.

    ``benchmarks/record_shardings.py`` asked it. ``parameters`` has the bytes on each chip for each number of chips that
    share them, and ``compiled`` the compiler's answers.
    """
    return json.loads(next(file for file in _RECORDS if file.exists()).read_text())
