"""Ask the TPU compiler what a program needs on a TPU, without a TPU."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import diffusers
import jax
import transformers

from helpers import tpu


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m helpers.tpu", description=__doc__)
    parser.add_argument("pipeline", nargs="?", default="shapes-sd", help="sd, sdxl, a bundled checkpoint, or a folder")
    parser.add_argument("--chip", default="v5e", help=", ".join(tpu.CHIPS))
    parser.add_argument("--chips", type=int, default=1, help="1, 4 or 8")
    parser.add_argument("--batch", type=int, default=1, help="pictures that each chip draws in a call")
    parser.add_argument("--height", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16 or float32")
    parser.add_argument("--program", dest="parallel", default="pmap", help="pmap, or jit (with shardings)")
    parser.add_argument("--split-head-dim", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--largest-batch", action="store_true", help="look for the largest batch that fits")
    parser.add_argument("--recorded", action="store_true", help="print the recorded reports, and compile nothing")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of text")
    parser.add_argument("--cache", type=Path, default=tpu.default_cache(), help="folder of answers (%(default)s)")
    options = vars(parser.parse_args(arguments))
    as_json, cache, look = options.pop("json"), options.pop("cache"), options.pop("largest_batch")
    if look and options["batch"] != 1:
        parser.error("--largest-batch looks for the batch itself: leave --batch out")
    if options.pop("recorded"):
        reports = tpu.recorded_reports()
        print(json.dumps(reports, indent=1) if as_json else tpu.table_of(reports))
        return 0
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")  # chips that are there are left alone

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        program, report = tpu.Program(**options), {}
        tpu.tpu_devices(program.chip, program.chips)  # before anything that takes long
        if look:
            report = {"largest_batch": tpu.largest_batch(program, cache=cache, say=say)}
            program = dataclasses.replace(program, batch=max(1, report["largest_batch"]["largest"]))
        report = tpu.compile_report(program, cache=cache, say=say) | report
    except (ValueError, RuntimeError, OSError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise  # nothing that a sentence could explain
        say(str(error))
        return 1
    print(json.dumps(report, indent=1) if as_json else tpu.text_of(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
