"""Record what the TPU compiler says about the model of ``stable_diffusion``: ``benchmarks/faster.json``.

Chapter 12 shows these answers. Each is written as soon as it is there, and what is recorded is left out, so an
interrupted run goes on where it stopped. A denoising step of Stable Diffusion XL takes about ten minutes on 2 cores.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from pathlib import Path

import jax

from benchmarks.record_tpu import STACKS, largest_that_fits
from course.tpu import tpu_devices
from course.tpu.compiler import from_json, write_json
from course.tpu.model import SHARED, WHOLE, Answer, Drawing, Piece, ask, take_apart, take_shared, take_transformer

TARGET = Path(__file__).with_name("faster.json")
SIZES = ((1024, 1024), (1280, 960), (1152, 896), (1216, 832), (1344, 768), (768, 768))
LARGEST = {"v5e": 4, "v6e": 16}  # chips, and where the search for the largest batch on one begins
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
    found += [(best, SHARED)]
    found += [(Drawing("sdxl", "auto", height=h, width=w), "denoising step") for h, w in SIZES[1:]]
    found += [(Drawing("sdxl", "auto", "v6e"), "denoising step")]
    return found


def take(drawing: Drawing, name: str) -> Piece:
    """The piece of that name."""
    if name == SHARED:
        return take_shared(drawing)
    channels = name.removeprefix("transformer of ").removesuffix(" channels")
    return take_transformer(drawing, int(channels)) if channels.isdigit() else take_apart(drawing)[name]


def is_found(answers: tuple[Answer, ...], chip: str) -> bool:
    """Whether the largest batch on a chip is known: one that fits, and the next one, which does not."""
    fits = {a.drawing.batch: a.report.fits for a in answers if (a.piece, a.drawing.chip) == (WHOLE, chip)}
    return any(fits.get(batch, batch == 0) and fits.get(batch + 1) is False for batch in (0, *fits))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="ask no question after so many minutes")
    parser.add_argument("--only", default="", help="only questions that have this in their text")
    parser.add_argument("--list", action="store_true", help="print what is left to ask, and compile nothing")
    parser.add_argument("--to", type=Path, default=TARGET, help="the file of answers (%(default)s)")
    parser.add_argument("--start", type=int, help="the batch to begin searches with")
    options = parser.parse_args(arguments)
    if options.start is not None and options.start < 1:
        parser.error(f"--start is {options.start}, and has to be 1 or more")

    def read() -> tuple[Answer, ...]:  # anew for each question: two recorders may run at once, if --only differs
        return from_json(Answer, json.loads(options.to.read_text())) if options.to.exists() else ()

    known = [(answer.drawing, answer.piece) for answer in read()]
    left = [q for q in questions() if q not in known and options.only in f"{q[1]} of {q[0]}"]
    searches = {f"largest batch on {chip}": chip for chip in LARGEST if not is_found(read(), chip)}
    searches = {text: chip for text, chip in searches.items() if options.only in text}
    if options.list:
        print("\n".join([*(f"{piece} of {drawing}" for drawing, piece in left), *searches]) or "Nothing is left.")
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

    def find(drawing: Drawing, name: str) -> Answer:
        """The recorded answer, or a new one, which is recorded."""
        found = next((answer for answer in read() if (answer.drawing, answer.piece) == (drawing, name)), None)
        if found is None:
            if options.minutes is not None and time.monotonic() - start > 60 * options.minutes:
                sys.exit(0)
            found = ask(drawing, take(drawing, name))
            log.info("%s", found.report.verdict)
            write_json(options.to, [dataclasses.asdict(answer) for answer in (*read(), found)])
        return found

    for drawing, name in left:
        find(drawing, name)
    for chip in searches.values():
        drawing = Drawing("sdxl", "auto", chip)
        largest_that_fits(
            lambda batch, drawing=drawing: find(dataclasses.replace(drawing, batch=batch), WHOLE).report.fits,
            options.start or LARGEST[chip],
        )
    return 0


if __name__ == "__main__":
    # As for the other recorder, libtpu's threads need larger stacks.
    os.environ.setdefault("LIBTPU_INIT_ARGS", STACKS)
    sys.exit(main())
