"""Reading and writing a model in a folder in diffusers' format."""

import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from course.model.configs import part_class
from course.model.files import (
    check_dtype,
    check_readable,
    find_inside,
    load_parts,
    read_json,
    read_parts,
    read_settings,
    save_parts,
    to_json,
    write_json,
    write_settings,
)
from course.model.tokens import check_vocabulary
from course.sd.configs import SCHEDULERS, Config, ScheduleConfig, read_config
from course.sd.parameters import parameter_shapes
from course.sd.tokenizer import Tokenizer, read_encoder

# What files have and nothing here reads: the numbers from 0 to 76, in files from before 2023.
POSITION_IDS = "text_model.embeddings.position_ids"


def load(
    folder: str | Path,
    dtype: Any = jnp.float32,
    sharding: jax.sharding.Sharding | dict | None = None,
    variant: str | None = None,
) -> tuple[dict[str, dict[str, jax.Array]], Config, Tokenizer]:
    """Read a model from a folder in diffusers' format, with safetensors or Flax' msgpack.

    Names and shapes are compared first. Then the numbers go from the files to the devices, one
    parameter at a time.

    Parameters
    ----------
    folder : str or Path
        With ``model_index.json`` and a folder for each part.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16. Samplers and norms compute in float32 in
        any case.
    sharding : jax.sharding.Sharding or dict, optional
        Where parameters lie: a sharding for all, or one for each, as ``course.sd.shardings`` gives
        them.
    variant : str, optional
        The word that the files have in their names, such as "fp16".

    Returns
    -------
    params : dict
        A dictionary of parameters for each part.
    config : Config
        The configuration, which is hashable.
    tokenize : Tokenizer
        A function from a list of prompts to token ids, int32, (prompts, text encoders, tokens).

    Raises
    ------
    FileNotFoundError, ValueError
        If something is missing, damaged, or not what the configuration means.
    """
    folder = Path(folder)
    dtype = check_dtype(dtype)
    config = read_config(folder)
    tokenize = load_tokenizer(folder, config)
    shapes = parameter_shapes(config, dtype)
    params = load_parts(folder, shapes, sharding, variant, _is_unread)
    return params, config, tokenize


def load_tokenizer(folder: str | Path, config: Config) -> Tokenizer:
    """Read the tokenizers of a folder in diffusers' format, as ``load`` does."""
    encoders = []
    for part, text in zip(("tokenizer", "tokenizer_2"), config.text, strict=False):
        place = find_inside(Path(folder), part)
        encoders.append(read_encoder(place, text.max_position_embeddings))
        check_vocabulary(place, encoders[-1].splitter, text.vocab_size)
    return Tokenizer(tuple(encoders))


def _is_unread(part: str, name: str) -> bool:
    """Return whether files may have a parameter that the model does not need."""
    return part.startswith("text_encoder") and name == POSITION_IDS


def read_files(
    folder: str | Path, config: Config, variant: str | None = None
) -> dict[str, dict[str, Any]]:
    """Return all parameters in a folder, by the names in files.

    Those in safetensors stay on disk until they are used.
    """
    return read_parts(Path(folder), parameter_shapes(config), variant, _is_unread)


def save(
    params: dict[str, dict[str, jax.Array]],
    source: str | Path,
    folder: str | Path,
    dtype: Any = None,
    schedule: ScheduleConfig | None = None,
) -> None:
    """Write a folder that PyTorch's diffusers loads, with parameters as safetensors.

    Parameters
    ----------
    params : dict
        As ``load`` or ``course.sd.convert.read_single_file`` gives them.
    source : str or Path
        A folder in diffusers' format of the same model, for configurations and tokenizers. They may
        be Flax'. The safety checker, if it has one, is left out.
    folder : str or Path
        Where to write. What is there is replaced.
    dtype : dtype or dict, optional
        What to save the numbers in: one for all, or one for each part. By default they keep theirs.
    schedule : ScheduleConfig, optional
        What to write in place of the source's, as ``course.sd.convert.guess_schedule`` gives it.

    Raises
    ------
    ValueError
        If a number is too large for float16.
    """
    source = Path(source)
    folder = Path(folder)
    check_readable(params)
    copy_settings(params.keys(), source, folder, schedule)
    save_parts(params, folder, dtype)


def copy_settings(
    parts: Iterable[str], source: Path, folder: Path, schedule: ScheduleConfig | None = None
) -> None:
    """Copy what a folder in diffusers' format has besides parameters, for PyTorch's classes."""
    index, texts = read_settings(source, parts)
    is_flax = part_class(source, index, "scheduler").startswith("Flax")
    for name, files in texts.items():
        for file in files:
            if file.endswith("config.json"):
                options = read_json(find_inside(source, name, file))
                files[file] = to_json(_without_flax(options))
        if name.startswith("tokenizer") and "vocab.json" not in files:
            # As transformers 5 writes it. With both files, all versions of transformers read it.
            with tempfile.TemporaryDirectory() as place:
                for file in read_encoder(source / name).splitter.model.save(place):
                    files[Path(file).name] = Path(file).read_bytes()
    write_settings(folder, texts)
    index = _without_flax(index)
    own = read_config(source).schedule
    schedule = schedule or own
    file = find_inside(folder, "scheduler", "scheduler_config.json")
    options = read_json(file)
    scheduler = SCHEDULERS.get(part_class(source, index, "scheduler"))
    begins_at_noise = scheduler is not None and scheduler.begins_at_noise
    if schedule.rescale_betas_zero_snr and not begins_at_noise:
        index["scheduler"] = ["diffusers", "DDIMScheduler"]
        options |= {"_class_name": "DDIMScheduler", "clip_sample": False}
    for name, value in asdict(schedule).items():
        # Where the file does not say something, Flax' classes have other defaults than PyTorch's.
        if name != "sampler" and (is_flax or value != getattr(own, name)):
            options[name] = value
    write_json(folder / "model_index.json", index)
    write_json(file, options)


def _without_flax(options: dict) -> dict:
    """Return what a JSON file of a folder has, with PyTorch's classes in place of Flax'."""
    changed = {}
    for name, value in options.items():
        if name == "_class_name":
            value = value.removeprefix("Flax")
        elif isinstance(value, list):  # a library and a class, in model_index.json
            value = [each.removeprefix("Flax") if isinstance(each, str) else each for each in value]
        changed[name] = value
    return changed
