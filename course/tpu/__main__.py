"""Ask the TPU compiler what a program needs on a TPU, without a TPU."""

import argparse
import dataclasses
import importlib
import json
import logging
import re
import sys

import jax

from course import tpu
from helpers import quiet_deprecations, require_flax

EXAMPLES = """\
examples:
  python -m course.tpu                                     the bundled checkpoint, in a minute
  python -m course.tpu sdxl --chip v6e --steps 20          Stable Diffusion XL, in half an hour
  python -m course.tpu jax.numpy:matmul --shapes "bf16[4096,4096]" "bf16[4096,4096]"
  python -m course.tpu --recorded                          what was said about the real models, at once

module:function can be any function of arrays, in this folder or installed. Each of --shapes is an argument, as JAX
prints its type. From Python, course.tpu.ask_compiler takes trees, shardings and several chips as well.
"""


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """A shape out of what JAX prints, such as ``bf16[8,128]``, or ``int32[]`` for a number."""
    long = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    try:
        name, bits, sides = re.fullmatch(r"([a-z]+)(\d*)\[([\d,]*)\]", text).groups()
        return jax.ShapeDtypeStruct([int(side) for side in sides.split(",") if side], long.get(name, name) + bits)
    except (AttributeError, TypeError):
        raise ValueError(f"{text!r} is no shape: write it as bf16[8,128], or as int32[] for a number.") from None


def ask_about_function(name: str, shapes: list[str], chip: str) -> tpu.Report:
    """Import ``module:function``, and ask the compiler about it."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name!r} cannot be imported ({error}): give module:function.") from None
    try:
        return tpu.ask_compiler(function, *map(parse_shape, shapes), chip=chip)
    except TypeError as error:  # JAX's, where it traces the function
        raise ValueError(f"{name} does not take {' '.join(shapes)}: {error}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m course.tpu",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "program",
        nargs="?",
        default="shapes-sd",
        help="sd, sdxl, a bundled checkpoint, a pipeline's folder, or module:function (by default %(default)s)",
    )
    parser.add_argument("--chip", default="v5e", help="v4, v5e, v5p, v6e or tpu7x (by default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of text")
    parser.add_argument("--recorded", action="store_true", help="print the recorded reports, and compile nothing")
    own = parser.add_argument_group("a function")
    own.add_argument("--shapes", nargs="+", metavar="SHAPE", help="its arguments, for example bf16[4096,4096]")
    sizes = parser.add_argument_group("a pipeline")
    sizes.add_argument("--chips", type=int, help="1 (the default), 4 or 8, each with images of its own")
    sizes.add_argument("--batch", type=int, help="images that each device draws in a call (1)")
    sizes.add_argument("--height", type=int, help="in pixels; by default what the model was trained for")
    sizes.add_argument("--width", type=int, help="in pixels; by default what the model was trained for")
    sizes.add_argument("--steps", type=int, help="of denoising (50)")
    sizes.add_argument("--dtype", help="bfloat16 (the default) or float32")
    sizes.add_argument("--split-head-dim", action=argparse.BooleanOptionalAction, help="how attention is laid out")
    options = vars(parser.parse_args(arguments))
    name, chip, shapes, as_json, recorded = map(options.pop, ("program", "chip", "shapes", "json", "recorded"))
    settings = {key: value for key, value in options.items() if value is not None}
    if (":" in name) != bool(shapes) or (shapes and settings):
        parser.error("a function needs --shapes, and a pipeline the other sizes")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("course").setLevel(logging.INFO)
    jax.config.update("jax_platforms", "cpu")  # chips that are there are left alone
    try:
        if shapes:
            report = ask_about_function(name, shapes, chip)
        else:
            require_flax()
            quiet_deprecations()
            from course.tpu import reports

            if recorded:
                found = reports.recorded_reports()
                print(json.dumps([*map(dataclasses.asdict, found)], indent=1) if as_json else reports.table_of(found))
                return 0
            tpu.tpu_devices(chip, settings.get("chips", 1))  # before anything that takes long
            report = reports.ask_about_pipeline(reports.Program(name, chip, **settings))
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            raise  # nothing that a sentence could explain
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(dataclasses.asdict(report), indent=1) if as_json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
