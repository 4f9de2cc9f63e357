"""Record what the TPU compiler says about Stable Diffusion 1.4 and XL: ``make tpu-report``.

Writes a file to ``benchmarks/tpu`` for each program as soon as its answer is there, and leaves out what is recorded, so
an interrupted run goes on where it stopped. All of it takes many hours on 2 cores: ``--minutes`` and ``--only`` take a
part of it.
"""

import argparse
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import diffusers
import jax
import transformers

from course import tpu
from course.tpu.compiler import versions, write_json
from course.tpu.pipelines import Program, ask_about_whole, load_shapes
from course.tpu.reports import Attempt, LargestBatch, PipelineReport, ask_about_pipeline, from_json

FOLDER = Path(__file__).with_name("tpu")
REPORT, LARGEST = "report", "largest batch"  # what there is to do about a program
# With some large batches libtpu 0.0.42.1 overflows the stacks of its threads, and ends the process. These are its own
# flags; a libtpu that lacks one ends the process, too, and names it. So nothing that imports this gets them.
STACKS = "--xla_internal_thread_stack_size_bytes=16777216 --default_thread_stack_size=16777216"
STACKS += " --fibers_default_thread_stack_size=16777216"
log = logging.getLogger("course.tpu.recorder")


def programs() -> dict[str, Program]:
    """The programs of the report by name, the most useful first."""
    # The bundled checkpoint compiles in seconds: it shows what chips and steps change (nothing), and what heads do.
    small = {"chips": 8, "steps": 20}
    heads = {"split_head_dim": True}
    variants = {"8-chips": {}, "1-chip": {"chips": 1}, "50-steps": {"steps": 50}, "other-heads": heads}
    found = {f"shapes-sd-bfloat16-v5e-{n}": Program("shapes-sd", **small | v) for n, v in variants.items()}
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    steps = {"sd": 50, "sdxl": 20}
    for dtype in ("bfloat16", "float32"):
        # Published are times of SDXL on v5e and v4, so these come first.
        for name in ("sd-v5e", "sdxl-v5e", "sdxl-v4", "sd-v6e", "sdxl-v6e", "sd-v4"):
            model, chip = name.split("-")
            found[f"{model}-{dtype}-{chip}"] = Program(model, chip, dtype=dtype, steps=steps[model])
    for model in steps:  # attention laid out the other way than usual
        program = Program(model, "v5e", steps=steps[model], split_head_dim=model != "sdxl")
        found[f"{model}-bfloat16-v5e-other-heads"] = program
    return found


def is_searched(program: Program) -> bool:
    """Whether a program's largest batch belongs to the report: a real model's, laid out as usual."""
    return program.pipeline in ("sd", "sdxl") and program.split_head_dim is None


def missing(wanted: dict[str, Program], folder: Path) -> list[tuple[str, str]]:
    """What is left to do, in this order: every program's report, then the largest batches."""
    reports, largest = [], []
    for name, program in wanted.items():
        file = folder / f"{name}.json"
        if not file.exists():
            reports.append((name, REPORT))
        if is_searched(program) and not (file.exists() and json.loads(file.read_text())["largest_batch"]):
            largest.append((name, LARGEST))
    return reports + largest


def largest_that_fits(fits: Callable[[int], bool], start: int = 1) -> int:
    """The largest number that fits, if all above it do not; 0 if none does.

    Doubles from ``start`` until a number does not fit, then halves the interval.

    Examples
    --------
    >>> largest_that_fits(lambda n: n <= 11), largest_that_fits(lambda n: n <= 11, start=20)
    (11, 11)
    """
    fitting, refused = 0, start
    while fits(refused):
        fitting, refused = refused, 2 * refused
    while refused - fitting > 1:
        middle = (fitting + refused) // 2
        if fits(middle):
            fitting = middle
        else:
            refused = middle
    return fitting


def find_largest_batch(program: Program, report: PipelineReport, start: int) -> LargestBatch:
    """Compile a program with different batches, until one fits and the next does not.

    The report spares the compilation of batch 1.
    """
    whole = report.whole
    tried = {1: Attempt(1, whole.fits, whole.memory, whole.compile_seconds)}
    shapes, date = load_shapes(program.pipeline, program.dtype, program.split_head_dim), whole.date

    def fits(batch: int) -> bool:
        nonlocal date
        if batch not in tried:
            answer = ask_about_whole(dataclasses.replace(program, batch=batch), shapes)
            tried[batch], date = Attempt(batch, answer.fits, answer.memory, answer.compile_seconds), answer.date
            log.info("batch %d: %s", batch, answer.verdict)
        return tried[batch].fits

    largest = largest_that_fits(fits, start) if whole.fits else 0
    return LargestBatch(largest, tuple(tried[batch] for batch in sorted(tried)), date, versions())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start no program after so many minutes")
    parser.add_argument("--only", default="", help="only programs whose name has this in it")
    parser.add_argument("--start", type=int, default=2, help="the batch to begin searches with (%(default)s)")
    parser.add_argument(
        "--list", action="store_true", help="say what is recorded and what is left, and compile nothing"
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of the report (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = {name: program for name, program in programs().items() if options.only in name}
    if not wanted:
        parser.error(f"no program has {options.only!r} in its name; there are {', '.join(programs())}")
    if options.start < 1:
        parser.error(f"--start is {options.start}, and has to be 1 or more")
    left = missing(wanted, options.to)
    if options.list:
        for name in wanted:
            print(f"{name:<36}{', '.join(what for other, what in left if other == name) or 'nothing'} to do")
        return 0
    logging.basicConfig(format="%(message)s")
    logging.getLogger("course").setLevel(logging.INFO)
    try:
        tpu.tpu_devices()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    start, refused = time.monotonic(), []
    while left and (options.minutes is None or time.monotonic() - start < options.minutes * 60):
        (name, what), *left = left
        if name in refused:  # there is no report to add a largest batch to
            continue
        log.info("== %s: %s", name, what)
        file, program = options.to / f"{name}.json", wanted[name]
        try:
            if what == REPORT:
                report = ask_about_pipeline(program)
            else:
                report = from_json(PipelineReport, json.loads(file.read_text()))
                found = find_largest_batch(program, report, options.start)
                report = dataclasses.replace(report, largest_batch=found)
        except jax.errors.JaxRuntimeError as error:  # the other programs may still compile
            log.info("%s: the compiler failed: %s", name, error)
            refused.append(name)
            continue
        write_json(file, dataclasses.asdict(report))
        log.info("recorded; left: %s", ", ".join(f"{name} ({what})" for name, what in left) or "nothing")
    print(f"Left to do: {len(left)}. Failed: {', '.join(refused) or 'nothing'}.")
    return bool(refused)


if __name__ == "__main__":
    os.environ.setdefault("LIBTPU_INIT_ARGS", STACKS)
    sys.exit(main())
