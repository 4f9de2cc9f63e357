"""What the TPU compiler said before, and what others measured; tables of both."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from tabulate import tabulate

from course.model.files import read_text, write_bytes
from course.tpu.answers import Answer, Memory, Report, Times, Work
from course.tpu.chips import CHIPS, Chip, find_chip, require_compiler
from course.tpu.compiler import ask_compiler, versions
from course.tpu.hlo import Collective, Copy, Overlap
from course.tpu.jaxpr import ROWS, Product
from course.tpu.programs import PARTS, STEP, WHOLE, Program, make_program
from course.tpu.roofline import clock_of
from helpers.places import read_record


def read_report(row: dict) -> Report:
    """Read the report in a row of a record: see `helpers.read_record`.

    Unknown and missing fields raise a TypeError or a KeyError. What nobody wrote down is None.
    """
    content = row["answer"]["report"]
    fields = content | {
        "date": row["date"],
        "versions": row["versions"],
        "chip": Chip(**content["chip"]),
        "collectives": tuple(Collective(**each) for each in content["collectives"]),
    }
    for name, kind in {"memory": Memory, "work": Work, "schedule": Overlap}.items():
        if content[name] is not None:
            fields[name] = kind(**content[name])
    if content["copies"] is not None:
        fields["copies"] = tuple(Copy(**each) for each in content["copies"])
    return Report(**fields)


def answer_of(report: Report, **more) -> dict:
    """Return a report as a record has it, for `read_report`, and more figures.

    Collectives are added up, and copies are left out unless the text was asked for.
    """
    exchanges = [dataclasses.asdict(exchange) for exchange in add_up(report.collectives)]
    copies = report.copies if report.text else None
    content = dataclasses.asdict(dataclasses.replace(report, collectives=(), copies=copies))
    del content["date"], content["versions"]  # a row has them
    return {"report": content, "exchanges": exchanges} | more


def make_row(question: dict, answer: dict, *packages: str) -> dict:
    """Return a row of a record: an answer, when it was given, and by which versions of packages."""
    return {
        "question": question,
        "answer": answer,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(*packages),
    }


def read_rows(file: Path) -> list[dict]:
    """Return the rows in a file, and none if there is no such file yet."""
    if not file.exists():
        return []
    rows = json.loads(read_text(file))
    if not isinstance(rows, list):
        raise ValueError(f"{file} holds no rows of a record: get it again.")
    return rows


def write_rows(file: Path, rows: Iterable[dict]) -> None:
    """Write rows whole or not at all, so that an interruption leaves nothing half-written."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    write_bytes(file, f"[\n{lines}\n]\n".encode())


def read_answers(rows: Iterable[dict]) -> list[Answer]:
    """Read rows about pieces of programs; an impossible program raises a ValueError."""
    answers = {}
    for row in rows:
        question = dict(row["question"])
        piece = question.pop("piece")
        program = make_program(**question)
        answer = answers.setdefault(program, Answer(program, {}))
        answer.pieces[piece] = read_report(row)
        if "parameters" in row["answer"]:
            answers[program] = dataclasses.replace(answer, parameters=row["answer"]["parameters"])
    return list(answers.values())


def recorded_answers(**settings) -> list[Answer]:
    """Return the recorded answers, but only those on programs with these settings.

    They are on the pipelines, whose ``attention`` is None, and on the model of ``course.sd``.
    """
    return [answer for answer in _read_all() if settings.items() <= vars(answer.program).items()]


@functools.cache
def _read_all() -> tuple[Answer, ...]:
    return tuple(read_answers(read_record("ask/programs")))


def recorded_report(program: Program, piece: str) -> Report | None:
    """Return what was recorded about a piece of a program; None if nobody asked.

    The number of steps changes no piece by more than a thousandth, so any will do.
    """
    if program.attention == "automatic":  # which is plain on TPUs
        program = dataclasses.replace(program, attention="plain")
    with_other_steps = None
    for answer in _read_all():
        is_same = dataclasses.replace(answer.program, steps=program.steps) == program
        if is_same and piece in answer.pieces:
            if answer.program == program:
                return answer.pieces[piece]
            with_other_steps = with_other_steps or answer.pieces[piece]
    return with_other_steps


def recorded_times(program: Program) -> Times | None:
    """Return the least time for a program; None unless all of its parts are recorded."""
    parts = {name: recorded_report(program, name) for name in PARTS}
    if None in parts.values():
        return None
    return Answer(program, parts).times


def ask_or_recall(function: Callable, *arguments, chip: str = "v5e") -> Report:
    """Ask the compiler about a function; where it cannot be asked, recall a recorded answer.

    Recorded are the questions of chapters 8 and 12. The report has the compiled program's text.

    Parameters
    ----------
    function, *arguments, chip
        As for `course.tpu.ask_compiler`. A question is known by the function's name, its arguments'
        types, and the chip.

    Raises
    ------
    RuntimeError
        If the compiler cannot be asked here, and this question was not recorded.
    """
    try:
        find_chip(chip)
    except RuntimeError as error:
        question = question_of(function, *arguments, chip=chip)
        for row in read_record("ask/questions"):
            if row["question"]["call"] == question:
                return read_report(row)
        raise RuntimeError(f"{error} None is recorded on {question}.") from None
    return ask_compiler(function, *arguments, chip=chip, keep_text=True)


def question_of(function: Callable, *arguments, chip: str = "v5e") -> str:
    """Return how a question to the compiler is recorded.

    Examples
    --------
    >>> x = jax.ShapeDtypeStruct((8, 128), "bfloat16")
    >>> question_of(jax.numpy.sin, x)
    'sin(bfloat16[8,128]) on v5e'
    """
    types = []
    for leaf in jax.tree.leaves(arguments):
        sides = ",".join(str(side) for side in leaf.shape)
        types.append(f"{leaf.dtype}[{sides}]")
    return f"{function.__name__}({', '.join(types)}) on {chip}"


def compiler_report() -> str:
    """Say in a sentence whether the TPU compiler can be asked here."""
    try:
        require_compiler()
    except RuntimeError as error:
        return f"{error}\nWhat follows are recorded answers."
    used = versions("jax", "libtpu")
    return f"The TPU compiler can be asked: libtpu {used['libtpu']}, with jax {used['jax']}."


def largest_batch(program: Program, answers: Iterable[Answer]) -> int | None:
    """Return the largest batch with which a program fits, by the answers for other batches.

    It fits, and those of `larger_batches` do not; 0 if one image is too much. None if nobody found
    it yet. A smaller batch need not fit.
    """
    tried = tried_batches(program, answers)
    largest = max(batch for batch, fits in tried.items() if fits)
    return largest if larger_batches(largest) <= tried.keys() else None


def larger_batches(batch: int) -> set[int]:
    """Return with which batches a program must not fit, for this one to count as the largest.

    They are one image more, and the next multiple of eight: of such a batch the compiler wastes
    less, so it may fit where a smaller one does not. On a v5e chip the pipeline of Stable Diffusion
    XL takes 2 images, neither 3 nor 4, and 8. Where not even one image fits, nothing else is asked.

    >>> sorted(larger_batches(2)), sorted(larger_batches(28))
    ([3, 8], [29, 32])
    """
    if batch == 0:
        return {1}
    return {batch + 1, (batch // 8 + 1) * 8}


def tried_batches(program: Program, answers: Iterable[Answer]) -> dict[int, bool]:
    """Return whether a program fits with each batch that was tried; no image at all does."""
    tried = {0: True}
    for answer in answers:
        is_same = dataclasses.replace(answer.program, batch=program.batch) == program
        if is_same and WHOLE in answer.pieces:
            tried[answer.program.batch] = answer.whole.fits
    return tried


# Work that is split over several chips


@dataclasses.dataclass(frozen=True)
class Exchange:
    """All collectives of one kind in a program, on each device."""

    kind: str  #: such as ``all-gather``
    is_async: bool  #: whether the chip goes on computing in the meantime
    number: int  #: of instructions
    runs: int  #: in one run of the program
    bytes: int  #: of all their results in one run
    chips: int | None = None  #: how many exchange with one another; None if nobody wrote it down
    direction: int = 0  #: of collective-permutes, see `hlo.direction_of`; 0 if nobody wrote it down


def add_up(collectives: Iterable[Collective]) -> list[Exchange]:
    """Return what devices exchange by each kind of collective, as often as a loop goes round."""
    found = {}
    for each in collectives:
        key = (each.kind, each.is_async, each.chips, each.direction)
        none = Exchange(each.kind, each.is_async, 0, 0, 0, each.chips, each.direction)
        before = found.get(key, none)
        found[key] = dataclasses.replace(
            before,
            number=before.number + 1,
            runs=before.runs + each.runs,
            bytes=before.bytes + each.runs * each.bytes,
        )
    return list(found.values())


@dataclasses.dataclass(frozen=True)
class Split:
    """One way to split a program, and what the TPU compiler says of it on each chip."""

    mesh: dict[str, int]  #: the axes of the mesh, and how many chips each has
    images: int  #: drawn at a time by all chips together
    parameters: int  #: bytes on each chip
    report: Report
    exchanges: tuple[Exchange, ...]
    on_host: int = 0  #: bytes of parameters that wait in the host's memory

    @property
    def exchanged(self) -> int:
        """Bytes of the results of all collectives on each chip."""
        return sum(exchange.bytes for exchange in self.exchanges)

    @property
    def asynchronous(self) -> float:
        """The share of the exchanged bytes that asynchronous instructions move, from 0 to 1.

        Only what is computed between their start and their done hides them.
        """
        if not self.exchanged:
            return 1.0
        return sum(each.bytes for each in self.exchanges if each.is_async) / self.exchanged

    @property
    def kinds(self) -> str:
        """How often each kind of collective runs, such as ``3 all-reduce``."""
        runs = {}
        for exchange in self.exchanges:
            runs[exchange.kind] = runs.get(exchange.kind, 0) + exchange.runs
        return ", ".join(f"{number} {kind}" for kind, number in runs.items()) or "none"


@functools.cache
def recorded_splits(record: str) -> dict[str, Split]:
    """Read the recorded ways to split a program over chips.

    Parameters
    ----------
    record : str
        See `helpers.read_record`: ``ask/shardings`` is about XL, ``ask/flux2`` about FLUX.2-klein.

    Returns
    -------
    dict of Split
        By what was asked, such as ``draw, v5e, tensor``.
    """
    splits = {}
    for row in read_record(record):
        splits[", ".join(filter(None, row["question"].values()))] = read_split(row)
    return splits


def read_split(row: dict) -> Split:
    """Read the way to split a program in a row of a record."""
    answer = row["answer"]
    return Split(
        mesh=answer["mesh"],
        images=answer["images"],
        parameters=answer["parameters"],
        report=read_report(row),
        exchanges=tuple(Exchange(**exchange) for exchange in answer["exchanges"]),
        on_host=answer.get("on_host", 0),
    )


# Tables, and what others measured

TEXTS = ["pipeline", "chips", "batch", "fits"]
FIGURES = [
    "arguments, MiB",
    "temporaries, MiB",
    "program, MiB",
    "output, MiB",
    "GFLOP an image",
    "by FLOPs, an image",
    "by bytes, an image",
    "compiled in",
]


def table_of(answers: Sequence[Answer]) -> str:
    """Return answers as a table in Markdown, and a sentence on who gave them, and when.

    It has a row for each program with a batch of one, and one for the largest batch that fits.
    """
    rows = []
    for answer in answers:
        largest = largest_batch(answer.program, answers)
        if WHOLE in answer.pieces and answer.program.batch in (1, largest):
            rows.append(row_of(answer, is_largest=answer.program.batch == largest))
    alignment = ["left"] * len(TEXTS) + ["right"] * len(FIGURES)
    table = tabulate(
        rows, TEXTS + FIGURES, tablefmt="pipe", colalign=alignment, disable_numparse=True
    )
    reports = [report for answer in answers for report in answer.pieces.values()]
    return (
        f"{table}\n\n"
        "Memory is that of each device. “By FLOPs” and “by bytes” are the least times by the "
        "operations and by the bytes that have to be moved. "
        + say_who_answered((report.versions, report.date) for report in reports)
    )


def say_who_answered(answers: Iterable[tuple[dict[str, str], str]]) -> str:
    """Name the compilers, by the versions and the dates of their answers."""
    asked = set()
    dates = set()
    for packages, date in answers:
        asked.add(f"libtpu {packages['libtpu']} with jax {packages['jax']}")
        dates.add(date)
    first, last = min(dates), max(dates)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    return f"Answered by {', '.join(sorted(asked))}, {when}."


def row_of(answer: Answer, is_largest: bool) -> list[str]:
    """Return a row of `table_of`."""
    program = answer.program
    name = f"{program.model}, {program.height} × {program.width}, {program.steps} steps"
    name = f"{name}, {program.dtype}"
    if program.attention:
        name = f"{name}, attention {program.attention}"
    elif program.split_head_dim != make_program(program.model).split_head_dim:
        name = f"{name}, split_head_dim={program.split_head_dim}"
    row = [
        name,
        f"{program.chips}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{program.chip}",
        f"{program.batch}, the largest" if is_largest else str(program.batch),
        "yes" if answer.whole.fits else "no",
    ]
    memory = answer.whole.memory
    for kind in ("arguments", "temporaries", "program", "output"):
        row.append(f"{getattr(memory, kind) / 2**20:,.1f}" if memory else "")
    if answer.times:
        row.append(f"{answer.flops / program.batch / 1e9:,.0f}")
        row.append(f"{answer.times.operations / program.batch:.3g} s")
        row.append(f"{answer.times.transfers / program.batch:.3g} s")
    else:
        row += ["", "", ""]
    row.append(f"{answer.whole.compile_seconds:.0f} s")
    return row


class Published(NamedTuple):
    """A time that others measured, of programs in bfloat16 that draw 1024 × 1024 pixels."""

    system: str
    chip: str
    seconds: float  #: until the images are there
    source: str
    chips: int = 1  #: on which these images are drawn; each device of a TPU7x chip counts as one
    images: int = 1  #: drawn at a time
    step_seconds: float | None = None  #: of one step, where that was published
    model: str = "sdxl"


BLOG = "https://huggingface.co/blog/sdxl_jax"
MLPERF = "https://mlcommons.org/benchmarks/inference-datacenter/"
MAXDIFFUSION = "https://github.com/AI-Hypercomputer/maxdiffusion/pull"
# SDXL in 20 steps, one image on each chip at a time. The v4-8 has four chips: its name counts
# cores. MLPerf gives images in a second on four chips, "offline": in a row.
PUBLISHED = (
    Published("TPU v5e-4, MLPerf Inference v4.1", "v5e", 4 / 1.753, MLPERF),
    Published("TPU v6e-4, MLPerf Inference v4.1", "v6e", 4 / 5.439, MLPERF),
    Published("TPU v5e-4, JAX 0.4.16", "v5e", 2.33, BLOG),
    Published("TPU v4-8, JAX 0.4.16", "v4", 2.16, BLOG),
)
# FLUX.2-klein-4B in four steps.
PUBLISHED_KLEIN = (
    Published(
        "klein-4B, v6e-8, one image over eight chips",
        "v6e",
        0.394,
        f"{MAXDIFFUSION}/457",
        chips=8,
        step_seconds=0.06392,
        model="flux2",
    ),
    Published(
        "klein-4B, v6e, four images on one chip",
        "v6e",
        3.65,
        f"{MAXDIFFUSION}/434",
        images=4,
        step_seconds=0.7953,
        model="flux2",
    ),
)
# The 9B model. On the TPU7x chip each of its two devices has four of eight images.
PUBLISHED_KLEIN_9B = (
    Published(
        "klein-9B, v6e-8, one image over eight chips",
        "v6e",
        0.686,
        f"{MAXDIFFUSION}/457",
        chips=8,
        step_seconds=0.13705,
        model="flux2-9b",
    ),
    Published(
        "klein-9B, TPU7x, eight images on one chip",
        "tpu7x",
        3.52,
        f"{MAXDIFFUSION}/445",
        images=4,
        step_seconds=2.96 / 4,
        model="flux2-9b",
    ),
)

# Z-Image-Turbo, whose nine steps nobody timed by themselves.
PUBLISHED_Z_IMAGE = (
    Published("one image", "v6e", 0.59, f"{MAXDIFFUSION}/446", 8, 1, model="Z-Image"),
    Published("eight images", "v6e", 2.29, f"{MAXDIFFUSION}/446", 8, 8, model="Z-Image"),
)


def published_times() -> list[tuple[Published, Times]]:
    """Return the published times of SDXL, each with the recorded least time of the same program."""
    return [(each, recorded_times(make_program("sdxl", each.chip, steps=20))) for each in PUBLISHED]


def table_of_published() -> str:
    """Return the published times as a table in Markdown, with the least times and the MFU.

    Its last columns have the time that the products would take if they filled the MXU's tiles, by
    the two rules of `Product.padded_flops`.
    """
    rows = []
    for published, times in published_times():
        program = make_program("sdxl", published.chip, steps=20)
        chip = recorded_report(program, STEP).chip
        by_columns = padded_seconds(program, chip)
        by_rows = padded_seconds(program, chip, rows=CHIPS[chip.name].mxu)
        row = [f"[{published.system}]({published.source})"]
        for seconds in (published.seconds, times.operations, times.transfers):
            row.append(f"{seconds:.2f} s")
        row.append(f"{times.utilization(published.seconds):.0%}")
        row += [f"{by_columns:.2f} s", f"{by_rows:.2f} s"]
        rows.append(row)
    header = ["published", "an image took", "by FLOPs", "by bytes", "MFU"]
    header += ["by FLOPs, tiles filled", "rows filled, too"]
    alignment = ["left"] + ["right"] * (len(header) - 1)
    return tabulate(rows, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


# What a step takes, one after another.
BOUNDS = ("multiplying", "moving", "issuing", "exchanging")
KINDS = ("kernels", "products", "others")  # of instructions, see ``roofline.seconds_by_kind``


def table_of_kernels() -> str:
    """Return the cycles of attention by three kernels as a table in Markdown."""
    rows = []
    for row in read_record("ask/kernels"):
        *asked, part = row["question"].values()
        if part == STEP:
            continue
        cycles = row["answer"]["cycles"], row["answer"]["others"]
        rows.append([*asked, *(f"{number / 1e6:.2f}" for number in (*cycles, sum(cycles)))])
    header = ["attention of", "chip", "kernel"]
    header += ["million cycles of the kernel", "around it", "in all"]
    alignment = ["left"] * 3 + ["right"] * 3
    return tabulate(rows, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)


def table_of_steps() -> str:
    """Return the schedule of klein's step by two of these kernels as a table in Markdown.

    Its last column says how much of a step with the compiler's own kernel is saved.
    """
    recorded = [row for row in read_record("ask/kernels") if row["question"]["part"] == STEP]
    seconds = {}
    for row in recorded:
        seconds[row["question"]["chip"], row["question"]["kernel"]] = row["answer"]["seconds"]
    rows = []
    for chip, kernel in sorted(seconds):
        times = [seconds[chip, kernel][kind] for kind in KINDS]
        saved = 1 - sum(times) / sum(seconds[chip, "compiler"].values())
        times = [f"{1e3 * each:.1f}" for each in (*times, sum(times))]
        rows.append([chip, kernel, *times, f"{saved:.0%}" if kernel != "compiler" else ""])
    header = ["chip", "attention in the step", "ms of kernels", "products", "others", "in all"]
    header += ["saved"]
    alignment = ["left"] * 2 + ["right"] * 5
    table = tabulate(rows, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)
    return f"{table}\n\n" + say_who_answered((row["versions"], row["date"]) for row in recorded)


def table_of_options() -> str:
    """Return what options for the compiler change in a schedule as a table in Markdown."""
    rows = []
    recorded = read_record("ask/options")
    for row in recorded:
        asked, answer = row["question"], row["answer"]
        times = [answer[bound] for bound in BOUNDS]
        milliseconds = [f"{1e3 * seconds:.2f}" for seconds in (*times, sum(times))]
        memory = f"{answer['temporaries'] / 2**20:,.0f}"
        options = asked["options"] or "none"
        rows.append([asked["piece"], asked["chip"], options, *milliseconds, memory])
    rows.sort(key=lambda row: row[:3])
    header = ["what is compiled", "chip", "options", "ms of products", "bytes", "bundles"]
    header += ["exchange", "in all", "MiB"]
    alignment = ["left"] * 3 + ["right"] * 6
    table = tabulate(rows, header, tablefmt="pipe", colalign=alignment, disable_numparse=True)
    return f"{table}\n\n" + say_who_answered((row["versions"], row["date"]) for row in recorded)


def recorded_products(model: str) -> dict[str, dict[Product, int]]:
    """Read the matrix products and convolutions in each part of a model, and how often they run.

    Parameters
    ----------
    model : str
        ``sd``, ``sdxl`` or ``flux2``, each in its usual size and with one image at a time.
    """
    products = {}
    for row in read_record("ask/products"):
        if row["question"]["model"] == model:
            found = products[row["question"]["part"]] = {}
            for each in row["answer"]["products"]:
                count = each.pop("count")
                found[Product(**each)] = count
    return products


def recorded_flops(model: str) -> dict[str, int]:
    """Return the operations of those products in a run of each part."""
    flops = {}
    for part, products in recorded_products(model).items():
        flops[part] = sum(count * product.flops for product, count in products.items())
    return flops


def padded_seconds(program: Program, chip: Chip, rows: int = ROWS) -> float:
    """Return the seconds of a pipeline's products at a chip's peak, filled up to the MXU's tile.

    Parameters
    ----------
    program : course.tpu.Program
        Of ``sd`` or ``sdxl``, in the usual size and with a batch of one.
    chip : course.tpu.Chip
        Its figures; how wide its MXU is, `CHIPS` says.
    rows : int
        See `Product.padded_flops`.
    """
    flops = 0
    for part, products in recorded_products(program.model).items():
        flops += program.runs(part) * filled_flops(products, chip, rows)
    return flops / chip.peak


def filled_flops(products: dict[Product, int], chip: Chip, rows: int = ROWS) -> int:
    """Count the operations of products once the MXU's tiles are filled up."""
    tile = CHIPS[chip.name].mxu
    return sum(count * each.padded_flops(tile, rows) for each, count in products.items())


class Prediction(NamedTuple):
    """Seconds of a published run, measured, and as four rules have it beforehand.

    They are those of a step where that was published, and else those until the images are there.
    The first three are bounds.
    """

    published: Published
    measured: float
    by_flops: float  #: all products at the chip's peak
    by_tiles: float  #: once they fill the MXU's tiles, see `padded_seconds`
    #: each instruction by itself, its bundles counted, and what the chip waits for when it
    #: exchanges, see ``course.tpu.roofline``; parts that nobody asked about, as by tiles
    by_schedule: float
    #: as many cycles as the compiler expects of each instruction, and a kernel's bundles; no bound
    by_cycles: float


def predicted_times() -> list[Prediction]:
    """Return what is said beforehand of the published runs; nothing is fitted to them."""
    answers = {}
    for row in read_record("ask/rooflines"):
        answers[tuple(row["question"].values())] = row["answer"]
    found = []
    for run in (*PUBLISHED, *PUBLISHED_KLEIN, *PUBLISHED_KLEIN_9B):
        asked = run.model, run.chip, run.chips, run.images
        if run.step_seconds is None:
            program = make_program(run.model, run.chip, steps=20)
            chip = recorded_report(program, STEP).chip
            parts = {part: program.runs(part) for part in PARTS}
        else:
            chip = Chip(**answers[*asked, STEP]["chip"])
            parts = {STEP: 1}
        by_flops = by_tiles = by_schedule = by_cycles = 0.0
        for part, runs in parts.items():
            answer = answers.get((*asked, part))
            products = recorded_products(run.model)[part if run.model == "sdxl" else "step"]
            share = runs * run.images / run.chips / chip.peak
            tiles = share * filled_flops(products, chip)
            by_flops += share * sum(count * each.flops for each, count in products.items())
            by_tiles += tiles
            if answer:
                cycles = sum(answer["expected cycles"].values()) / clock_of(chip)
                by_schedule += runs * sum(answer[bound] for bound in BOUNDS)
                by_cycles += runs * (cycles + answer["exchanging"])
            else:
                by_schedule += tiles
                by_cycles += tiles
        measured = run.seconds if run.step_seconds is None else run.step_seconds
        found.append(Prediction(run, measured, by_flops, by_tiles, by_schedule, by_cycles))
    return found
