"""Record what the TPU compiler says about Stable Diffusion 1.4 and XL: ``make tpu-report``.

Writes a file to ``benchmarks/tpu`` for each program as soon as its answer is there, and leaves out what is recorded.
Every single compilation is kept in the tool's cache as well, so an interrupted run goes on where it stopped. All of it
takes many hours on 2 cores: ``--minutes`` and ``--only`` take a part of it.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path

import diffusers
import jax
import transformers

from helpers import tpu
from helpers.tpu.compiler import write_json

FOLDER = Path(__file__).with_name("tpu")
REPORT, LARGEST = "report", "largest batch"  # what there is to do about a program


def programs() -> dict[str, tpu.Program]:
    """The programs of the report by name, the most useful first."""
    # The bundled checkpoint compiles in seconds: it shows what chips and steps change (nothing), and what heads do.
    small = {"chips": 8, "steps": 20}
    heads = {"split_head_dim": True}
    variants = {"8-chips": {}, "1-chip": {"chips": 1}, "50-steps": {"steps": 50}, "other-heads": heads}
    found = {f"shapes-sd-bfloat16-v5e-{n}": tpu.Program("shapes-sd", **small | v) for n, v in variants.items()}
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    steps = {"sd": 50, "sdxl": 20}
    for dtype in ("bfloat16", "float32"):
        # Published are times of SDXL on v5e and v4, so these come first.
        for name in ("sd-v5e", "sdxl-v5e", "sdxl-v4", "sd-v6e", "sdxl-v6e", "sd-v4"):
            model, chip = name.split("-")
            found[f"{model}-{dtype}-{chip}"] = tpu.Program(model, chip, dtype=dtype, steps=steps[model])
    for model in steps:  # attention laid out the other way than usual
        program = tpu.Program(model, "v5e", steps=steps[model], split_head_dim=model != "sdxl")
        found[f"{model}-bfloat16-v5e-other-heads"] = program
    return found


def is_searched(program: tpu.Program) -> bool:
    """Whether a program's largest batch belongs to the report: a real model's, laid out as usual."""
    return program.pipeline in ("sd", "sdxl") and program.split_head_dim is None


def missing(wanted: dict[str, tpu.Program], folder: Path) -> list[tuple[str, str]]:
    """What is left to do, in this order: every program's report, then the largest batches."""
    reports, largest = [], []
    for name, program in wanted.items():
        file = folder / f"{name}.json"
        if not file.exists():
            reports.append((name, REPORT))
        if is_searched(program) and not (file.exists() and json.loads(file.read_text())["largest_batch"]):
            largest.append((name, LARGEST))
    return reports + largest


def guess_from_another_chip(program: tpu.Program, usable: int, folder: Path) -> int | None:
    """Nine tenths of the batch that should fit, as pictures need about as much memory on any chip; None if unknown.

    Of the chips whose answer for the same model and dtype is recorded, the one with the most similar memory counts.
    """
    guesses = []
    for name, other in programs().items():
        file = folder / f"{name}.json"
        if other == program or dataclasses.replace(other, chip=program.chip) != program or not file.exists():
            continue
        report = json.loads(file.read_text())
        found = report["largest_batch"] or {"largest": 0}
        if found["largest"] > 1:
            needs = {entry["batch"]: sum(entry["hbm"].values()) for entry in found["tried"] if entry["fits"]}
            each = max(1, (needs[found["largest"]] - needs[1]) // (found["largest"] - 1))
            fitting = found["largest"] + (usable - needs[found["largest"]]) / each
            guesses.append((abs(usable - report["usable_hbm"]), int(0.9 * fitting)))
    return min(guesses)[1] if guesses else None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start no program after so many minutes")
    parser.add_argument("--only", default="", help="only programs whose name has this in it")
    parser.add_argument(
        "--guess", type=int, help="the batch to begin searches with (by default what another chip's answer suggests)"
    )
    parser.add_argument(
        "--list", action="store_true", help="say what is recorded and what is left, and compile nothing"
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of the report (%(default)s)")
    parser.add_argument("--cache", type=Path, default=tpu.default_cache(), help="folder of answers (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = {name: program for name, program in programs().items() if options.only in name}
    if not wanted:
        parser.error(f"no program has {options.only!r} in its name; there are {', '.join(programs())}")
    if options.guess is not None and options.guess < 2:
        parser.error(f"--guess is {options.guess}, and has to be 2 or more, as batch 1 is compiled anyway")
    left = missing(wanted, options.to)
    if options.list:
        for name in wanted:
            print(f"{name:<36}{', '.join(what for other, what in left if other == name) or 'nothing'} to do")
        return 0

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        tpu.tpu_devices()
    except RuntimeError as error:
        say(str(error))
        return 1
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    start, refused = time.monotonic(), []
    while left and (options.minutes is None or time.monotonic() - start < options.minutes * 60):
        (name, what), *left = left
        if name in refused:  # there is no report to add a largest batch to
            continue
        say(f"== {name}: {what}")
        file, program = options.to / f"{name}.json", wanted[name]
        try:
            if what == REPORT:
                report = tpu.compile_report(program, cache=options.cache, say=say)
            else:
                known = json.loads(file.read_text())
                guess = options.guess or guess_from_another_chip(program, known["usable_hbm"], options.to)
                found = tpu.largest_batch(program, report=known, guess=guess, cache=options.cache, say=say)
                # Read again: the search takes hours, in which the file may have changed.
                report = json.loads(file.read_text()) | {"largest_batch": found}
        except jax.errors.JaxRuntimeError as error:  # the other programs may still compile
            say(f"{name}: the compiler failed: {error}")
            refused.append(name)
            continue
        write_json(file, report)
        say(f"recorded; left: {', '.join(f'{name} ({what})' for name, what in left) or 'nothing'}")
    print(f"Left to do: {len(left)}. Failed: {', '.join(refused) or 'nothing'}.")
    return bool(refused)


if __name__ == "__main__":
    # With some large batches libtpu 0.0.42.1 overflows the stacks of its threads, and ends the process. These are its
    # own flags; a libtpu that lacks one ends the process, too, and names it. So nothing that imports this gets them.
    stacks = "--xla_internal_thread_stack_size_bytes=16777216 --default_thread_stack_size=16777216"
    os.environ.setdefault("LIBTPU_INIT_ARGS", f"{stacks} --fibers_default_thread_stack_size=16777216")
    sys.exit(main())
