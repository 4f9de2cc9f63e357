"""Which weights a chapter loads: Stable Diffusion's own if the hardware has room for them, else bundled ones."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from huggingface_hub import HfApi, constants, errors, hf_hub_download, try_to_load_from_cache

from helpers.places import find_data
from helpers.tokens import has_token

CHECKPOINT_VARIABLE = "TUTORIAL_CHECKPOINT"
_INDEX, _UNET, _VAE = "model_index.json", "unet/config.json", "vae/config.json"
_WEIGHTS = "unet/diffusion_flax_model.msgpack"
_LATER = "safetensors, which the chapters from 11 on read"
_SHAPE_PROMPTS = (
    "a large red heart on a white background",
    "a large blue star on a yellow background",
    "a medium green ring on a black background",
    "a large purple moon on a pink background",
    "a medium orange arrow on a blue background",
    "a large white cross on a red background",
    "a small yellow circle on a purple background",
    "a large black triangle on an orange background",
)
_PHOTO_PROMPTS = (
    "a lighthouse on a cliff in a storm, oil painting",
    "a fox reading a newspaper on a park bench",
    "a bowl of ramen, studio photograph, soft light",
    "the skyline of a city on the moon, concept art",
    "a watercolor of a sailing boat at sunrise",
    "an astronaut planting a tree in a desert",
    "a stained glass window that shows an octopus",
    "a steam locomotive crossing a snowy viaduct",
)


@dataclass(frozen=True)
class Checkpoint:
    """Weights to load, and what a chapter needs to know about them.

    Attributes
    ----------
    name : str
        What to call it in text.
    source, revision : str, str or None
        The first argument of ``from_pretrained`` (a folder or a Hub id), and its ``revision``.
    dtype : dtype
        What to compute in: for weights from the Hub, bfloat16 on accelerators and float32 on a CPU, which has no fast
        bfloat16; for folders, bfloat16 if their name ends in ``-bf16``.
    height, width : int
        Image size in pixels.
    num_inference_steps, guidance_scale : int, float
        Sampling settings that suit these weights.
    prompts : tuple of str
        Eight examples of what they can draw.
    download_bytes : int
        What is still to be downloaded; 0 for folders and for what the Hub's cache holds.
    """

    name: str
    source: str
    revision: str | None
    dtype: jnp.dtype
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    prompts: tuple[str, ...]
    download_bytes: int


class _Model(NamedTuple):
    hub_id: str
    revision: str
    memory: int  # GiB on each device: parameters, temporaries and some room; docs/real-models.md has the sources
    pipeline: str
    bundled: str  # a small checkpoint of the same architecture


_SD, _SDXL = "CompVis/stable-diffusion-v1-4", "stabilityai/stable-diffusion-xl-base-1.0"
_MODELS = {
    "sd": _Model(_SD, "bf16", 6, "FlaxStableDiffusionPipeline", "shapes-sd"),
    "sdxl": _Model(_SDXL, "main", 14, "FlaxStableDiffusionXLPipeline", "shapes-sdxl"),
}


def pick_checkpoint(model: str = "sd", safetensors: bool = False) -> Checkpoint:
    """Choose the weights that fit this machine, and say in one line what was chosen.

    On a TPU or GPU with enough memory these are Stable Diffusion's own, for bfloat16. On a CPU, or if the Hub cannot be
    reached, it is the checkpoint that comes with this course. The environment variable ``TUTORIAL_CHECKPOINT`` decides
    otherwise: the name of a bundled checkpoint, the path of a folder in diffusers' format with Flax weights, or a Hub
    id, with ``@revision`` if need be.

    Parameters
    ----------
    model : {"sd", "sdxl"}
        The architecture that the chapter teaches: that of Stable Diffusion 1, or XL.
    safetensors : bool
        Whether weights may be safetensors, too, as the chapters from 11 on read them.

    Returns
    -------
    Checkpoint
        Nothing is loaded or downloaded yet but three small configuration files.

    Raises
    ------
    ValueError
        If ``model`` is unknown.
    RuntimeError
        If the checkpoint that ``TUTORIAL_CHECKPOINT`` names cannot be had, or has a different architecture: one
        sentence says why and what to do.

    Examples
    --------
    >>> checkpoint = pick_checkpoint("sd")  # doctest: +ELLIPSIS
    This is a CPU run: using the bundled checkpoint shapes-sd, ...
    >>> checkpoint.height, checkpoint.width
    (64, 64)
    """
    if model not in _MODELS:
        raise ValueError(f"There is no model {model!r} in this course: choose one of {', '.join(_MODELS)}.")
    real = _MODELS[model]
    if choice := os.environ.get(CHECKPOINT_VARIABLE):
        checkpoint = _find(choice, model, safetensors)
        print(f"{CHECKPOINT_VARIABLE} is set: using {checkpoint.name}.")
        return checkpoint
    if jax.default_backend() == "cpu":
        reason = "This is a CPU run"
    elif (memory := _device_memory() / 2**30) < real.memory:
        has = f"{memory:.1f} GiB" if memory else "an unknown amount"
        reason = f"{real.hub_id} takes {real.memory} GiB of memory, and each device has {has}"
    else:
        try:
            checkpoint = _from_hub(real.hub_id, real.revision, model)
            print(f"Using {checkpoint.name}, {checkpoint.download_bytes / 1e9:.1f} GB to download.")
            return checkpoint
        except RuntimeError as error:
            reason = str(error).rstrip(".")
    checkpoint = bundled_checkpoint(real.bundled)
    print(f"{reason}: using the bundled checkpoint {checkpoint.name}, which draws shapes on flat backgrounds.")
    return checkpoint


def bundled_checkpoint(name: str) -> Checkpoint:
    """Describe a checkpoint that comes with the course.

    Raises
    ------
    ValueError
        If none has that name; the message lists those that there are.

    Examples
    --------
    >>> bundled_checkpoint("shapes-sd").download_bytes
    0
    """
    if name not in (names := bundled_names()):
        raise ValueError(f"No bundled checkpoint is called {name!r}: choose one of {', '.join(names)}.")
    return _from_folder(find_data("checkpoints") / name, name, _SHAPE_PROMPTS)


def bundled_names() -> list[str]:
    """The names of the checkpoints that come with the course."""
    return sorted(file.parents[1].name for file in find_data("checkpoints").glob(f"*/{_WEIGHTS}"))


def _device_memory() -> int:
    """Bytes on each device; 0 if the device does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def _find(choice: str, model: str, safetensors: bool) -> Checkpoint:
    """The checkpoint that ``TUTORIAL_CHECKPOINT`` names."""
    if choice in bundled_names():
        return _from_folder(find_data("checkpoints") / choice, choice, _SHAPE_PROMPTS, model)
    if Path(choice).is_dir():
        return _from_folder(Path(choice), choice, _PHOTO_PROMPTS, model, safetensors)
    hub_id, _, revision = choice.partition("@")
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise RuntimeError(
            f"{CHECKPOINT_VARIABLE} is {choice!r}: no folder, no Hub id (owner/name), and no bundled checkpoint "
            f"({', '.join(bundled_names())}): correct it or unset it."
        )
    return _from_hub(hub_id, revision or "main", model, safetensors)


def _from_folder(folder: Path, name: str, prompts, model: str | None = None, safetensors: bool = False) -> Checkpoint:
    later = not (folder / _WEIGHTS).exists() and any((folder / "unet").glob("*.safetensors"))
    if later and not safetensors:
        raise RuntimeError(f"The folder {folder} has {_LATER}: for this one, choose a folder with Flax weights.")
    if missing := [file for file in (_WEIGHTS, _INDEX, _UNET, _VAE)[later:] if not (folder / file).exists()]:
        raise RuntimeError(
            f"The folder {folder} holds no pipeline with Flax weights, {', '.join(missing)} being absent: choose one "
            "that a Flax pipeline's save_pretrained wrote."
        )
    dtype = jnp.bfloat16 if folder.name.endswith("-bf16") else jnp.float32
    settings = _settings(name, model, *(folder / file for file in (_INDEX, _UNET, _VAE)))
    return Checkpoint(name, str(folder), None, dtype, *settings, prompts, download_bytes=0)


def _from_hub(hub_id: str, revision: str, model: str, safetensors: bool = False) -> Checkpoint:
    """Ask the Hub, or its cache, for a checkpoint without downloading its weights."""
    name, asked = f"{hub_id} at revision {revision!r}", ", asked with a token" if has_token() else ""
    try:
        size = _download_bytes(hub_id, revision, model, safetensors)
        files = (hf_hub_download(hub_id, file, revision=revision) for file in (_INDEX, _UNET, _VAE))
        settings = _settings(name, model, *files)
    except errors.HfHubHTTPError as error:
        answer = str(error).split("\n\n")[-1].splitlines()[0].rstrip(".")  # without the number of the request
        raise RuntimeError(
            f"The Hub does not give {name}{asked}: {answer}. Look at {constants.ENDPOINT}/{hub_id}, and log in with "
            "`hf auth login` if it is private, or if you have to accept its licence."
        ) from None
    except (OSError, errors.HTTPError):  # of the HTTP client, which differs from version to version
        raise RuntimeError(
            f"{name} cannot be had, as the Hugging Face Hub cannot be reached (is the internet switched on?)"
        ) from None
    if size > (free := free_disk(constants.HF_HUB_CACHE)):
        raise RuntimeError(
            f"{name} needs {size / 1e9:.1f} GB of disk, but {constants.HF_HUB_CACHE} has {free / 1e9:.1f} GB free: "
            "make room, or set HF_HOME to a larger disk."
        )
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    return Checkpoint(name, hub_id, revision, dtype, *settings, _PHOTO_PROMPTS, download_bytes=size)


def _download_bytes(hub_id: str, revision: str, model: str, safetensors: bool) -> int:
    """Size of the weights of a pipeline, without downloading them; 0 if the Hub's cache has them."""
    parts = ("unet/diffusion_", "vae/diffusion_", "text_encoder/", "text_encoder_2/")[: 4 if model == "sdxl" else 3]
    flax = [f"{part}flax_model.msgpack" for part in parts]
    others = [f"{part}{'pytorch_' * part.endswith('_')}model.safetensors" for part in parts]
    for names in (flax, others)[: 1 + safetensors]:
        if all(isinstance(try_to_load_from_cache(hub_id, file, revision=revision), str) for file in names):
            return 0
    files = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=10).siblings or []
    HfApi().auth_check(hub_id)
    name, names = f"{hub_id} at revision {revision!r}", [file.rfilename for file in files]
    later = _WEIGHTS not in names and any(file.startswith("unet/") and file.endswith(".safetensors") for file in names)
    if _WEIGHTS not in names and not (later and safetensors):
        but = f", but {_LATER}" * later
        raise RuntimeError(f"{name} cannot be used: it has no Flax weights ({_WEIGHTS}){but}.")
    kind = ".safetensors" if later else ".msgpack"
    return sum(file.size or 0 for file in files if "/" in file.rfilename and file.rfilename.endswith(kind))


def free_disk(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (Path(folder), *Path(folder).parents) if place.exists())).free


def _settings(name: str, model: str | None, *files: str | Path) -> tuple[int, int, int, float]:
    """What follows from three configuration files: height, width, and the steps and guidance that suit them."""
    index, unet, vae = (json.loads(Path(file).read_text()) for file in files)
    found = index["_class_name"]
    wanted = _MODELS[model].pipeline if model else found
    # On the Hub, PyTorch's weights may lie beside Flax's, and then the index may name PyTorch's class.
    if found not in (wanted, wanted.removeprefix("Flax")):
        raise RuntimeError(
            f"{name} is made for {found}, and this chapter teaches {wanted}: set {CHECKPOINT_VARIABLE} to "
            f"{_MODELS[model].bundled} or a different checkpoint for that, or unset it."
        )
    pixels = unet["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
    usual = (25, 5.0) if "XL" in found else (50, 7.5)
    return pixels, pixels, *((15, 3.0) if pixels < 256 else usual)  # 30 steps get no more right: benchmarks/steps.json
