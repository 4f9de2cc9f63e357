"""What Stable Diffusion 1.4 and XL need on a chip: ``make tpu-report``.

First the diffusers pipelines, and their parts; then the model of ``course.sd``; last, the largest
batch that fits of each pipeline, and of XL's model on a v5e and a v6e, one image decoded after
another. The search takes what is recorded, doubles the batch until one does not fit, and then comes
down from there: the compiler refuses a program within a minute or two, and works on one that just
fits for half an hour and more. All of it takes many hours on 2 cores, and a compilation of XL up to
18 GB of memory: ``--only 'model sd,'`` and ``--minutes`` take a part. The seconds of a compilation
are those on the clock, with whatever else the machine did.
"""

import dataclasses
from collections.abc import Sequence

from course.tpu.answers import Answer
from course.tpu.pieces import parameter_bytes, take_piece
from course.tpu.programs import DECODER, ENCODERS, PARTS, STEP, WHOLE, Program, make_program
from course.tpu.records import answer_of, larger_batches, read_answers, tried_batches


def small_pipelines() -> list[Program]:
    """Return programs that compile in seconds.

    They show what chips and steps change (nothing), and what the layout of heads does.
    """
    small = make_program("shapes-sd", chips=8, steps=20)
    return [
        small,
        dataclasses.replace(small, chips=1),
        dataclasses.replace(small, steps=50),
        dataclasses.replace(small, split_head_dim=True),
    ]


def real_pipelines() -> list[Program]:
    """Return the programs of real models, whose largest batch is searched: most useful first."""
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    steps = {"sd": 50, "sdxl": 20}
    found = []
    for dtype in ("bfloat16", "float32"):
        # Published are times of SDXL on v5e and v4, so these come first.
        for name in ("sd-v5e", "sdxl-v5e", "sdxl-v4", "sd-v6e", "sdxl-v6e", "sd-v4"):
            model, chip = name.split("-")
            found.append(make_program(model, chip, steps=steps[model], dtype=dtype))
    return found


def other_heads() -> list[Program]:
    """Return the pipelines with attention laid out the other way than usual."""
    found = []
    for usual in real_pipelines()[:2]:
        found.append(dataclasses.replace(usual, split_head_dim=not usual.split_head_dim))
    return found


def model_pieces() -> list[tuple[Program, str]]:
    """Return what to ask about the model of ``course.sd``, the most useful first."""
    xl = make_program("sdxl", steps=20, attention="plain")
    flash = dataclasses.replace(xl, attention="flash")
    sd = make_program("sd", steps=50, attention="plain")
    asked = [(program, piece) for program in (xl, sd, flash) for piece in (STEP, DECODER, ENCODERS)]
    return asked + [(program, WHOLE) for program in decoded_in_turn()]


def decoded_in_turn() -> list[Program]:
    """Return the programs of `one_after_another` with which a search for larger ones begins."""
    return [one_after_another("v5e", 16), one_after_another("v6e", 36)]


def one_after_another(chip: str, batch: int) -> Program:
    """Return XL's model where one image is decoded after another, with a batch that fits."""
    return make_program("sdxl", chip, batch=batch, steps=20, attention="plain", decode_batch=1)


def questions(rows: list[dict]) -> list[dict]:
    answers = read_answers(rows)
    pieces = {answer.program: answer.pieces for answer in answers}
    asked = []
    for program in [*small_pipelines(), *real_pipelines(), *other_heads()]:
        whole = pieces.get(program, {}).get(WHOLE)
        # What does not fit is not asked about in parts.
        names = [WHOLE, *PARTS] if whole is None or whole.fits else [WHOLE]
        asked += [(program, name) for name in names]
    asked += model_pieces()
    for program in [*real_pipelines(), *decoded_in_turn()]:
        batch = next_batch(program, answers)
        if batch:
            asked.append((dataclasses.replace(program, batch=batch), WHOLE))
    return [dataclasses.asdict(program) | {"piece": name} for program, name in asked]


def next_batch(program: Program, answers: Sequence[Answer]) -> int | None:
    """Return the batch to ask about next in search of the largest that fits; None if it is known.

    See `course.tpu.records.largest_batch`.
    """
    tried = tried_batches(program, answers)
    fitting = max(batch for batch, fits in tried.items() if fits)
    refused = min((batch for batch in tried if batch > fitting), default=None)
    if refused is None:
        return max(2, 2 * fitting)
    if refused > fitting + 1:
        return refused - max(1, (refused - fitting) // 8)
    return min(larger_batches(fitting) - tried.keys(), default=None)


def answer(piece: str, **settings) -> dict:
    program = make_program(**settings)
    report = take_piece(program, piece).ask(program.chip)
    if piece == WHOLE:
        return answer_of(report, parameters=parameter_bytes(program))
    return answer_of(report)
