"""Which weights a chapter loads: Stable Diffusion where there is hardware for it, the bundled checkpoint elsewhere."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from helpers.tokens import find_token

CHECKPOINT_VARIABLE = "TUTORIAL_CHECKPOINT"
# Installed from a wheel, the checkpoints lie inside the package; in a clone of the repository, beside it.
_FOLDERS = (Path(__file__).with_name("bundled"), Path(__file__).parents[1] / "checkpoints")
_WEIGHTS = "unet/diffusion_flax_model.msgpack"
_ALL_WEIGHTS = (_WEIGHTS, "vae/diffusion_flax_model.msgpack", "text_encoder/flax_model.msgpack")
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
        Picture size in pixels.
    num_inference_steps, guidance_scale : int, float
        Sampling settings that suit these weights.
    prompts : tuple of str
        Eight examples of what they can draw.
    license : str
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
    license: str
    download_bytes: int


@dataclass(frozen=True)
class _Model:
    """A model that the course is about: its place on the Hub, and its small bundled relative."""

    hub_id: str
    revision: str
    license: str
    memory: int  # bytes on each device: parameters and temporaries, by the TPU compiler, and some room
    bundled: str


_MODELS = {
    "sd": _Model("CompVis/stable-diffusion-v1-4", "bf16", "CreativeML OpenRAIL-M", 6 * 2**30, "shapes-sd"),
}


def pick_checkpoint(model: str = "sd") -> Checkpoint:
    """Choose the weights that fit this machine, and say in one line what was chosen.

    On a TPU or GPU with enough memory these are Stable Diffusion's own, in bfloat16; elsewhere, and where the Hub
    cannot be reached, the checkpoint that comes with this course. The environment variable ``TUTORIAL_CHECKPOINT``
    decides otherwise: the name of a bundled checkpoint, the path of a folder in diffusers' format with Flax weights,
    or a Hub id, with ``@revision`` if need be.

    Parameters
    ----------
    model : {"sd"}
        The architecture that the chapter teaches.

    Returns
    -------
    Checkpoint
        Nothing is loaded or downloaded yet but two small configuration files.

    Raises
    ------
    ValueError
        If ``model`` is unknown.
    RuntimeError
        If the checkpoint named by ``TUTORIAL_CHECKPOINT`` cannot be had; one sentence says why and what to do.

    Examples
    --------
    >>> checkpoint = pick_checkpoint("sd")  # doctest: +ELLIPSIS
    This is a CPU run: using the bundled checkpoint shapes-sd, ...
    >>> checkpoint.height, checkpoint.width
    (64, 64)
    """
    if model not in _MODELS:
        raise ValueError(f"There is no model {model!r} in this course: choose one of {', '.join(_MODELS)}.")
    standard = _MODELS[model]
    choice = os.environ.get(CHECKPOINT_VARIABLE)
    if choice:
        checkpoint = _named(choice, model)
        print(f"{CHECKPOINT_VARIABLE} is set: using {checkpoint.name}.")
        return checkpoint

    if jax.default_backend() == "cpu":
        reason = "This is a CPU run"
    elif (memory := _device_memory()) < standard.memory:
        has = f"{memory / 2**30:.1f} GiB" if memory else "an unknown amount"
        reason = f"{standard.hub_id} takes {standard.memory / 2**30:.0f} GiB of memory, and each device has {has}"
    else:
        try:
            checkpoint = _from_hub(standard.hub_id, standard.revision, model)
        except RuntimeError as error:
            reason = str(error).rstrip(".")
        else:
            print(f"Using {checkpoint.name}, {checkpoint.download_bytes / 1e9:.1f} GB to download.")
            return checkpoint
    checkpoint = bundled_checkpoint(standard.bundled)
    print(f"{reason}: using the bundled checkpoint {checkpoint.name}, which draws shapes on flat backgrounds.")
    return checkpoint


def _device_memory() -> int:
    """Bytes on each device; 0 where the device does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def bundled_checkpoint(name: str) -> Checkpoint:
    """Describe a checkpoint that comes with the course.

    Raises
    ------
    ValueError
        If there is none of that name; the message lists those there are.

    Examples
    --------
    >>> bundled_checkpoint("shapes-sd").download_bytes
    0
    """
    names = bundled_names()
    if name not in names:
        raise ValueError(f"No bundled checkpoint is called {name!r}: choose one of {', '.join(names)}.")
    return _from_folder(next(place / name for place in _FOLDERS if (place / name / _WEIGHTS).exists()), name)


def bundled_names() -> list[str]:
    return sorted({folder.name for place in _FOLDERS for folder in place.glob("*/") if (folder / _WEIGHTS).exists()})


def _named(choice: str, model: str) -> Checkpoint:
    """The checkpoint that ``TUTORIAL_CHECKPOINT`` names."""
    if choice in bundled_names():
        return bundled_checkpoint(choice)
    if Path(choice).is_dir():
        return _from_folder(Path(choice), choice)
    hub_id, _, revision = choice.partition("@")
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise RuntimeError(
            f"{CHECKPOINT_VARIABLE} is {choice!r}: no folder, no Hub id (owner/name), and no bundled checkpoint "
            f"({', '.join(bundled_names())}): correct it or unset it."
        )
    return _from_hub(hub_id, revision or "main", model)


def _from_folder(folder: Path, name: str) -> Checkpoint:
    needed = (_WEIGHTS, "unet/config.json", "vae/config.json")
    missing = [file for file in needed if not (folder / file).exists()]
    if missing:
        raise RuntimeError(
            f"The folder {folder} holds no pipeline with Flax weights, {', '.join(missing)} being absent: choose one "
            "that a Flax pipeline's save_pretrained wrote."
        )
    configs = {part: json.loads((folder / part / "config.json").read_text()) for part in ("unet", "vae")}
    ours = name in bundled_names()
    return Checkpoint(
        name=name,
        source=str(folder),
        revision=None,
        dtype=jnp.bfloat16 if folder.name.endswith("-bf16") else jnp.float32,
        license="Apache-2.0" if ours else "unknown",
        download_bytes=0,
        **_settings(configs, prompts=_SHAPE_PROMPTS if ours else _PHOTO_PROMPTS),
    )


def _from_hub(hub_id: str, revision: str, model: str) -> Checkpoint:
    """Ask the Hub, or its cache, for a checkpoint without downloading its weights."""
    where, token = f"{hub_id} at revision {revision!r}", find_token()
    cached = all(isinstance(try_to_load_from_cache(hub_id, file, revision=revision), str) for file in _ALL_WEIGHTS)
    try:
        size = 0 if cached else _download_bytes(hub_id, revision)
        configs = {
            part: json.loads(Path(hf_hub_download(hub_id, f"{part}/config.json", revision=revision)).read_text())
            for part in ("unet", "vae")
        }
    except GatedRepoError:
        raise RuntimeError(
            f"{where} is gated: accept its licence at {constants.ENDPOINT}/{hub_id} and log in with `hf auth login`."
        ) from None
    except RevisionNotFoundError:
        raise RuntimeError(f"{hub_id} has no revision {revision!r}: look at its branches on the Hub.") from None
    except RepositoryNotFoundError:
        raise RuntimeError(
            f"The Hub has no repository {hub_id}, or it is private: check the name, or log in with `hf auth login`."
        ) from None
    except LocalEntryNotFoundError:
        raise RuntimeError(_NO_HUB.format(where)) from None
    except EntryNotFoundError as error:
        raise RuntimeError(f"{where} is no pipeline in diffusers' format: {error}") from None
    except HfHubHTTPError as error:
        asked = f", asked with the token in {token}" if token else ""
        raise RuntimeError(f"The Hub does not give {where}{asked}: {str(error).splitlines()[0]}") from None
    except OSError:  # what requests raises when it gets no answer
        raise RuntimeError(_NO_HUB.format(where)) from None
    free = shutil.disk_usage(_existing(Path(constants.HF_HUB_CACHE))).free
    if size > free:
        raise RuntimeError(
            f"{where} needs {size / 1e9:.1f} GB of disk, but {constants.HF_HUB_CACHE} has {free / 1e9:.1f} GB free: "
            "make room, or set HF_HOME to a larger disk."
        )
    standard = _MODELS[model]
    return Checkpoint(
        name=where,
        source=hub_id,
        revision=revision,
        dtype=jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16,
        license=standard.license if hub_id == standard.hub_id else "see its page on the Hub",
        download_bytes=size,
        **_settings(configs, prompts=_PHOTO_PROMPTS),
    )


_NO_HUB = "{} cannot be had, as the Hugging Face Hub cannot be reached (is the internet switched on in this runtime?)"


def _download_bytes(hub_id: str, revision: str) -> int:
    """Size of the Flax weights of a pipeline, without downloading them."""
    api = HfApi()
    files = api.model_info(hub_id, revision=revision, files_metadata=True, timeout=10).siblings or []
    api.auth_check(hub_id)
    if _WEIGHTS not in {file.rfilename for file in files}:
        raise EntryNotFoundError(f"it has no Flax weights ({_WEIGHTS}).")
    return sum(file.size or 0 for file in files if file.rfilename.endswith(".msgpack"))


def _existing(folder: Path) -> Path:
    """The folder, or the closest one above it that exists."""
    return folder if folder.exists() else _existing(folder.parent)


def _settings(configs: dict, prompts: tuple[str, ...]) -> dict:
    """What follows from the configuration files: the picture's size, and steps and guidance that suit it."""
    pixels = configs["unet"]["sample_size"] * 2 ** (len(configs["vae"]["block_out_channels"]) - 1)
    small = pixels < 256
    return {
        "height": pixels,
        "width": pixels,
        "num_inference_steps": 30 if small else 50,
        "guidance_scale": 3.0 if small else 7.5,
        "prompts": prompts,
    }
