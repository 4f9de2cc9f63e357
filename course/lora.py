"""Build LoRA files into a model: ``python -m course.lora SOURCE FOLDER FILE=SCALE [FILE=SCALE …]``.

The command adds them to the model in the folder SOURCE, and writes a folder that diffusers loads on
PyTorch as well.
"""

import argparse
import sys
from pathlib import Path

import stable_diffusion
from stable_diffusion.convert import save
from stable_diffusion.lora import merge, read_lora


def file_and_scale(argument: str) -> tuple[Path, float]:
    """What is meant by FILE=SCALE."""
    file, _, scale = argument.rpartition("=")
    return Path(file), float(scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="a folder in diffusers' format")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument("loras", nargs="+", type=file_and_scale, metavar="FILE=SCALE")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()
    try:
        params, config, _ = stable_diffusion.load(arguments.source, arguments.dtype)
        for file, scale in arguments.loras:
            lora = read_lora(file, params, config)
            params = merge(params, lora, scale)
            counts = " and ".join(f"{len(pairs)} weights of {part}" for part, pairs in lora.items())
            print(f"Added {file}, {scale} times, to {counts}.")
        save(params, arguments.source, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    print(f"Wrote {arguments.folder}.")


if __name__ == "__main__":
    main()
