"""Record what the TPU compiler says about the model of ``stable_diffusion``: ``benchmarks/faster.json``.

Chapter 12 shows these answers. Each is written as soon as it is there, and what is recorded is left out, so an
interrupted run goes on where it stopped. A denoising step of Stable Diffusion XL takes about ten minutes on 2 cores.
"""

import argparse
import dataclasses
import json
import logging
import sys
import time
from pathlib import Path

import jax

from course.tpu import tpu_devices
from course.tpu.compiler import from_json, write_json
from course.tpu.model import Answer, Drawing, ask, take_apart, take_transformer

TARGET = Path(__file__).with_name("faster.json")
SIZES = ((1024, 1024), (1280, 960), (1152, 896), (1216, 832), (1344, 768), (768, 768))
log = logging.getLogger("course.tpu.recorder")


def questions() -> list[tuple[Drawing, str]]:
    """What to ask, the most useful first: a drawing and the name of a piece."""
    best, names = Drawing("sdxl", "auto"), ("plain", "dot_product", "auto")
    found = [(best, piece) for piece in ("denoising step", "decoder", "text encoders")]
    found += [(Drawing("sdxl", name), f"transformer of {c} channels") for name in names for c in (640, 1280)]
    found += [(Drawing("sd", name), f"transformer of {c} channels") for name in names for c in (320, 640, 1280)]
    drawings = [Drawing("sdxl", name, height=h, width=w) for h, w in SIZES[1:] for name in ("dot_product", "auto")]
    found += [(drawing, "transformer of 640 channels") for drawing in drawings]
    found += [(Drawing("sd", "auto", steps=50), piece) for piece in ("denoising step", "decoder", "text encoders")]
    found += [(Drawing("sdxl", "plain"), "denoising step"), (Drawing("sd", "plain", steps=50), "denoising step")]
    found += [(Drawing("sdxl", "auto", batch=2), "denoising step"), (Drawing("sdxl", "auto", "v6e"), "denoising step")]
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="ask no question after so many minutes")
    parser.add_argument("--only", default="", help="only questions that have this in their text")
    parser.add_argument("--list", action="store_true", help="print what is left to ask, and compile nothing")
    parser.add_argument("--to", type=Path, default=TARGET, help="the file of answers (%(default)s)")
    options = parser.parse_args(arguments)
    answers = from_json(Answer, json.loads(options.to.read_text())) if options.to.exists() else ()
    known = [(answer.drawing, answer.piece) for answer in answers]
    left = [q for q in questions() if q not in known and options.only in f"{q[1]} of {q[0]}"]
    if options.list:
        print("\n".join(f"{piece} of {drawing}" for drawing, piece in left) or "Nothing is left.")
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("course").setLevel(logging.INFO)
    jax.config.update("jax_platforms", "cpu")
    try:
        tpu_devices()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    start = time.monotonic()
    for drawing, name in left:
        if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
            break
        channels = name.removeprefix("transformer of ").removesuffix(" channels")
        piece = take_transformer(drawing, int(channels)) if channels.isdigit() else take_apart(drawing)[name]
        answers = (*answers, ask(drawing, piece))
        write_json(options.to, [dataclasses.asdict(answer) for answer in answers])
    return 0


if __name__ == "__main__":
    sys.exit(main())
