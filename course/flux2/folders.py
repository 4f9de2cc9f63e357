"""Reading a model from a folder in diffusers' format."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from course.flux2.configs import Config, read_config
from course.flux2.parameters import model_parameters, parameter_shapes
from course.flux2.tokenizer import Tokenizer, read_tokenizer
from course.model.files import check_dtype, load_parts


def load(
    folder: str | Path,
    dtype: Any = jnp.bfloat16,
    sharding: jax.sharding.Sharding | dict | None = None,
    variant: str | None = None,
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
    tokenize = read_tokenizer(folder / "tokenizer")
    shapes = parameter_shapes(config, dtype)
    params = load_parts(folder, shapes, sharding, variant, unread_names(config))
    return params, config, tokenize


def unread_names(config: Config) -> dict[str, set[str]]:
    """Return, for each part, what files have and nothing here reads.

    Of the text encoder these are the last layers, its norm and its head.
    """
    text_encoder = {"model.norm.weight", "lm_head.weight"}
    for name, parameter in model_parameters(config)["text_encoder"].items():
        if "*" in name:
            layers = range(parameter.shape[0], config.text_encoder.num_hidden_layers)
            text_encoder |= {name.replace("*", str(layer)) for layer in layers}
    return {"text_encoder": text_encoder, "vae": {"bn.num_batches_tracked"}}
