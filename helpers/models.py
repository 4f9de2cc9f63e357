"""Where a model lies, and which one it is: from a folder, a bundled checkpoint or the Hub."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, errors, snapshot_download

from helpers.hub_token import has_token, without_passwords
from helpers.places import find_data

FLAX_WEIGHTS = "unet/diffusion_flax_model.msgpack"  # every pipeline with Flax weights has this file
CONFIGURATION = ("model_index.json", "*/config.json")  # what says what a model is, a few kilobytes
NO_WEIGHTS = ("*.json", "*.txt")  # all but the parameters, a few megabytes
LARGEST_CONFIGURATION = 10**7  # bytes


@dataclass(frozen=True)
class Model:
    """What the course knows of an architecture: that of Stable Diffusion 1 and 2, XL, or FLUX.2."""

    pipeline: str  # the name of its class, which may lack "Flax"
    bundled: str  # a small checkpoint of this architecture
    hub_id: str
    revision: str
    # GiB on each device: parameters, temporaries and some room; docs/real-models.md has the sources
    memory: int
    denoiser: str = "unet"  # the folder of the part that is asked at every step
    weights: str = FLAX_WEIGHTS  # a file that every checkpoint of the course's own kind has


MODELS = {
    "sd": Model(
        pipeline="FlaxStableDiffusionPipeline",
        bundled="shapes-sd",
        hub_id="CompVis/stable-diffusion-v1-4",
        revision="bf16",
        memory=6,
    ),
    "sdxl": Model(
        pipeline="FlaxStableDiffusionXLPipeline",
        bundled="shapes-sdxl",
        hub_id="stabilityai/stable-diffusion-xl-base-1.0",
        revision="main",
        memory=14,
    ),
    "flux2": Model(
        pipeline="Flux2KleinPipeline",
        bundled="shapes-flux2",
        hub_id="black-forest-labs/FLUX.2-klein-4B",
        revision="main",
        memory=15,  # lab/records/ask/flux2.json
        denoiser="transformer",
        weights="transformer/diffusion_pytorch_model.safetensors",
    ),
}


def bundled_names() -> list[str]:
    """Return the names of the checkpoints that come with the course."""
    names = []
    for weights in sorted({model.weights for model in MODELS.values()}):
        files = find_data("checkpoints").glob(f"*/{weights}")
        names += [file.parents[1].name for file in files]
    return sorted(names)


def find_local(name: str | Path) -> Path | None:
    """Return the folder of a bundled checkpoint, or the one of that path; None if it is neither."""
    if str(name) in bundled_names():
        return find_data("checkpoints") / name
    return Path(name) if Path(name).is_dir() else None


def find_model(
    name: str | Path,
    only: Sequence[str] | None = None,
    variant: str | None = None,
    flax: bool = False,
) -> Path:
    """Return the folder of a model in diffusers' format, which comes from the Hub if need be.

    Builds on ``huggingface_hub.snapshot_download``, which keeps what it downloads.

    Parameters
    ----------
    name : str or Path
        A folder; the name of a bundled checkpoint; or a Hub id, owner/name, with @revision behind
        it if you like.
    only : sequence of str, optional
        Patterns for the names of the files that are needed, such as ``["tokenizer/*"]``; by default
        all that a model is loaded from. Of a folder on this machine nothing is left out.
    variant : str, optional
        The word in the names of the files with parameters, such as "fp16". Parts that have no files
        without such a word are downloaded with those that they have.
    flax : bool
        Whether parameters may be Flax's, too.

    Raises
    ------
    RuntimeError
        If there is nothing of this name, or the Hub does not give it or cannot be reached.

    Examples
    --------
    >>> find_model("shapes-sd").name
    'shapes-sd'
    """
    folder = find_local(name)
    if folder:
        return folder
    hub_id, revision = split_hub_id(str(name))
    unwanted = ["safety_checker/*", "*non_ema*"]
    may_lack_parts = only is None and not variant
    if only is None:
        only = list(NO_WEIGHTS)
        if variant:
            only += [f"*{variant}*.safetensors"]
        else:
            only += ["*/*model.safetensors", "*/*-of-*.safetensors", "*pytorch_model.safetensors"]
            unwanted += ["*.fp16*"]
        if flax:
            only += ["*.msgpack"]
    with asking_hub(hub_id, revision):
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=only, ignore_patterns=unwanted
        )
        lacking = parts_without_weights(Path(folder)) if may_lack_parts else []
        if lacking:
            rest = [f"{part}/*.safetensors" for part in lacking]
            snapshot_download(
                hub_id, revision=revision, allow_patterns=rest, ignore_patterns=unwanted[:2]
            )
    return Path(folder)


def parts_without_weights(folder: Path) -> list[str]:
    """Return the parts of a folder in diffusers' format that have a configuration alone."""
    parts = [file.parent for file in sorted(folder.glob("*/config.json"))]
    return [
        part.name
        for part in parts
        if not any(file.suffix in (".safetensors", ".msgpack") for file in part.iterdir())
    ]


def split_hub_id(name: str) -> tuple[str, str | None]:
    """Return the Hub id and the revision in owner/name@revision; None where no revision is said.

    Raises
    ------
    RuntimeError
        If it is none.
    """
    hub_id, _, revision = name.partition("@")
    if hub_id.count("/") != 1 or hub_id.startswith((".", "/", "~")):
        raise RuntimeError(
            f"{name} is no folder, no Hub id (owner/name), and no bundled checkpoint "
            f"({', '.join(bundled_names())}): correct it."
        )
    return hub_id, revision or None


def hub_name(hub_id: str, revision: str | None) -> str:
    """Return what a repository is called in a sentence."""
    return f"{hub_id} at revision {revision!r}" if revision else hub_id


@contextmanager
def asking_hub(hub_id: str, revision: str | None) -> Iterator[None]:
    """Let the Hub's client know the token of this runtime, and turn its errors into a sentence."""
    has_token()
    name = hub_name(hub_id, revision)
    no_network = (
        f"{name} cannot be had, as the Hugging Face Hub cannot be reached (is the internet "
        "switched on?)"
    )
    try:
        yield
    except errors.LocalEntryNotFoundError:  # of a whole repository: it is not here, either
        raise RuntimeError(no_network) from None
    except errors.HfHubHTTPError as error:
        page = f"{without_passwords(constants.ENDPOINT)}/{hub_id}"
        raise RuntimeError(
            f"The Hub does not give {name} ({type(error).__name__}): look at {page}, and run "
            "`hf auth login` if it is private, or if you have to accept its licence."
        ) from error
    except (OSError, errors.HTTPError):  # of the HTTP client, which differs from version to version
        raise RuntimeError(no_network) from None


def read_configuration(file: Path) -> dict:
    """Read a configuration file of a folder in diffusers' format.

    Raises
    ------
    RuntimeError
        If it is missing or damaged.
    """
    if not file.is_file():
        raise RuntimeError(f"{file} is missing: give a whole folder in diffusers' format.")
    size = file.stat().st_size
    if size > LARGEST_CONFIGURATION:
        raise RuntimeError(
            f"{file} has {size / 1e6:.0f} MB, which no configuration has: get it again."
        )
    try:
        options = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # the latter if it is nested without end
        raise RuntimeError(f"{file} is damaged ({error}): get it again.") from None
    if not isinstance(options, dict):
        raise RuntimeError(f"{file} is damaged (it has no names): get it again.")
    return options


def read_index(folder: Path) -> dict:
    """Read the ``model_index.json`` of a folder, which names the classes of a pipeline's parts."""
    return read_configuration(folder / "model_index.json")


def which_model(folder: str | Path) -> str:
    """Return which model a folder in diffusers' format holds: a key of ``MODELS``.

    Raises
    ------
    RuntimeError
        If the folder has no ``model_index.json``, or it is for a different pipeline.

    Examples
    --------
    >>> which_model(find_model("shapes-sdxl"))
    'sdxl'
    """
    folder = Path(folder)
    pipeline = read_index(folder).get("_class_name")
    for name, model in MODELS.items():
        # Where PyTorch's weights lie beside Flax's, the index may name PyTorch's class.
        if pipeline in (model.pipeline, model.pipeline.removeprefix("Flax")):
            return name
    known = ", ".join(model.pipeline.removeprefix("Flax") for model in MODELS.values())
    raise RuntimeError(f"{folder} is made for {pipeline}, and this course has models for {known}.")
