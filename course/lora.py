"""Build LoRA files into a model: ``python -m course.lora SOURCE FOLDER FILE[=SCALE] …``.

The command adds them to the model SOURCE, a folder in diffusers' format or a Hub id, and writes a
folder that diffusers loads on PyTorch as well. Sums are made in float32, and saved in the dtype
that the model's files have.
"""

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp

from course import sd
from course.convert import DTYPES
from course.model.files import stored_dtypes
from course.model.lora import merge
from course.sd.lora import read_lora, word_file
from helpers import find_model


def file_and_scale(argument: str) -> tuple[Path, float]:
    """What is meant by FILE=SCALE, where the scale is 1 if it is not given."""
    file, equals, scale = argument.rpartition("=")
    if not equals:
        return Path(argument), 1.0
    try:
        return Path(file), float(scale)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"the scale of {file} is {scale!r}: give a number, as {file}=0.8"
        ) from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="a folder in diffusers' format, or a Hub id")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("loras", nargs="+", type=file_and_scale, metavar="FILE[=SCALE]")
    parser.add_argument("--variant", help="the word in the names of the model's files, as fp16")
    parser.add_argument("--dtype", choices=DTYPES, help="to save in; by default as the model is")
    arguments = parser.parse_args()
    try:
        source = find_model(arguments.source, variant=arguments.variant)
        params, config, _ = sd.load(source, variant=arguments.variant)
        for file, scale in arguments.loras:
            lora = read_lora(file, params, config)
            params = merge(params, lora, scale)
            counts = " and ".join(f"{len(pairs)} weights of {part}" for part, pairs in lora.items())
            print(f"Added {file}, {scale} times, to {counts}.")
            if word_file(file).exists():
                print(
                    f"The new word in {word_file(file)} is not a part of what is written: load it "
                    "where you draw."
                )
        if arguments.dtype:
            dtype = jnp.dtype(arguments.dtype)
        else:
            dtype = stored_dtypes(source, params, arguments.variant)
        sd.save(params, source, arguments.folder, dtype)
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(str(error))
    print(f"Wrote {arguments.folder}.")


if __name__ == "__main__":
    main()
