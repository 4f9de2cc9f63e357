"""Record what the TPU compiler says about Stable Diffusion 1.4 and XL: ``make tpu-report``.

About the pipelines it writes a file for each program to ``benchmarks/tpu``, and about the model of
``course.sd`` all into ``benchmarks/tpu_pieces.json``, which chapter 12 shows. Each answer is
written as soon as it is there, and what is recorded is left out, so an interrupted run goes on
where it stopped. All of it takes many hours on 2 cores: ``--minutes`` and ``--only`` take a part.
"""

import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import jax

from benchmarks.common import FOLDER, make_parser, work_through, write_json
from course.tpu.answers import Answer, Report
from course.tpu.chips import tpu_devices
from course.tpu.pieces import parameter_bytes, take_piece
from course.tpu.programs import DECODER, ENCODERS, PARTS, STEP, WHOLE, Program, make_program
from course.tpu.records import largest_batch, read_answers
from helpers import quiet_warnings

# With some large batches libtpu 0.0.42.1 overflows the stacks of its threads, and ends its process.
# These are its own flags. A libtpu that lacks one ends its process, too, and names it. So nothing
# that imports this gets them.
STACKS = (
    "--xla_internal_thread_stack_size_bytes=16777216 "
    "--default_thread_stack_size=16777216 "
    "--fibers_default_thread_stack_size=16777216"
)


def pipeline_programs() -> dict[str, Program]:
    """The pipelines' programs by the names of their files, the most useful first."""
    found = {}
    # The bundled checkpoint compiles in seconds: it shows what chips and steps change (nothing),
    # and what heads do.
    small = make_program("shapes-sd", "v5e", chips=8, steps=20)
    found["shapes-sd-bfloat16-v5e-8-chips"] = small
    found["shapes-sd-bfloat16-v5e-1-chip"] = dataclasses.replace(small, chips=1)
    found["shapes-sd-bfloat16-v5e-50-steps"] = dataclasses.replace(small, steps=50)
    found["shapes-sd-bfloat16-v5e-other-heads"] = dataclasses.replace(small, split_head_dim=True)
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    steps = {"sd": 50, "sdxl": 20}
    for dtype in ("bfloat16", "float32"):
        # Published are times of SDXL on v5e and v4, so these come first.
        for name in ("sd-v5e", "sdxl-v5e", "sdxl-v4", "sd-v6e", "sdxl-v6e", "sd-v4"):
            model_name, chip = name.split("-")
            program = make_program(model_name, chip, steps=steps[model_name], dtype=dtype)
            found[f"{model_name}-{dtype}-{chip}"] = program
    for name in ("sd", "sdxl"):  # attention laid out the other way than usual
        usual = found[f"{name}-bfloat16-v5e"]
        other = dataclasses.replace(usual, split_head_dim=not usual.split_head_dim)
        found[f"{name}-bfloat16-v5e-other-heads"] = other
    return found


def is_searched(name: str) -> bool:
    """Whether a pipeline's largest batch is looked for: a real model's, laid out as usual."""
    return not name.startswith("shapes") and not name.endswith("other-heads")


def model_pieces() -> list[tuple[Program, str]]:
    """What to ask about the model of ``course.sd``, the most useful first."""

    xl = make_program("sdxl", steps=20, attention="plain")
    sd = make_program("sd", steps=50, attention="plain")
    asked = [(xl, piece) for piece in (STEP, DECODER, ENCODERS)]
    for chip, batch in (("v5e", 12), ("v5e", 16), ("v6e", 36)):
        many = dataclasses.replace(xl, chip=chip, batch=batch, decode_batch=1)
        asked.append((many, WHOLE))
    for piece in (STEP, DECODER, ENCODERS):
        asked.append((sd, piece))
    return asked


def read(file: Path) -> list[Answer]:
    """The answers in a file, and none if there is no such file yet."""
    return read_answers(file) if file.exists() else []


def find_report(answers: Sequence[Answer], program: Program, name: str) -> Report | None:
    for answer in answers:
        if answer.program == program and name in answer.pieces:
            return answer.pieces[name]
    return None


def ask(file: Path, program: Program, name: str) -> None:
    """Ask about a piece, and add the answer to a file."""
    report = take_piece(program, name).ask(program.chip)
    print(report.verdict, flush=True)
    answers = read(file)
    programs = [answer.program for answer in answers]
    if program not in programs:
        programs.append(program)
        answers.append(Answer(program, {}, parameter_bytes(program)))
    answers[programs.index(program)].pieces[name] = report
    write_json(file, [dataclasses.asdict(answer) for answer in answers])


def next_batch(program: Program, answers: Sequence[Answer], start: int) -> int | None:
    """The batch to ask about next in search of the largest that fits; None if that is known.

    It doubles from ``start`` until one does not fit, and then halves the interval. With one image
    more than the largest that fits, a program does not.
    """
    if largest_batch(program, answers) is not None:
        return None
    fitting = 0
    refused = None
    for answer in answers:
        if dataclasses.replace(answer.program, batch=program.batch) != program:
            continue
        report = answer.pieces.get(WHOLE)
        batch = answer.program.batch
        if report and report.fits:
            fitting = max(fitting, batch)
        elif report and (refused is None or batch < refused):
            refused = batch
    if refused is None:
        return max(start, 2 * fitting)
    return (fitting + refused) // 2


def find_left(
    folder: Path, pieces_file: Path, start: int | None = None
) -> dict[str, Callable[[], None]]:
    """What is not recorded yet: pipelines' programs and parts, the model's, the largest batches."""
    left = {}
    searches = {}
    for stem, program in pipeline_programs().items():
        file = folder / f"{stem}.json"
        answers = read(file)
        whole = find_report(answers, program, WHOLE)
        names = [WHOLE]
        if whole is None or whole.fits:
            names += PARTS
        for name in names:
            if find_report(answers, program, name) is None:
                left[f"{stem}: {name}"] = functools.partial(ask, file, program, name)
        if is_searched(stem):
            searches[stem] = (file, program, start or 2)
    answers = read(pieces_file)
    for program, name in model_pieces():
        if find_report(answers, program, name) is None:
            left[f"{program}: {name}"] = functools.partial(ask, pieces_file, program, name)
    for name, (file, program, first) in searches.items():
        batch = next_batch(program, read(file), first)
        if batch is not None:
            asked = dataclasses.replace(program, batch=batch)
            left[f"{name}: largest batch"] = functools.partial(ask, file, asked, WHOLE)
    return left


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--start", type=int, help="the batch to begin searches with")
    parser.add_argument(
        "--to", type=Path, default=FOLDER, help="the folder of the records (%(default)s)"
    )
    options = parser.parse_args(arguments)
    quiet_warnings()
    if options.start is not None and options.start < 1:
        parser.error(f"--start is {options.start}, and has to be 1 or more")
    if not options.list:
        jax.config.update("jax_platforms", "cpu")
        try:
            tpu_devices()
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    folder = options.to / "tpu"
    pieces_file = options.to / "tpu_pieces.json"
    return work_through(lambda: find_left(folder, pieces_file, options.start), options)


if __name__ == "__main__":
    os.environ.setdefault("LIBTPU_INIT_ARGS", STACKS)
    sys.exit(main())
