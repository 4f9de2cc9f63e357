"""Write what was trained as a folder in the format of the bundled checkpoint that it is like."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.serialization import msgpack_serialize

from course import flux2
from course.model.files import OLD_NAMES, to_files, unstack_layers, write_safetensors
from lab.train import tokenizers


def export_sd(params: dict[str, dict[str, jax.Array]], like: Path, folder: Path) -> None:
    """Write Stable Diffusion 1 or XL for diffusers' Flax pipelines, in float32.

    Other files of the folder, such as a card, stay what they are.

    Parameters
    ----------
    params : dict
        A dictionary of parameters for each part.
    like : Path
        A folder whose configuration files are copied.
    folder : Path
    """
    copy_configurations(like, folder)
    for part, values in params.items():
        kind = "flax_model" if part.startswith("text") else "diffusion_flax_model"
        tree = flax_tree(part, unstack_layers(values))
        (folder / part / f"{kind}.msgpack").write_bytes(msgpack_serialize(tree))
        if part.startswith("text"):
            tokenizers.write_clip(folder / part.replace("text_encoder", "tokenizer"))


def flax_tree(part: str, values: dict[str, jax.Array]) -> dict:
    """Return a part's parameters as Flax' modules have them: the reverse of ``read_flax``."""
    tree = {}
    for name, value in values.items():
        if part == "vae":
            for old, new in OLD_NAMES.items():
                name = name.replace(f"attentions.0.{new}.", f"attentions.0.{old}.")
        if not part.startswith("text"):
            name = re.sub(r"\.(\d+)", r"_\1", name)  # down_blocks.0 is down_blocks_0
        *modules, kind = name.split(".")
        if kind == "weight" and modules[-1].endswith("embedding"):
            kind = "embedding"
        elif kind == "weight":
            kind = "scale" if value.ndim == 1 else "kernel"
        branch = tree
        for module in modules:
            branch = branch.setdefault(module, {})
        branch[kind] = np.asarray(value, np.float32)
    return jax.tree.map(lambda value: value, tree)  # in the order of names


def export_flux2(params: dict[str, dict[str, jax.Array]], like: Path, folder: Path) -> None:
    """Write FLUX.2 for diffusers' ``Flux2KleinPipeline``, in bfloat16: see ``export_sd``."""
    copy_configurations(like, folder)
    text = flux2.read_config(like).text_encoder
    for part, values in params.items():
        values = to_files(values, jnp.bfloat16)
        if part == "text_encoder":
            values |= unread_layers(values, text)
        if part == "vae":
            values["bn.num_batches_tracked"] = np.zeros((), np.int64)
        stem = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        write_safetensors(folder / part / f"{stem}.safetensors", values)
    tokenizers.write_qwen(folder / "tokenizer")


def export_distilled(
    params: dict[str, dict[str, jax.Array]], config: flux2.Config, like: Path, folder: Path
) -> None:
    """Write a student of the FLUX.2 in the folder ``like``, of this configuration.

    See ``export_flux2``. What its configuration says besides: it is distilled, and whether it is a
    flow map.
    """
    export_flux2(params, like, folder)
    changes = {
        "model_index.json": {"is_distilled": config.is_distilled},
        "transformer/config.json": {"guidance_embeds": config.transformer.guidance_embeds},
    }
    for name, values in changes.items():
        options = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps(options, indent=2) + "\n")


def unread_layers(values: dict[str, np.ndarray], config: flux2.TextConfig) -> dict[str, np.ndarray]:
    """Return the last quarter of a text encoder, and its norm, which the model does not read.

    Here they have no numbers of their own: each layer gives back what it gets.
    """
    unread = {"model.norm.weight": np.ones(config.hidden_size, jnp.bfloat16)}
    first = "model.layers.0."
    for number in range(config.read_layers[-1], config.num_hidden_layers):
        for name, value in values.items():
            if name.startswith(first):
                same = np.ones_like(value) if value.ndim == 1 else np.zeros_like(value)
                unread[name.replace(".0.", f".{number}.", 1)] = same
    return unread


def copy_configurations(like: Path, folder: Path) -> None:
    """Copy the configuration files of a folder, but not its tokenizers'."""
    for file in [*like.glob("*.json"), *like.glob("*/*config.json")]:
        if file.parent.name.startswith("tokenizer"):
            continue
        target = folder / file.relative_to(like)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
