"""Which weights a chapter loads: those of a real model, or a small checkpoint of the course."""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from huggingface_hub import HfApi, constants, try_to_load_from_cache

from helpers.models import (
    CONFIGURATION,
    FLAX_WEIGHTS,
    MODELS,
    asking_hub,
    bundled_names,
    find_local,
    find_model,
    hub_name,
    read_configuration,
    read_index,
    split_hub_id,
    which_model,
)
from helpers.places import find_data
from helpers.safety import repair_safety_checker

CHECKPOINT_VARIABLE = "TUTORIAL_CHECKPOINT"
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
    model : str
        Which one it is: a key of ``helpers.models.MODELS``.
    source, revision : str, str or None
        The first argument of ``from_pretrained`` (a folder or a Hub id), and its ``revision``.
    dtype : dtype
        What to compute in: bfloat16 on accelerators, and float32 on a CPU, which has no fast
        bfloat16, and for every bundled checkpoint.
    height, width : int
        Image size in pixels.
    num_inference_steps, guidance_scale : int, float
        Sampling settings that suit these weights; a scale of 1 is no guidance.
    prompts : tuple of str
        Eight examples of what they can draw.
    has_safety_checker : bool
        Whether a model that looks at finished images comes with them.
    """

    name: str
    model: str
    source: str
    revision: str | None
    dtype: jnp.dtype
    height: int
    width: int
    num_inference_steps: int
    guidance_scale: float
    prompts: tuple[str, ...]
    has_safety_checker: bool

    @property
    def is_bundled(self) -> bool:
        """Say whether these come with the course, and draw nothing but shapes."""
        return _is_bundled(Path(self.source))

    @property
    def options(self) -> dict[str, None]:
        """Return what ``from_pretrained`` of Stable Diffusion needs, if there is no safety checker.

        XL's pipeline knows no safety checker, and does not take these.
        """
        if self.has_safety_checker:
            return {}
        return {"safety_checker": None, "feature_extractor": None}


def _is_bundled(folder: Path) -> bool:
    """Say whether a folder is one of the course's own checkpoints."""
    return folder.resolve().parent == find_data("checkpoints").resolve()


def pick_checkpoint(model: str = "sd", safetensors: bool = False) -> Checkpoint:
    """Choose the weights that fit this machine, and say in one line what was chosen.

    On a TPU or GPU with enough memory these are the real model's own, for bfloat16. On a CPU, or if
    the Hub cannot be reached, it is the checkpoint that comes with this course. The environment
    variable ``TUTORIAL_CHECKPOINT`` decides otherwise: the name of a bundled checkpoint, or the
    word ``bundled`` for the one that the chapter has; the path of a folder in diffusers' format
    with Flax weights; or a Hub id, with ``@revision`` if need be.

    Parameters
    ----------
    model : {"sd", "sdxl", "flux2"}
        The architecture that the chapter teaches: that of Stable Diffusion 1, XL, or FLUX.2-klein.
    safetensors : bool
        Whether weights may be safetensors, too, as the chapters from 9 on read them. FLUX.2-klein
        has no others.

    Returns
    -------
    Checkpoint
        Nothing is loaded or downloaded yet but a few small configuration files.

    Raises
    ------
    ValueError
        If ``model`` is unknown.
    RuntimeError
        If the checkpoint that ``TUTORIAL_CHECKPOINT`` names cannot be had, or has a different
        architecture: one sentence says why and what to do.

    Examples
    --------
    >>> checkpoint = pick_checkpoint("sd")  # doctest: +ELLIPSIS
    This is a CPU run: using the bundled checkpoint shapes-sd, ...
    >>> checkpoint.height, checkpoint.width
    (64, 64)
    """
    if model not in MODELS:
        raise ValueError(
            f"There is no model {model!r} in this course: choose one of {', '.join(MODELS)}."
        )
    choice = os.environ.get(CHECKPOINT_VARIABLE)
    if choice == "bundled":
        choice = MODELS[model].bundled
    if choice:
        checkpoint = read_checkpoint(choice, safetensors, model)
        print(f"{CHECKPOINT_VARIABLE} is set: using {checkpoint.name}.")
        return _ready(checkpoint)

    real = MODELS[model]
    needed = real.memory
    memory = _device_memory() / 2**30
    if jax.default_backend() == "cpu":
        reason = "This is a CPU run"
    elif memory == 0:
        reason = f"{real.hub_id} takes {needed} GiB of memory, and the devices do not tell theirs"
    elif memory < needed:
        reason = f"{real.hub_id} takes {needed} GiB of memory, and each device has {memory:.1f} GiB"
    else:
        try:
            checkpoint = read_checkpoint(f"{real.hub_id}@{real.revision}", safetensors)
            print(f"Using {checkpoint.name}.")
            return _ready(checkpoint)
        except RuntimeError as error:
            reason = str(error).rstrip(".")
    print(
        f"{reason}: using the bundled checkpoint {real.bundled}, which draws shapes on flat "
        "backgrounds."
    )
    return bundled_checkpoint(real.bundled)


def bundled_checkpoint(name: str) -> Checkpoint:
    """Describe a checkpoint that comes with the course.

    Raises
    ------
    ValueError
        If none has that name; the message lists those that there are.

    Examples
    --------
    >>> bundled_checkpoint("shapes-sd").num_inference_steps
    15
    """
    if name not in bundled_names():
        raise ValueError(
            f"No bundled checkpoint is called {name!r}: choose one of {', '.join(bundled_names())}."
        )
    return _describe(find_data("checkpoints") / name, name)


def read_checkpoint(name: str, safetensors: bool = True, chapter: str | None = None) -> Checkpoint:
    """Describe a model that somebody has named, as ``find_model`` takes it.

    Of a repository on the Hub only the configuration is downloaded. How large the rest is is
    printed, unless it is here already.

    Parameters
    ----------
    name : str
        A folder, the name of a bundled checkpoint, or a Hub id.
    safetensors : bool
        Whether weights may be safetensors.
    chapter : {"sd", "sdxl", "flux2"}, optional
        The model that it has to be, as a chapter teaches that one.

    Raises
    ------
    RuntimeError
        If there is no such model, it is a different one than the chapter's, its weights cannot be
        read, or the disk has no room for them.
    """
    folder = find_local(name)
    if folder:
        files = [file.relative_to(folder).as_posix() for file in folder.rglob("*.*")]
        model = which_model(folder)
        _check_architecture(name, model, chapter)
        _check_weights(f"The folder {name}", files, model, safetensors)
        return _describe(folder, name)

    hub_id, revision = split_hub_id(name)
    revision = revision or "main"
    name = hub_name(hub_id, revision)
    sizes = {}
    with asking_hub(hub_id, revision):
        # If the largest file is in the cache, the rest is, too, and a network is not needed.
        largest = {model.weights for model in MODELS.values()}
        cached = [try_to_load_from_cache(hub_id, file, revision=revision) for file in largest]
        if not any(isinstance(file, str) for file in cached):
            info = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=10)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    folder = find_model(f"{hub_id}@{revision}", only=CONFIGURATION)
    if not (folder / "model_index.json").is_file():
        raise RuntimeError(
            f"{name} holds no pipeline in diffusers' format: choose a different one."
        )
    model = which_model(folder)
    _check_architecture(name, model, chapter)
    if sizes:
        kind = _check_weights(name, sizes, model, safetensors)
        size = sum(sizes[file] for file in sizes if "/" in file and file.endswith(kind))
        _check_disk(name, size)
        print(f"Loading {name} will download {size / 1e9:.1f} GB.")
    return _describe(folder, name, source=hub_id, revision=revision)


def download(checkpoint: Checkpoint, only: Sequence[str] | None = None) -> Path:
    """Return the folder with a checkpoint's files, which come from the Hub if they are not here.

    Of several kinds of weights in a repository this takes the full ones, as msgpack and
    safetensors. With ``only``, it takes the files whose names match, such as ``["tokenizer/*"]``.

    Examples
    --------
    >>> sorted(path.name for path in download(bundled_checkpoint("shapes-sd")).glob("*er"))
    ['scheduler', 'text_encoder', 'tokenizer']
    """
    if checkpoint.revision is None:
        return Path(checkpoint.source)
    return find_model(f"{checkpoint.source}@{checkpoint.revision}", only, flax=True)


def _ready(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint, and let its safety checker run on this version of JAX."""
    if checkpoint.has_safety_checker and jax.__version_info__ >= (0, 10):
        repair_safety_checker()
    return checkpoint


def _device_memory() -> int:
    """Return the bytes on each device; 0 if the device does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0)


def _describe(
    folder: Path, name: str, source: str | None = None, revision: str | None = None
) -> Checkpoint:
    """Describe a folder in diffusers' format, which may be a part of a repository on the Hub."""
    is_bundled = _is_bundled(folder)
    dtype = jnp.float32 if is_bundled else _suitable_dtype()
    model = which_model(folder)
    pixels, steps, guidance = _suitable_settings(folder, model)
    _, safety_checker = read_index(folder).get("safety_checker") or (None, None)
    return Checkpoint(
        name=name,
        model=model,
        source=source or str(folder),
        revision=revision,
        dtype=dtype,
        height=pixels,
        width=pixels,
        num_inference_steps=steps,
        guidance_scale=guidance,
        prompts=_SHAPE_PROMPTS if is_bundled else _PHOTO_PROMPTS,
        has_safety_checker=safety_checker is not None,
    )


def _suitable_dtype() -> jnp.dtype:
    """Return what a real model computes in on this machine."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _check_architecture(name: str, model: str, chapter: str | None) -> None:
    """Raise an error if a chapter teaches another model."""
    if chapter in (None, model):
        return
    raise RuntimeError(
        f"{name} is made for {MODELS[model].pipeline}, and this chapter teaches "
        f"{MODELS[chapter].pipeline}: set {CHECKPOINT_VARIABLE} to {MODELS[chapter].bundled} or a "
        "different checkpoint for that, or unset it."
    )


def _check_weights(name: str, files: Collection[str], model: str, safetensors: bool) -> str:
    """Return the ending of the weights; raise an error if the chapter cannot read them."""
    if FLAX_WEIGHTS in files:
        return ".msgpack"
    kinds = "safetensors"
    if MODELS[model].weights == FLAX_WEIGHTS:
        kinds = f"Flax weights or safetensors ({FLAX_WEIGHTS} is missing)"
    start = f"{MODELS[model].denoiser}/"
    if not any(file.startswith(start) and file.endswith(".safetensors") for file in files):
        raise RuntimeError(f"{name} holds no pipeline with {kinds}: choose a different one.")
    if not safetensors:
        raise RuntimeError(
            f"{name} has safetensors, which the chapters from 9 on read, and no Flax weights, "
            "which this chapter needs: choose a different one here."
        )
    return ".safetensors"


def _check_disk(name: str, size: int) -> None:
    """Raise an error if so many bytes do not fit where the Hub's client keeps its files."""
    free = free_disk(constants.HF_HUB_CACHE)
    if size > free:
        raise RuntimeError(
            f"{name} needs {size / 1e9:.1f} GB of disk, but {constants.HF_HUB_CACHE} has "
            f"{free / 1e9:.1f} GB free: make room, or set HF_HOME to a larger disk."
        )


def free_disk(folder: str | Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing_parent(folder)).free


def existing_parent(folder: str | Path) -> Path:
    """Return a folder, or the nearest one around it that exists."""
    place = Path(folder).absolute()
    while not place.exists():
        place = place.parent
    return place


def _suitable_settings(folder: Path, model: str) -> tuple[int, int, float]:
    """Return height and width in pixels, steps, and guidance scale, from configuration files.

    A UNet's own names the size of the latents, and FLUX.2's VAE's that of the images.
    """

    def read_part(part: str) -> dict:
        return read_configuration(folder / part / "config.json")

    vae = read_part("vae")
    if model == "flux2":
        pixels = vae["sample_size"]
    else:
        # Every block of the VAE but the last halves the height and the width.
        pixels = read_part("unet")["sample_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
    return pixels, *suitable_steps(model, pixels, bool(read_index(folder).get("is_distilled")))


def suitable_steps(model: str, pixels: int, is_distilled: bool = False) -> tuple[int, float]:
    """Return how many steps suit a model, and which guidance scale; at 1 there is no guidance.

    Parameters
    ----------
    model : str
        A key of `helpers.models.MODELS`.
    pixels : int
        The height and the width of the images that it was trained for.
    is_distilled : bool
        As ``model_index.json`` says of FLUX.2.
    """
    if model == "flux2":
        if is_distilled:
            return 4, 1.0
        if pixels < 256:  # lab/records/score/flux2.json
            return 8, 3.0
        return 50, 4.0
    if pixels < 256:  # more steps get no more images right: lab/records/score/sd.json
        return 15, 3.0
    return (25, 5.0) if model == "sdxl" else (50, 7.5)
