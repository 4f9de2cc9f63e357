"""Make a folder in diffusers' format: ``python -m course.convert FILE FOLDER --like SOURCE``.

The command takes one file with a whole model, as on sites where models are shared, and writes a
folder that this course and PyTorch's diffusers load. Such a file has no configuration and no
tokenizer: they are taken from SOURCE, a folder or a Hub id of a model of the same kind, whose own
parameters are not looked at.

``--vae FILE`` puts another VAE into the model, and ``--text-encoder`` another text encoder.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from course.commands import check_room, make_parser, run, writing_to
from course.model.files import PICKLE_SUFFIXES
from course.sd import read_config, save
from course.sd.convert import guess_schedule, read_single_file
from helpers.models import NO_WEIGHTS, find_model

DTYPES = ("float32", "float16", "bfloat16")


def file_or_folder(name: str | None) -> Path | None:
    """Return what a part is read from: a file, or a folder, which may be on the Hub."""
    if name is None:
        return None
    if Path(name).suffix in (".safetensors", ".gguf", *PICKLE_SUFFIXES):
        return Path(name)
    return find_model(name)


def saved_size(params: dict[str, dict], dtype: Any = None) -> int:
    """Return how many bytes a model takes in files; its ``dtype`` is as of ``course.sd.save``."""
    size = 0
    for part, values in params.items():
        wanted = dtype.get(part) if isinstance(dtype, dict) else dtype
        for value in values.values():
            size += math.prod(value.shape) * jnp.dtype(wanted or value.dtype).itemsize
    return size


def convert_file(options: argparse.Namespace) -> None:
    """Do what the command does."""
    with writing_to(options.folder):
        _convert_into(options.folder, options)


def _convert_into(folder: Path, options: argparse.Namespace) -> None:
    """Write the model of a file, with what a model like it has besides."""
    like = find_model(options.like, only=NO_WEIGHTS)
    config = read_config(like)
    params = read_single_file(
        options.file,
        config,
        vae=file_or_folder(options.vae),
        text_encoder=file_or_folder(options.text_encoder),
        text_encoder_2=file_or_folder(options.text_encoder_2),
    )
    schedule = guess_schedule(options.file, config, options.prediction)
    dtype = options.dtype and jnp.dtype(options.dtype)
    check_room(folder, saved_size(params, dtype))
    save(params, like, folder, dtype, schedule)
    counts = ", ".join(f"{part} {len(values)}" for part, values in params.items())
    print(f"Wrote {folder}, with so many parameters: {counts}.")
    print(f"The model predicts {schedule.prediction_type}.", end="")
    print(" It was trained down to pure noise." if schedule.rescale_betas_zero_snr else "")


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("course.convert", __doc__)
    parser.add_argument("file", type=Path, help="safetensors with a whole model")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument(
        "--like", required=True, help="a folder or Hub id with the configuration and the tokenizers"
    )
    parser.add_argument("--vae", help="a file, folder or Hub id to take the VAE from")
    parser.add_argument("--text-encoder", help="the same for the text encoder")
    parser.add_argument("--text-encoder-2", help="and for the second one of Stable Diffusion XL")
    parser.add_argument(
        "--prediction",
        choices=("epsilon", "v_prediction"),
        help="what the model predicts; by default what the file says, or else SOURCE",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the numbers; by default as in the file")
    return run(parser, convert_file, arguments)


if __name__ == "__main__":
    sys.exit(main())
