"""How one of the pipelines' programs is spread over devices: chapter 9 shows and uses these functions."""

from types import SimpleNamespace

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def split_guidance(unet, axis: str) -> SimpleNamespace:
    """Stand in for a UNet inside ``jax.shard_map``: each device along a mesh's axis computes its part of the batch.

    ``_generate`` gives its UNet two halves: all images without the prompt, then all with it. On two devices, each
    computes one half. Builds on ``jax.lax.axis_index`` and ``jax.lax.all_gather``.

    Raises
    ------
    TypeError
        JAX's own, if the devices do not divide the batch.
    """

    def apply(variables, latents, timesteps, encoder_hidden_states):
        devices, me = jax.lax.axis_size(axis), jax.lax.axis_index(axis)
        inputs = (latents, timesteps, encoder_hidden_states)
        mine = [x.reshape(devices, -1, *x.shape[1:])[me] for x in inputs]
        output = unet.apply(variables, *mine)
        return output.replace(sample=jax.lax.all_gather(output.sample, axis, tiled=True))

    return SimpleNamespace(config=unet.config, apply=apply)


def split_pairs(params, mesh: Mesh):
    """Say where each parameter lies if pairs of layers are split over a mesh's axis ``model``: a tree of shardings.

    The first layer of a pair is split by its outputs, and the second by its inputs, as in Megatron-LM
    (arXiv:1909.08053). Whatever does not divide, or is in no pair, is whole on every device. ``params`` is a tree of
    arrays or of ``jax.ShapeDtypeStruct``.
    """
    first = {"to_q", "to_k", "to_v", "proj", "conv1", "time_emb_proj", "q_proj", "k_proj", "v_proj", "fc1"}
    second = {"to_out_0", "net_2", "conv2", "out_proj", "fc2"}

    def choose(path, leaf):
        *_, layer, name = [None, *(getattr(entry, "key", None) for entry in path)]
        spec = [None] * len(leaf.shape)
        if name == "kernel" and layer in first | second:
            # The last two axes of a kernel are its inputs and its outputs, in convolutions too.
            split = -1 if layer in first else -2
            if leaf.shape[split] % mesh.shape["model"] == 0:
                spec[split] = "model"
        return NamedSharding(mesh, P(*spec))

    return jax.tree_util.tree_map_with_path(choose, params)
