"""How one program is spread over devices, and what they then exchange: chapter 9 shows and uses these functions."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True)
class Collective:
    """An instruction by which devices exchange data."""

    kind: str  #: such as ``all-reduce``
    bytes: int  #: of its result on one device
    origin: str  #: where in the Python program it comes from, by the compiler; empty if it does not say


def find_collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """List a program's collectives, in the order of its text. One in the body of a loop stands there once.

    Builds on ``Compiled.as_text``.
    """
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    found = []
    for line in compiled.as_text().splitlines():
        # An accelerator may start an instruction and go on: then the "done" has the result.
        if match := re.search(rf" = (.*?) ({kinds})(?:-done)?\(", line):
            arrays = re.findall(r"[a-z]+(\d*)\w*\[([\d,]*)\]", match[1])  # such as bf16[2,1024,1280]; bits, sizes
            bits = [int(width or 8) * math.prod(map(int, filter(None, sizes.split(",")))) for width, sizes in arrays]
            origin = re.search(r'op_name="([^"]*)"', line)
            found.append(Collective(match[2], sum(bits) // 8, origin[1] if origin else ""))
    return found


def count_collectives(compiled: jax.stages.Compiled) -> dict[str, int]:
    """How many collectives of each kind a program has, see `find_collectives`."""
    return dict(sorted(Counter(collective.kind for collective in find_collectives(compiled)).items()))


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
