"""Convert between folders in diffusers' format and the single files of other programs.

``python -m course.convert FILE FOLDER --like SOURCE`` takes one file with a whole model, as on
sites where models are shared, or the transformer of a FLUX.2-klein, and writes a folder that this
course and PyTorch's diffusers load. Such a file has no configuration and no tokenizer: they are
taken from SOURCE, a folder or a Hub id of a model of the same kind, whose own parameters are not
looked at. ``--vae FILE`` puts another VAE into the model, and ``--text-encoder`` another text
encoder; a file with a transformer alone needs both.

``python -m course.convert MODEL FOLDER`` does the reverse. For a folder or a Hub id, it writes what
ComfyUI and others read: one file for Stable Diffusion, and for FLUX.2-klein one for each part.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from course import sd
from course.commands import check_apart, check_room, make_parser, run, writing_to
from course.families import find_code
from course.model.files import FLOATS, PICKLE_SUFFIXES, cast, write_safetensors
from course.sd.convert import guess_schedule
from helpers.models import NO_WEIGHTS, find_model

DTYPES = ("float32", "float16", "bfloat16")


def file_or_folder(name: str | None) -> Path | None:
    """Return what a part is read from: a file, or a folder, which may be on the Hub."""
    if name is None:
        return None
    suffix = Path(name).suffix.lower()
    if Path(name).is_file() or suffix in (".safetensors", ".sft", ".gguf", *PICKLE_SUFFIXES):
        return Path(name)
    return find_model(name)


def saved_size(params: dict[str, dict], dtype: Any = None) -> int:
    """Return how many bytes a model takes in files; its ``dtype`` is as of ``course.sd.save``."""
    size = 0
    for part, values in params.items():
        wanted = dtype.get(part) if isinstance(dtype, dict) else dtype
        for value in values.values():
            if str(value.dtype) in FLOATS.values():
                size += math.prod(value.shape) * jnp.dtype(wanted or value.dtype).itemsize
    return size


def convert(options: argparse.Namespace) -> None:
    """Do what the command does."""
    if options.like:
        with writing_to(options.folder):
            _write_folder(Path(options.source), options)
        return
    source = file_or_folder(options.source)
    if not source.is_dir():
        raise ValueError(
            f"{source} has no configuration: give a model of the same kind by --like, a folder or "
            "a Hub id."
        )
    for name in ("vae", "text_encoder", "text_encoder_2", "prediction"):
        if getattr(options, name):
            raise ValueError(
                f"{source} is a whole model, to which --{name.replace('_', '-')} adds nothing: "
                "leave that out."
            )
    check_apart(options.folder, source)
    with writing_to(options.folder):
        _write_files(source, options)


def _write_folder(file: Path, options: argparse.Namespace) -> None:
    """Write the model of a file, with what a model like it has besides."""
    if file.is_dir():
        raise ValueError(f"{file} is a whole model, with a configuration: leave out --like.")
    folder, like = options.folder, find_model(options.like, only=NO_WEIGHTS)
    check_apart(folder, like)
    code = find_code(like)
    config = code.read_config(like)
    parts = code.parameter_shapes(config).keys()
    others = {}
    for part in ("vae", "text_encoder", "text_encoder_2"):
        place = file_or_folder(getattr(options, part))
        if place is not None and part not in parts:
            raise ValueError(f"{like} is a model without {part}: leave that option out.")
        if place is not None and place.is_dir():
            check_apart(folder, place)
        if part in parts:
            others[part] = place
    params = code.read_single_file(file, config, **others)
    if code is sd:
        settings = {"schedule": guess_schedule(file, config, options.prediction)}
    elif options.prediction:
        raise ValueError(f"{like} predicts velocities: leave out --prediction.")
    else:
        settings = {}
    dtype = options.dtype and jnp.dtype(options.dtype)
    check_room(folder, saved_size(params, dtype))
    code.save(params, like, folder, dtype, **settings)
    counts = ", ".join(f"{part} {len(values)}" for part, values in params.items())
    print(f"Wrote {folder}, with so many parameters: {counts}.")
    if settings:
        print(f"The model predicts {settings['schedule'].prediction_type}.", end="")
        is_zero = settings["schedule"].rescale_betas_zero_snr
        print(" It was trained down to pure noise." if is_zero else "")


def _write_files(source: Path, options: argparse.Namespace) -> None:
    """Write a model as single files."""
    code = find_code(source)
    config = code.read_config(source)
    params = code.read_files(source, config)
    dtype = options.dtype and jnp.dtype(options.dtype)
    check_room(options.folder, saved_size(params, dtype))
    for name, tensors in code.to_single_files(params, config):
        tensors = {key: cast(key, value, dtype) for key, value in tensors.items()}
        write_safetensors(options.folder / name, tensors)
        print(f"Wrote {options.folder / name}.")


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("course.convert", __doc__)
    parser.add_argument("source", help="safetensors; or a folder in diffusers' format, or a Hub id")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument(
        "--like", help="for a file: a folder or Hub id with the configuration and the tokenizers"
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
    return run(parser, convert, arguments)


if __name__ == "__main__":
    sys.exit(main())
