"""How a pipeline's program is spread over devices: chapter 9 shows and uses these functions."""

from types import SimpleNamespace

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def split_guidance(unet, axis: str) -> SimpleNamespace:
    """Stand in for a UNet inside ``jax.shard_map``: each device computes its part of the batch.

    ``_generate`` gives its UNet two halves: all images without the prompt, then all with it. On two
    devices along a mesh's axis, each computes one half. Builds on ``jax.lax.axis_index`` and
    ``jax.lax.all_gather``.

    Raises
    ------
    TypeError
        JAX's own, if the devices do not divide the batch.
    """

    def apply(variables, latents, timesteps, encoder_hidden_states):
        devices = jax.lax.axis_size(axis)
        here = jax.lax.axis_index(axis)

        def take_part(x):
            """(batch, …) to (batch / devices, …)."""
            return x.reshape(devices, -1, *x.shape[1:])[here]

        output = unet.apply(
            variables,
            take_part(latents),
            take_part(timesteps),
            take_part(encoder_hidden_states),
        )
        noise = jax.lax.all_gather(output.sample, axis, tiled=True)  # (batch, …) again
        return output.replace(sample=noise)

    return SimpleNamespace(config=unet.config, apply=apply)


def split_pairs(params, mesh: Mesh):
    """Say where each parameter lies if pairs of layers are split over an axis ``model``.

    The first layer of a pair is split by its outputs, and the second by its inputs, as in
    Megatron-LM (arXiv:1909.08053). Whatever does not divide, or is in no pair, is whole on
    every device.

    Parameters
    ----------
    params : tree of jax.Array or jax.ShapeDtypeStruct
        A pipeline's.
    mesh : Mesh
        With an axis ``model``.

    Returns
    -------
    tree of NamedSharding
        One for each parameter.
    """
    first = {"to_q", "to_k", "to_v", "q_proj", "k_proj", "v_proj"}  # attention
    second = {"to_out_0", "out_proj"}
    first |= {"proj", "fc1"}  # feed-forward layers
    second |= {"net_2", "fc2"}
    first |= {"conv1", "time_emb_proj"}  # ResNets
    second |= {"conv2"}

    def choose(path, leaf):
        spec = [None] * len(leaf.shape)
        names = [getattr(entry, "key", None) for entry in path]
        if len(names) >= 2 and names[-1] == "kernel" and names[-2] in first | second:
            # The last two axes of a kernel are its inputs and its outputs, in convolutions too.
            axis = -1 if names[-2] in first else -2
            if leaf.shape[axis] % mesh.shape["model"] == 0:
                spec[axis] = "model"
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(choose, params)
