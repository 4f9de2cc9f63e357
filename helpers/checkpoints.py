"""Which weights a chapter loads: those of a real model, or a small checkpoint of the course."""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from huggingface_hub import (
    HfApi,
    constants,
    errors,
    hf_hub_download,
    snapshot_download,
    try_to_load_from_cache,
)

from helpers.hub_token import has_token
from helpers.places import find_data
from helpers.safety import repair_safety_checker

CHECKPOINT_VARIABLE = "TUTORIAL_CHECKPOINT"
FLAX_WEIGHTS = "unet/diffusion_flax_model.msgpack"  # every pipeline with Flax weights has this file
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
        """Whether these come with the course, and draw nothing but shapes."""
        return _is_bundled(Path(self.source))

    @property
    def options(self) -> dict[str, None]:
        """What Stable Diffusion's ``from_pretrained`` needs besides, if there is no safety checker.

        XL's pipeline knows no safety checker, and does not take these.
        """
        if self.has_safety_checker:
            return {}
        return {"safety_checker": None, "feature_extractor": None}


def _is_bundled(folder: Path) -> bool:
    """Whether a folder is one of the course's own checkpoints."""
    return folder.resolve().parent == find_data("checkpoints").resolve()


@dataclass(frozen=True)
class _Model:
    """What the course knows of an architecture."""

    pipeline: str  # the name of its class
    bundled: str  # a small checkpoint of this architecture
    hub_id: str
    revision: str
    # GiB on each device: parameters, temporaries and some room; docs/real-models.md has the sources
    memory: int
    gpu_memory: int | None = None  # the same on a GPU, where it takes more
    denoiser: str = "unet"  # the folder of the part that is asked at every step
    weights: str = FLAX_WEIGHTS  # a file that every checkpoint of the course's own kind has


_MODELS = {
    "sd": _Model(
        pipeline="FlaxStableDiffusionPipeline",
        bundled="shapes-sd",
        hub_id="CompVis/stable-diffusion-v1-4",
        revision="bf16",
        memory=6,
    ),
    "sdxl": _Model(
        pipeline="FlaxStableDiffusionXLPipeline",
        bundled="shapes-sdxl",
        hub_id="stabilityai/stable-diffusion-xl-base-1.0",
        revision="main",
        memory=14,
    ),
    "flux2": _Model(
        pipeline="Flux2KleinPipeline",
        bundled="shapes-flux2",
        hub_id="black-forest-labs/FLUX.2-klein-4B",
        revision="main",
        memory=15,  # benchmarks/flux2.json
        # A GPU's compiler keeps the scores of attention in memory: 24 heads of 8,704 x 8,704 tokens
        # in an edit, in float32 and again in bfloat16.
        gpu_memory=26,
        denoiser="transformer",
        weights="transformer/diffusion_pytorch_model.safetensors",
    ),
}


def pick_checkpoint(
    model: str = "sd", safetensors: bool = False, choice: str | None = None
) -> Checkpoint:
    """Choose the weights that fit this machine, and say in one line what was chosen.

    On a TPU or GPU with enough memory these are the real model's own, for bfloat16. On a CPU, or if
    the Hub cannot be reached, it is the checkpoint that comes with this course. The environment
    variable ``TUTORIAL_CHECKPOINT`` decides otherwise: the name of a bundled checkpoint, the path
    of a folder in diffusers' format with Flax weights, or a Hub id, with ``@revision`` if need be.

    Parameters
    ----------
    model : {"sd", "sdxl", "flux2"}
        The architecture that the chapter teaches: that of Stable Diffusion 1, XL, or FLUX.2-klein.
    safetensors : bool
        Whether weights may be safetensors, too, as the chapters from 9 on read them. FLUX.2-klein
        has no others.
    choice : str, optional
        What decides in place of ``TUTORIAL_CHECKPOINT``, in the same words.

    Returns
    -------
    Checkpoint
        Nothing is loaded or downloaded yet but three small configuration files.

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
    if model not in _MODELS:
        raise ValueError(
            f"There is no model {model!r} in this course: choose one of {', '.join(_MODELS)}."
        )
    if choice:
        return _ready(_find(choice, model, safetensors))
    choice = os.environ.get(CHECKPOINT_VARIABLE)
    if choice:
        checkpoint = _find(choice, model, safetensors)
        print(f"{CHECKPOINT_VARIABLE} is set: using {checkpoint.name}.")
        return _ready(checkpoint)

    real = _MODELS[model]
    needed = real.memory
    if jax.default_backend() == "gpu" and real.gpu_memory:
        needed = real.gpu_memory
    memory = _device_memory() / 2**30
    if jax.default_backend() == "cpu":
        reason = "This is a CPU run"
    elif memory == 0:
        reason = f"{real.hub_id} takes {needed} GiB of memory, and the devices do not tell theirs"
    elif memory < needed:
        reason = f"{real.hub_id} takes {needed} GiB of memory, and each device has {memory:.1f} GiB"
    else:
        try:
            checkpoint = _from_hub(real.hub_id, real.revision, model, safetensors)
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
    return _from_folder(find_data("checkpoints") / name, name, _SHAPE_PROMPTS)


def bundled_names() -> list[str]:
    """The names of the checkpoints that come with the course."""
    names = []
    for weights in sorted({model.weights for model in _MODELS.values()}):
        files = find_data("checkpoints").glob(f"*/{weights}")
        names += [file.parents[1].name for file in files]
    return sorted(names)


def download(checkpoint: Checkpoint, only: list[str] | None = None) -> Path:
    """The folder with a checkpoint's files, which come from the Hub if they are not here yet.

    Builds on ``huggingface_hub.snapshot_download``, which keeps what it downloads. Of several
    kinds of weights in a repository this takes the full ones, as msgpack and safetensors. With
    ``only``, it takes the files whose names match, such as ``["tokenizer/*"]``.

    Examples
    --------
    >>> sorted(path.name for path in download(bundled_checkpoint("shapes-sd")).glob("*er"))
    ['scheduler', 'text_encoder', 'tokenizer']
    """
    if checkpoint.revision is None:
        return Path(checkpoint.source)
    folder = snapshot_download(
        checkpoint.source,
        revision=checkpoint.revision,
        allow_patterns=only
        or [
            "*.json",
            "*.txt",
            "*.msgpack",
            "*/*model.safetensors",
            "*/*-of-*.safetensors",
        ],
        ignore_patterns=["safety_checker/*", "*.fp16*", "*non_ema*"],
    )
    return Path(folder)


def find_folder(name: str | Path, weights: bool = True, variant: str | None = None) -> Path:
    """The folder of a model in diffusers' format that a command was given.

    Parameters
    ----------
    name : str or Path
        A folder; the name of a bundled checkpoint; or a Hub id, owner/name, with @revision behind
        it if you like. What is on the Hub is downloaded, and kept.
    weights : bool
        Whether parameters are needed. Without, a Hub id takes a few megabytes.
    variant : str, optional
        The word in the names of the files with parameters, such as "fp16".

    Raises
    ------
    RuntimeError
        If there is nothing of this name, or the Hub cannot be reached.
    """
    name = str(name)
    if Path(name).is_dir():
        return Path(name)
    if name in bundled_names():
        return Path(bundled_checkpoint(name).source)
    hub_id, revision = _split_hub_id(name, f"{name} is", "correct it")
    wanted = ["*.json", "*.txt"]
    unwanted = ["safety_checker/*", "*non_ema*"]
    if weights and variant:
        wanted += [f"*{variant}*.safetensors"]
    elif weights:
        wanted += ["*/*model.safetensors", "*/*-of-*.safetensors", "*pytorch_model.safetensors"]
        unwanted += ["*.fp16*"]
    has_token()  # from here on, the Hub's client knows it
    with _explain_hub_errors(name, hub_id):
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=wanted,
                ignore_patterns=unwanted,
            )
        )


def _split_hub_id(name: str, intro: str, advice: str) -> tuple[str, str | None]:
    """The Hub id and the revision in owner/name@revision; None where no revision is said.

    If it is none, a RuntimeError begins with ``intro`` and ends in ``advice``.
    """
    hub_id, _, revision = name.partition("@")
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise RuntimeError(
            f"{intro} no folder, no Hub id (owner/name), and no bundled checkpoint "
            f"({', '.join(bundled_names())}): {advice}."
        )
    return hub_id, revision or None


@contextmanager
def _explain_hub_errors(name: str, hub_id: str) -> Iterator[None]:
    """Turn errors of the Hub's client into one sentence."""
    no_network = (
        f"{name} cannot be had, as the Hugging Face Hub cannot be reached (is the internet "
        "switched on?)"
    )
    try:
        yield
    except errors.LocalEntryNotFoundError:  # of a whole repository: it is not here, either
        raise RuntimeError(no_network) from None
    except errors.HfHubHTTPError as error:
        raise RuntimeError(
            f"The Hub does not give {name} ({type(error).__name__}): look at "
            f"{constants.ENDPOINT}/{hub_id}, and run `hf auth login` if it is private, or if you "
            "have to accept its licence."
        ) from error
    except (OSError, errors.HTTPError):  # of the HTTP client, which differs from version to version
        raise RuntimeError(no_network) from None


def _ready(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint, whose safety checker runs on this version of JAX if it has one."""
    if checkpoint.has_safety_checker and jax.__version_info__ >= (0, 10):
        repair_safety_checker()
    return checkpoint


def _device_memory() -> int:
    """Bytes on each device; 0 if the device does not tell."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit", 0)


def _find(choice: str, model: str, safetensors: bool) -> Checkpoint:
    """The checkpoint that ``TUTORIAL_CHECKPOINT`` names."""
    if choice in bundled_names():
        checkpoint = bundled_checkpoint(choice)
        _check_architecture(choice, Path(checkpoint.source, "model_index.json"), model)
        return checkpoint
    if Path(choice).is_dir():
        names = [file.relative_to(choice).as_posix() for file in Path(choice).rglob("*.*")]
        _check_weights(f"The folder {choice}", names, model, safetensors)
        _check_architecture(choice, Path(choice, "model_index.json"), model)
        return _from_folder(Path(choice), choice, _PHOTO_PROMPTS)
    hub_id, revision = _split_hub_id(
        choice, f"{CHECKPOINT_VARIABLE} is {choice!r}:", "correct it or unset it"
    )
    return _from_hub(hub_id, revision or "main", model, safetensors)


def _from_folder(folder: Path, name: str, prompts: tuple[str, ...]) -> Checkpoint:
    """Describe a folder in diffusers' format."""
    dtype = jnp.float32 if _is_bundled(folder) else _suitable_dtype()
    pixels, steps, guidance = _suitable_settings(
        index=folder / "model_index.json",
        vae=folder / "vae" / "config.json",
        denoiser=folder / "unet" / "config.json",
    )
    return Checkpoint(
        name=name,
        source=str(folder),
        revision=None,
        dtype=dtype,
        height=pixels,
        width=pixels,
        num_inference_steps=steps,
        guidance_scale=guidance,
        prompts=prompts,
        has_safety_checker=_has_safety_checker(folder / "model_index.json"),
    )


def _from_hub(hub_id: str, revision: str, model: str, safetensors: bool) -> Checkpoint:
    """Describe a repository on the Hub, of which only the configuration is downloaded."""
    name = f"{hub_id} at revision {revision!r}"
    weights = _MODELS[model].weights
    has_token()  # from here on, the Hub's client knows it
    size = 0
    with _explain_hub_errors(name, hub_id):
        # If the largest file is in the cache, the rest is, too, and a network is not needed.
        if not isinstance(try_to_load_from_cache(hub_id, weights, revision=revision), str):
            info = HfApi().model_info(hub_id, revision=revision, files_metadata=True, timeout=10)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            kind = _check_weights(name, sizes, model, safetensors)
            size = sum(sizes[file] for file in sizes if "/" in file and file.endswith(kind))
            _check_disk(name, size)
        index = hf_hub_download(hub_id, "model_index.json", revision=revision)
        _check_architecture(name, Path(index), model)
        part = _MODELS[model].denoiser
        denoiser = hf_hub_download(hub_id, f"{part}/config.json", revision=revision)
        vae = hf_hub_download(hub_id, "vae/config.json", revision=revision)
    pixels, steps, guidance = _suitable_settings(Path(index), Path(vae), Path(denoiser))
    if size:
        print(f"Loading {name} will download {size / 1e9:.1f} GB.")
    return Checkpoint(
        name=name,
        source=hub_id,
        revision=revision,
        dtype=_suitable_dtype(),
        height=pixels,
        width=pixels,
        num_inference_steps=steps,
        guidance_scale=guidance,
        prompts=_PHOTO_PROMPTS,
        has_safety_checker=_has_safety_checker(Path(index)),
    )


def _suitable_dtype() -> jnp.dtype:
    """What a real model computes in on this machine."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def _check_weights(name: str, files: Collection[str], model: str, safetensors: bool) -> str:
    """The ending of the weights among these files; an error if the chapter cannot read them."""
    if FLAX_WEIGHTS in files:
        return ".msgpack"
    kinds = "safetensors"
    if _MODELS[model].weights == FLAX_WEIGHTS:
        kinds = f"Flax weights or safetensors ({FLAX_WEIGHTS} is missing)"
    start = f"{_MODELS[model].denoiser}/"
    if not any(file.startswith(start) and file.endswith(".safetensors") for file in files):
        raise RuntimeError(f"{name} holds no pipeline with {kinds}: choose a different one.")
    if not safetensors:
        raise RuntimeError(
            f"{name} has safetensors, which the chapters from 9 on read, and no Flax weights, "
            "which this chapter needs: choose a different one here."
        )
    return ".safetensors"


def _check_disk(name: str, size: int) -> None:
    """An error if so many bytes do not fit where the Hub's client keeps its files."""
    free = free_disk(constants.HF_HUB_CACHE)
    if size > free:
        raise RuntimeError(
            f"{name} needs {size / 1e9:.1f} GB of disk, but {constants.HF_HUB_CACHE} has "
            f"{free / 1e9:.1f} GB free: make room, or set HF_HOME to a larger disk."
        )


def free_disk(folder: str | Path) -> int:
    """Bytes that are free on the disk of a folder, which need not exist yet."""
    place = Path(folder)
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _check_architecture(name: str, index: Path, model: str) -> None:
    """An error unless ``model_index.json`` names the pipeline of this model."""
    found = json.loads(index.read_text(encoding="utf-8"))["_class_name"]
    wanted = _MODELS[model].pipeline
    # Where PyTorch's weights lie beside Flax's, the index may name PyTorch's class.
    if found not in (wanted, wanted.removeprefix("Flax")):
        raise RuntimeError(
            f"{name} is made for {found}, and this chapter teaches {wanted}: set "
            f"{CHECKPOINT_VARIABLE} to {_MODELS[model].bundled} or a different checkpoint for "
            "that, or unset it."
        )


def _has_safety_checker(index: Path) -> bool:
    """Whether ``model_index.json`` names a class for a safety checker."""
    _, kind = json.loads(index.read_text(encoding="utf-8")).get("safety_checker") or (None, None)
    return kind is not None


def _suitable_settings(index: Path, vae: Path, denoiser: Path) -> tuple[int, int, float]:
    """Height and width in pixels, steps, and guidance scale, from configuration files.

    A UNet's own names the size of the latents, and FLUX.2's VAE's that of the images.
    """
    pipeline = json.loads(index.read_text(encoding="utf-8"))
    autoencoder = json.loads(vae.read_text(encoding="utf-8"))
    if pipeline["_class_name"] == _MODELS["flux2"].pipeline:
        pixels = autoencoder["sample_size"]
        if pipeline.get("is_distilled"):
            return pixels, 4, 1.0
        if pixels < 256:  # benchmarks/flow.json
            return pixels, 8, 3.0
        return pixels, 50, 4.0
    latent_side = json.loads(denoiser.read_text(encoding="utf-8"))["sample_size"]
    # Every block of the VAE but the last halves the height and the width.
    pixels = latent_side * 2 ** (len(autoencoder["block_out_channels"]) - 1)
    if pixels < 256:  # more steps get no more images right: benchmarks/steps.json
        return pixels, 15, 3.0
    if "XL" in pipeline["_class_name"]:
        return pixels, 25, 5.0
    return pixels, 50, 7.5
