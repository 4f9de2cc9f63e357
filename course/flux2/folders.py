"""Reading and writing a model in a folder in diffusers' format."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from course.flux2.configs import Config, read_config
from course.flux2.parameters import parameter_shapes
from course.flux2.tokenizer import Tokenizer, read_tokenizer
from course.model.files import (
    Stored,
    check_dtype,
    check_readable,
    find_inside,
    load_parts,
    read_parts,
    read_settings,
    save_parts,
    stacked_name,
    write_json,
    write_settings,
)
from course.model.tokens import check_vocabulary


def load(
    folder: str | Path,
    dtype: Any = jnp.bfloat16,
    sharding: jax.sharding.Sharding | dict | None = None,
    variant: str | None = None,
    parts: Sequence[str] | None = None,
) -> tuple[dict[str, dict[str, jax.Array]], Config, Tokenizer]:
    """Read a model from a folder in diffusers' format.

    Names and shapes are compared first. Then the numbers go from the files to the devices, one
    parameter at a time, so that the host never holds the whole model.

    Parameters
    ----------
    folder : str or Path
        With ``model_index.json`` and a folder for each part.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16. Norms and the sampler compute in
        float32 in any case.
    sharding : jax.sharding.Sharding or dict, optional
        Where parameters lie: a sharding for all, or one for each, as ``flux2.shardings`` gives
        them.
    variant : str, optional
        The word that the files have in their names, such as "fp16".
    parts : sequence of str, optional
        Which parts to read, if not all three.

    Returns
    -------
    params : dict
        A dictionary of parameters for each part: transformer, text_encoder and vae.
    config : Config
    tokenize : Tokenizer
        A function from a list of prompts to token ids and their mask.

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
    if parts is not None:
        shapes = {part: shapes[part] for part in parts}
    is_unread = functools.partial(_is_unread, config)
    params = load_parts(folder, shapes, sharding, variant, is_unread)
    return params, config, tokenize


def load_tokenizer(folder: str | Path, config: Config) -> Tokenizer:
    """Read the tokenizer of a folder in diffusers' format, as ``load`` does."""
    place = find_inside(Path(folder), "tokenizer")
    tokenize = read_tokenizer(place)
    check_vocabulary(place, tokenize.splitter, config.text_encoder.vocab_size)
    return tokenize


def _is_unread(config: Config, part: str, name: str) -> bool:
    """Return whether files may have a parameter that the model does not need.

    They may not have more blocks than their configuration says. Of the text encoder, the last
    layers are not needed.
    """
    _, layer = stacked_name(name)
    if layer is None:
        return True
    return part == "text_encoder" and layer < config.text_encoder.num_hidden_layers


def read_files(
    folder: str | Path, config: Config, variant: str | None = None
) -> dict[str, dict[str, Stored]]:
    """Return all parameters in a folder, by the names in files. They stay on disk until used."""
    is_unread = functools.partial(_is_unread, config)
    return read_parts(Path(folder), parameter_shapes(config), variant, is_unread)


def save(
    params: dict[str, dict[str, Any]], source: str | Path, folder: str | Path, dtype: Any = None
) -> None:
    """Write a folder that PyTorch's diffusers loads, with parameters as safetensors.

    Parameters
    ----------
    params : dict
        As ``read_files`` or ``course.flux2.convert.read_single_file`` gives them, with what no
        image depends on. What ``load`` gives lacks the last layers of the text encoder, which other
        programs want.
    source : str or Path
        A folder in diffusers' format of the same model, for configurations and the tokenizer.
    folder : str or Path
        Where to write. What is there is replaced.
    dtype : dtype or dict, optional
        What to save the numbers in: one for all, or one for each part. By default they keep theirs.

    Raises
    ------
    ValueError
        If a number is too large for float16.
    """
    source, folder = Path(source), Path(folder)
    check_readable(params)
    index, texts = read_settings(source, params.keys())
    write_settings(folder, texts)
    write_json(folder / "model_index.json", index)
    save_parts(params, folder, dtype)
