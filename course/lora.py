"""Build LoRA files into a model: ``python -m course.lora SOURCE FOLDER FILE[=SCALE] …``.

The command adds them to the model SOURCE, which may be Stable Diffusion 1, 2, XL or FLUX.2-klein,
a folder in diffusers' format or a Hub id, and writes a folder that diffusers loads on PyTorch as
well. Sums are made in float32, and saved in the dtype that the model's files have.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp

from course.commands import check_apart, check_room, finite, make_parser, run, writing_to
from course.convert import DTYPES, saved_size
from course.families import find_code
from course.model.files import read_safetensors
from course.model.lora import check_scale, merge_stored
from course.sd.words import word_file
from helpers.models import find_model


def file_and_scale(argument: str) -> tuple[Path, float]:
    """Return the file and the scale of FILE=SCALE, where the scale is 1 if it is not given."""
    file, equals, scale = argument.rpartition("=")
    if not equals:
        return Path(argument), 1.0
    try:
        return Path(file), finite(scale)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(
            f"the scale of {file} is {scale!r}: give a finite number, as {file}=0.8"
        ) from None


def build_in(options: argparse.Namespace) -> None:
    """Do what the command does."""
    for file, _ in options.loras:
        read_safetensors(file)  # its header, as a model takes long
    source = find_model(options.source, variant=options.variant)
    check_apart(options.folder, source)
    with writing_to(options.folder):
        _build_into(options.folder, source, options)


def _build_into(folder: Path, source: Path, options: argparse.Namespace) -> None:
    """Write the model with the LoRA files in it."""
    code = find_code(source)
    config = code.read_config(source)
    params = code.read_files(source, config, options.variant)
    loras = []
    for file, scale in options.loras:
        lora = code.read_lora(file, code.parameter_shapes(config), config)
        check_scale(scale)
        loras.append((lora, scale))
        counts = " and ".join(f"{len(pairs)} weights of {part}" for part, pairs in lora.items())
        counts = counts or "nothing, as all of its products are zero"
        print(f"Added {file}, {scale} times, to {counts}.")
        if word_file(file).exists():
            print(
                f"The new word in {word_file(file)} is not a part of what is written: load it "
                "where you draw."
            )
    dtype = options.dtype and jnp.dtype(options.dtype)
    check_room(folder, saved_size(params, dtype))
    code.save(merge_stored(params, loras, dtype), source, folder, dtype)
    print(f"Wrote {folder}.")


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("course.lora", __doc__)
    parser.add_argument("source", help="a folder in diffusers' format, or a Hub id")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("loras", nargs="+", type=file_and_scale, metavar="FILE[=SCALE]")
    parser.add_argument("--variant", help="the word in the names of the model's files, as fp16")
    parser.add_argument("--dtype", choices=DTYPES, help="to save in; by default as the model is")
    return run(parser, build_in, arguments)


if __name__ == "__main__":
    sys.exit(main())
