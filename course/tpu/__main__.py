"""Ask the TPU compiler what a program needs on a TPU, without a TPU."""

import argparse
import dataclasses
import importlib
import json
import logging
import re
import sys
from functools import partial
from pathlib import Path

import jax

from course.commands import make_parser, positive, run, seconds, writing_to
from course.model.attention import ATTENTION
from course.model.files import write_whole
from course.tpu.answers import Answer, Report
from course.tpu.chips import tpu_devices
from course.tpu.compiler import ask_compiler
from course.tpu.pieces import ask_about
from course.tpu.plan import ask_ways, draw_comparison, make_job, rank, say, step_flops
from course.tpu.plan_file import WRITER, check_place, write_plan
from course.tpu.programs import make_program
from course.tpu.records import recorded_answers, table_of
from helpers import quiet_warnings

EXAMPLES = """\
examples:
  python -m course.tpu                         the bundled checkpoint's pipeline, in a minute
  python -m course.tpu sdxl --chip v6e --steps 20
                                               Stable Diffusion XL's, in half an hour
  python -m course.tpu shapes-sd --attention plain
                                               the model of course.sd in its place
  python -m course.tpu jax.numpy:matmul --shapes "bf16[4096,4096]" "bf16[4096,4096]"
  python -m course.tpu --recorded              what was said about the real models, at once
  python -m course.tpu plan flux2 --chip v6e --chips 8
                                               how a step is best split over eight chips (--help)

module:function can be any function of arrays, in this folder or installed. Each of --shapes is an
argument, as JAX prints its type. From Python, course.tpu.ask_compiler takes trees, shardings and
several chips as well.
"""


# Of a program, and not of a function.
SETTINGS = (
    "chips",
    "batch",
    "height",
    "width",
    "steps",
    "dtype",
    "split_head_dim",
    "attention",
)


def parse_shape(text: str) -> jax.ShapeDtypeStruct:
    """Read a shape as JAX prints it, such as ``bf16[8,128]``, or ``int32[]`` for a number."""
    long_names = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}
    match = re.fullmatch(r"([a-z]+)(\d*)\[([\d,]*)\]", text)
    try:
        name, bits, sides = match.groups()
        sides = [int(side) for side in sides.split(",") if side]
        return jax.ShapeDtypeStruct(sides, long_names.get(name, name) + bits)
    except (AttributeError, TypeError):
        raise ValueError(
            f"{text!r} is no shape: write it as bf16[8,128], or as int32[] for a number."
        ) from None


def ask_about_function(name: str, shapes: list[str], chip: str, timeout: float | None) -> Report:
    """Import ``module:function``, and ask the compiler about it."""
    module, _, attribute = name.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be imported ({error}): give module:function.") from None
    if not callable(function):  # JAX would print it, whatever it holds
        raise ValueError(f"{name!r} is no function: give module:function.")
    arguments = [parse_shape(shape) for shape in shapes]
    try:
        return ask_compiler(function, *arguments, chip=chip, timeout=timeout)
    except TypeError as error:  # JAX's, where it traces the function
        raise ValueError(f"{name} does not take {' '.join(shapes)}: {error}") from None


def ask_about_program(
    model: str, chip: str, settings: dict[str, object], timeout: float | None
) -> Answer:
    """Ask about a pipeline, or about the course's own model if the settings name an attention."""
    tpu_devices(chip, settings.get("chips", 1))  # before anything that takes long
    quiet_warnings()
    return ask_about(make_program(model, chip, **settings), timeout)


def tpu_parser() -> argparse.ArgumentParser:
    parser = make_parser("course.tpu", __doc__, epilog=EXAMPLES)
    parser.add_argument(
        "program",
        nargs="?",
        default="shapes-sd",
        help="sd, sdxl, flux2, a bundled checkpoint, a model's folder or Hub id, or "
        "module:function (%(default)s)",
    )
    parser.add_argument(
        "--chip", default="v5e", help="v4, v5e, v5p, v6e or tpu7x (by default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in the place of text")
    parser.add_argument(
        "--recorded", action="store_true", help="print the recorded answers, and compile nothing"
    )
    parser.add_argument(
        "--timeout", type=seconds, help="stop the compiler after so many seconds (never)"
    )
    function = parser.add_argument_group("a function")
    function.add_argument(
        "--shapes", nargs="+", metavar="SHAPE", help="its arguments, for example bf16[4096,4096]"
    )
    program = parser.add_argument_group("a model's program")
    numbers = {
        "chips": "1 (the default), 4 or 8, each with images of its own",
        "batch": "images that each device draws in a call (1)",
        "height": "in pixels; by default what the model was trained for",
        "width": "likewise",
        "steps": "of denoising (50; of a distilled model 4)",
    }
    for name, text in numbers.items():
        program.add_argument(f"--{name}", type=int, help=text)
    program.add_argument("--dtype", help="bfloat16 (the default) or float32")
    program.add_argument(
        "--split-head-dim",
        action=argparse.BooleanOptionalAction,
        help="how a pipeline's attention is laid out",
    )
    program.add_argument(
        "--attention",
        help=f"of course.sd: {', '.join(ATTENTION)}; without it, a pipeline. FLUX.2's is automatic",
    )
    return parser


def print_answer(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Do what the command does; options that do not go together are an error of the parser."""
    settings = {}
    for name in SETTINGS:
        value = getattr(options, name)
        if value is not None:
            settings[name] = value
    is_function = ":" in options.program
    if is_function != bool(options.shapes) or (is_function and settings):
        parser.error("a function needs --shapes, and a model's program the other sizes")
    logging.basicConfig(format="%(message)s")
    logging.getLogger("course").setLevel(logging.INFO)
    jax.config.update("jax_platforms", "cpu")  # chips that are there are left alone
    if options.recorded:
        answers = recorded_answers(attention=None)
        text = table_of(answers)
        content = [dataclasses.asdict(answer) for answer in answers]
    else:
        if is_function:
            answer = ask_about_function(
                options.program, options.shapes, options.chip, options.timeout
            )
        else:
            answer = ask_about_program(options.program, options.chip, settings, options.timeout)
        text = str(answer)
        content = dataclasses.asdict(answer)
    print(json.dumps(content, indent=1) if options.json else text)


# Plans

PLAN = """\
Compile a step of denoising for chips that are not there, split over them in several ways, and rank
the ways by a bound: with as many groups of chips as there are images, or runs of the model, and
with all chips together. A folder gets a picture that compares the ways, and a file that draws in
the first of them. What the compiler was asked now is kept there, too, so that an interrupted plan
goes on where it stopped; it is used rather than what was recorded with the course.
"""
PLAN_EXAMPLES = """\
examples:
  python -m course.tpu plan shapes-flux2 --chip v5e --chips 4
                                               the bundled checkpoint, in a minute or two
  python -m course.tpu plan flux2 --chip v6e --chips 8
                                               FLUX.2-klein-4B, one image over eight chips
  python -m course.tpu plan sdxl --chip v5e --batch 4 --only "data over 4"
"""


def plan_parser() -> argparse.ArgumentParser:
    parser = make_parser("course.tpu plan", PLAN, epilog=PLAN_EXAMPLES)
    parser.add_argument(
        "model", help="sd, sdxl, flux2, flux2-9b, a bundled checkpoint, a model's folder or Hub id"
    )
    parser.add_argument("--chip", default="v6e", help="v5e or v6e (%(default)s)")
    parser.add_argument("--chips", type=int, default=8, help="4 or 8 (%(default)s)")
    parser.add_argument(
        "--batch", type=positive, default=1, help="images that all chips draw at a time (1)"
    )
    parser.add_argument(
        "--height", type=int, help="in pixels; by default what the model was trained for"
    )
    parser.add_argument("--width", type=int, help="likewise")
    parser.add_argument(
        "--guidance",
        action=argparse.BooleanOptionalAction,
        help="whether there is guidance; by default there is, but for distilled models",
    )
    parser.add_argument("--dtype", default="bfloat16", help="or float32 (%(default)s)")
    parser.add_argument("--only", default="", help="ask only about ways with this in their name")
    parser.add_argument(
        "--anew", action="store_true", help="ask again what was recorded with the course"
    )
    parser.add_argument("--to", type=Path, help="the folder for all of it (plan-MODEL-CHIP-CHIPS)")
    parser.add_argument("--timeout", type=seconds, help="stop a compilation after so many seconds")
    return parser


def print_plan(options: argparse.Namespace) -> None:
    """Ask, write and print what ``plan`` does."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("course").setLevel(logging.INFO)
    jax.config.update("jax_platforms", "cpu")  # chips that are there are left alone
    quiet_warnings()
    job = make_job(
        options.model,
        options.chip,
        options.chips,
        batch=options.batch,
        height=options.height,
        width=options.width,
        guided=options.guidance,
        dtype=options.dtype,
    )
    name = f"plan-{Path(options.model).name}-{options.chip}-{options.chips}"
    folder = options.to or Path(name)
    with writing_to(folder):
        check_place(folder / "comparison.png")
        check_place(folder / "draw.py")
        answers = ask_ways(
            job, folder / "answers.json", options.only, options.timeout, options.anew
        )
        bounds = rank(answers.splits, step_flops(job), job.chips) if answers.splits else {}
        print(say(job, answers, bounds))
        if len(answers.impossible) == len(job.ways):
            raise RuntimeError(
                "The model cannot be split in any of these ways: give a larger image, another "
                "--batch, or other --chips."
            )
        if not answers.splits:
            raise RuntimeError(
                "The compiler answered about no way, see above: give more --timeout, or another "
                "--only."
            )
        fitting = [way for way, bound in bounds.items() if bound.split.report.fits]
        if not fitting:
            raise RuntimeError(
                "No way fits that was asked about: give more chips, or fewer pixels."
            )
        figure = draw_comparison(job, bounds)
        save = partial(figure.savefig, format="png", dpi=150, metadata={"Source": WRITER})
        write_whole(folder / "comparison.png", save)
        write_plan(job, fitting[0], folder / "draw.py")
    print(f"\nFirst is {fitting[0]}: {folder / 'draw.py'} draws so. Also written: comparison.png.")


def main(arguments: list[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] == ["plan"]:
        return run(plan_parser(), print_plan, arguments[1:])
    parser = tpu_parser()
    return run(parser, partial(print_answer, parser=parser), arguments)


if __name__ == "__main__":
    sys.exit(main())
