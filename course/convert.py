"""Write a folder for PyTorch's diffusers: ``python -m course.convert MODEL FOLDER --like SOURCE``.

The command takes one file in the original layout, as on sites where models are shared, and writes a
folder in diffusers' format. Such a file has no configuration and no tokenizer: they are taken from
the folder SOURCE, for a model of the same kind, whose own parameters are not looked at.
"""

import argparse
import sys
from pathlib import Path

from stable_diffusion import read_config
from stable_diffusion.convert import read_single_file, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="one file in the original layout")
    parser.add_argument("folder", type=Path, help="the folder to write")
    parser.add_argument(
        "--like",
        type=Path,
        required=True,
        help="a folder with the configuration and the tokenizers",
    )
    arguments = parser.parse_args()
    try:
        params = read_single_file(arguments.file, read_config(arguments.like))
        save(params, arguments.like, arguments.folder)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    counts = ", ".join(f"{part} {len(values)}" for part, values in params.items())
    print(f"Wrote {arguments.folder}, with so many parameters: {counts}.")


if __name__ == "__main__":
    main()
