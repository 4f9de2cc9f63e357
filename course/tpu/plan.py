"""Plan how a step is split over chips that are not there: ``python -m course.tpu plan MODEL``.

Each way of `splits.find_ways` is compiled, one after another, unless the answer is recorded with
the course. What the compiler says is kept, so that an interrupted plan goes on where it stopped.
Ways are ranked by a bound: the arithmetic of a chip and its exchange, one after the other, but for
what the schedule puts beside an exchange.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from matplotlib.figure import Figure
from tabulate import tabulate

from course import flux2
from course.families import Config, code_of
from course.tpu import splits
from course.tpu.chips import require_compiler
from course.tpu.exchange import LINKS, least_seconds, received_bytes
from course.tpu.jaxpr import find_products
from course.tpu.pieces import load_config, tree_bytes
from course.tpu.programs import Program, make_program
from course.tpu.records import Split, make_row, read_rows, read_split, write_rows
from course.tpu.splits import Way, find_ways, whole_step
from helpers.checkpoints import suitable_steps
from helpers.places import read_record

log = logging.getLogger(__name__)

RECORD = "ask/plans"  # what was asked before, and comes with the course
CHIPS = (4, 8)


@dataclass(frozen=True)
class Job:
    """What is to be split."""

    program: Program  #: its batch is that of all chips together
    chips: int
    guided: bool

    @property
    def ways(self) -> list[Way]:
        """Return the ways for so many images and chips, also those that the model forbids."""
        config = load_config(self.program.model)
        return find_ways(config, self.program.batch, self.chips, self.guided)

    def why_not(self, way: Way) -> str:
        """Say in a sentence why the model cannot be split in some way; empty if it can."""
        try:
            splits.check_way(way, load_config(self.program.model), self.program)
        except ValueError as error:
            return str(error)
        return ""

    def question(self, way: Way) -> dict:
        """Return what is asked about a way, as a record has it."""
        program = self.program
        return {
            "model": program.model,
            "chip": program.chip,
            "chips": self.chips,
            "height": program.height,
            "width": program.width,
            "batch": program.batch,
            "guided": self.guided,
            "dtype": program.dtype,
            "way": str(way),
        }

    def __str__(self) -> str:
        program = self.program
        images = "one image" if program.batch == 1 else f"{program.batch} images"
        guidance = "with" if self.guided else "without"
        return (
            f"A step of {Path(program.model).name}: {images} of {program.height} × "
            f"{program.width} pixels, {guidance} guidance, {program.dtype}, over {self.chips} "
            f"{program.chip} chips"
        )


def make_job(
    model: str,
    chip: str = "v6e",
    chips: int = 8,
    *,
    batch: int = 1,
    height: int | None = None,
    width: int | None = None,
    guided: bool | None = None,
    dtype: str = "bfloat16",
) -> Job:
    """Say what is to be split; what is None, the model's configuration decides.

    Parameters
    ----------
    model : str
        See ``Program.model``.
    chip : str
        v5e or v6e, of which the links' speed is known here.
    chips : int
        4 or 8.
    batch : int
        Images that all chips together draw at a time.
    height, width : int, optional
        In pixels; by default what the model was trained for.
    guided : bool, optional
        Whether there is guidance; by default there is, but for distilled models.
    dtype : str
        bfloat16 or float32.

    Raises
    ------
    ValueError
        If one of these cannot be.
    """
    if chip not in LINKS:
        raise ValueError(
            f"How fast the links of {chip!r} are is not known here: choose {' or '.join(LINKS)}."
        )
    if chips not in CHIPS:
        raise ValueError(f"{chips} chips cannot be asked for: choose 4 or 8.")
    steps, guidance = suitable_draw(load_config(model))
    program = make_program(
        model,
        chip,
        batch=batch,
        height=height,
        width=width,
        steps=steps,
        dtype=dtype,
        attention="automatic",
    )
    return Job(program, chips, guidance > 1 if guided is None else guided)


def suitable_draw(config: Config) -> tuple[int, float]:
    """Return the steps and the guidance scale that suit a model, see `suitable_steps`."""
    if isinstance(config, flux2.Config):
        return suitable_steps("flux2", config.side, config.is_distilled)
    return suitable_steps("sdxl" if config.is_xl else "sd", config.side)


# Asking


class Answers(NamedTuple):
    """What is known of the ways for a job."""

    splits: dict[Way, Split]
    impossible: dict[Way, str]  #: ways that cannot be, each with a sentence
    unanswered: dict[Way, str]  #: ways of which the compiler said nothing, each with a sentence


def ask_ways(
    job: Job,
    file: Path | None = None,
    only: str = "",
    timeout: float | None = None,
    anew: bool = False,
) -> Answers:
    """Ask the compiler about all ways, one after another, that nobody has asked about yet.

    Parameters
    ----------
    job : Job
    file : Path, optional
        Where answers are kept, as soon as each is there. Those that are in it, or were recorded
        with the course, are not asked for again.
    only : str
        Ask only about ways that have this in their name; what is known is given for all.
    timeout : float, optional
        For each way, see `course.tpu.ask_compiler`.
    anew : bool
        Whether to ask also what was recorded with the course, where the compiler can be asked.

    Raises
    ------
    RuntimeError
        If the compiler cannot be asked here, and nothing is known, or the file is of something
        else.
    """
    answers = Answers({}, {}, {})
    refusal = ""
    try:
        require_compiler()
    except RuntimeError as error:
        refusal = str(error)
    kept = kept_splits(job, file) if file else {}
    recorded = known_splits(job, recorded_rows())
    left = []
    for way in job.ways:
        reason = job.why_not(way)
        if reason:
            answers.impossible[way] = reason
        elif way in kept:
            answers.splits[way] = kept[way]
        elif way in recorded and not (anew and only in str(way) and not refusal):
            answers.splits[way] = recorded[way]
        elif only not in str(way):
            answers.unanswered[way] = "It was left out."
        elif refusal:
            answers.unanswered[way] = refusal
        else:
            left.append(way)
    if refusal and answers.unanswered and not answers.splits:
        raise RuntimeError(refusal)
    for number, way in enumerate(left, 1):
        log.info("%d of %d: %s", number, len(left), way)
        start = time.monotonic()
        try:
            answer = splits.ask_way(job.program, job.guided, way, timeout)
        except RuntimeError as error:
            answers.unanswered[way] = str(error).splitlines()[0]
            log.info("no answer: %s", answers.unanswered[way])
            continue
        row = make_row(job.question(way), answer)
        if file is not None:
            write_rows(file, [*read_rows(file), row])
        answers.splits[way] = read_split(row)
        log.info("answered in %.0f s", time.monotonic() - start)
    return answers


def known_splits(job: Job, rows: Iterable[dict]) -> dict[Way, Split]:
    """Return what rows have about the ways of a job."""
    by_question = {tuple(row["question"].items()): row for row in rows}
    found = {}
    for way in job.ways:
        row = by_question.get(tuple(job.question(way).items()))
        if row:
            found[way] = read_split(row)
    return found


def kept_splits(job: Job, file: Path) -> dict[Way, Split]:
    """Return what a plan has kept; raise ``RuntimeError`` if a file is none of a plan."""
    try:
        kept = known_splits(job, read_rows(file))
        for split in kept.values():
            for value in jax.tree.leaves(dataclasses.asdict(split)):
                if not isinstance(value, str) and not math.isfinite(value):
                    raise ValueError(f"{value} is not finite")
            text_of(split, job)  # what cannot be shown, no plan has written
        return kept
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        OSError,
        RecursionError,
        TypeError,
        ValueError,
    ):
        raise RuntimeError(
            f"{file} has no answers for a plan: move it away, or give a different folder."
        ) from None


def text_of(split: Split, job: Job) -> str:
    """Return what a plan of this way alone says of it."""
    bounds = rank({job.ways[0]: split}, 0, job.chips)
    tables = (table_of(bounds), table_of_exchange(bounds))
    return "\n".join([*tables, split.report.verdict, split.report.origin])


def recorded_rows() -> list[dict]:
    """Return what was asked before, and comes with the course."""
    try:
        return read_record(RECORD)
    except FileNotFoundError:
        return []


# Ranking


class Bound(NamedTuple):
    """Seconds that a step takes at least in some way, on a chip."""

    split: Split
    computing: float  #: by FLOPs, or by the bytes that have to be moved, whichever takes longer
    exchanging: float  #: over the links
    hidden: float  #: of the exchange, what the schedule hides behind products at the peak

    @property
    def seconds(self) -> float:
        return self.computing + self.exchanging - self.hidden


def step_flops(job: Job) -> int:
    """Count the operations of a step's products on one device, by what JAX traces."""
    step = whole_step(job.program, job.guided)
    products = find_products(step.function, *step.arguments)
    return sum(count * product.flops for product, count in products.items())


def bound_of(split: Split, flops: int, chips: int) -> Bound:
    """Return the bounds for one way.

    Parameters
    ----------
    split : Split
        What the compiler says of it.
    flops : int
        Of all chips together, if none does what another does, too.
    chips : int
        How many chips there are.
    """
    report = split.report
    together = chips_together(split)
    # A product that several chips do counts on each; inside of an attention kernel none is seen.
    on_chip = max(flops / chips, report.schedule.flops)
    computing = max(on_chip / report.chip.peak, report.work.least_bytes / report.chip.bandwidth)
    may_wait = [each for each in split.exchanges if each.is_async]
    exchanging, may_hide = (
        least_seconds(exchanges, report.chip.name, together)
        for exchanges in (split.exchanges, may_wait)
    )
    beside = report.schedule.beside_exchange / max(report.schedule.flops, 1)
    return Bound(split, computing, exchanging, min(may_hide, beside * computing))


def chips_together(split: Split) -> int:
    """Return how many chips exchange with one another, where an exchange does not say it."""
    return list(split.mesh.values())[-1] if split.mesh else 1


def rank(found: Mapping[Way, Split], flops: int, chips: int) -> dict[Way, Bound]:
    """Return the bounds for all ways that fit, the shortest time first, and then for the others."""
    bounds = {}
    for way, split in found.items():
        if split.report.work is not None:
            bounds[way] = bound_of(split, flops, chips)

    def order(way: Way) -> tuple[bool, float]:
        return not bounds[way].split.report.fits, bounds[way].seconds

    return {way: bounds[way] for way in sorted(bounds, key=order)}


# Showing


def table_of(bounds: Mapping[Way, Bound]) -> str:
    """Return the ways, as they are ranked, with memory on each chip and the bounds, as a table."""
    rows = []
    for way, found in bounds.items():
        held = (found.split.parameters, found.split.report.memory.total)
        seconds = (found.computing, found.exchanging, found.hidden, found.seconds)
        rows.append(
            [
                name_of(way, found),
                *[f"{each / 2**30:.3g}" for each in held],
                *[f"{1e3 * each:.3g}" for each in seconds],
            ]
        )
    header = ["way", "GiB of\nparameters", "GiB\nin all", "ms to\ncompute", "ms to\nexchange"]
    header += ["of these\nhidden", "ms\nin all"]
    return table(rows, header)


def table_of_exchange(bounds: Mapping[Way, Bound]) -> str:
    """Return how often each collective runs in a step, and the megabytes, as a table.

    They are those of its results on a chip, and of what a chip receives for these.
    """
    rows = []
    for way, found in bounds.items():
        split = found.split
        kinds = {}
        for each in split.exchanges:
            runs, results, received = kinds.get(each.kind, (0, 0, 0))
            received += received_bytes([each], chips_together(split))
            kinds[each.kind] = (runs + each.runs, results + each.bytes, received)
        for kind, (runs, *sizes) in kinds.items():
            rows.append(
                [name_of(way, found), kind, runs, *[f"{size / 1e6:,.2f}" for size in sizes]]
            )
    return table(rows, ["way", "collective", "runs", "MB of results", "MB received"], texts=2)


def table(rows: list[list], header: list[str], texts: int = 1) -> str:
    """Return a table whose first columns are texts, and the others numbers."""
    alignment = ["left"] * texts + ["right"] * (len(header) - texts)
    return tabulate(rows, header, "simple", colalign=alignment, disable_numparse=True)


def name_of(way: Way, found: Bound) -> str:
    """Return what a way is called where it is shown."""
    return str(way) if found.split.report.fits else f"{way} (does not fit)"


def draw_comparison(job: Job, bounds: Mapping[Way, Bound]) -> Figure:
    """Draw a bar for each way: computing, and what of the exchange is not hidden."""
    figure = Figure(figsize=(9, 1.8 + 0.4 * len(bounds)), layout="constrained")
    axes = figure.subplots()
    for way, found in bounds.items():
        name = name_of(way, found)
        computing, open_exchange = 1e3 * found.computing, 1e3 * (found.exchanging - found.hidden)
        axes.barh(name, computing, color="C0")
        axes.barh(name, open_exchange, left=computing, color="C1")
        axes.barh(name, 1e3 * found.hidden, left=1e3 * found.seconds, color="none", edgecolor="C1")
        end = 1e3 * (found.computing + found.exchanging)
        axes.text(end, name, f" {1e3 * found.seconds:.3g}", va="center")
    axes.invert_yaxis()
    longest = max(found.computing + found.exchanging for found in bounds.values())
    axes.set_xlim(0, 1.15e3 * longest)  # with room for the number
    axes.set_xlabel("ms of a step at least")
    figure.suptitle(str(job), fontsize="medium")
    names = ["computing", "exchange", "exchange that can hide"]
    figure.legend(axes.containers[:3], names, loc="outside lower center", ncols=3)
    return figure


def say(job: Job, answers: Answers, bounds: Mapping[Way, Bound]) -> str:
    """Return the plan as a page of text."""
    blocks = [f"{job}."]
    if bounds:
        blocks.append(table_of(bounds))
        blocks.append(
            "These are bounds, and no estimates of the time: each product at the chip's peak, each "
            "byte at the\nfull speed of a link. What is hidden fits beside the products that the "
            "compiler placed there,\nat the peak."
        )
        if any(found.split.exchanges for found in bounds.values()):
            blocks.append(table_of_exchange(bounds))
        blocks.append(rest_of_model(job))
        reports = [bound.split.report for bound in bounds.values()]
        said = {
            f"libtpu {each.versions['libtpu']} with jax {each.versions['jax']}, on {each.date}"
            for each in reports
        }
        blocks.append(f"The compiler was {'; '.join(sorted(said))}.")
    refused = {
        way: split.report.verdict
        for way, split in answers.splits.items()
        if split.report.work is None
    }
    for title, sentences in {
        "Ways that cannot be:": answers.impossible,
        "Ways that the compiler refuses:": refused,
        "Ways without an answer:": answers.unanswered,
    }.items():
        if sentences:
            lines = [f"- {way}: {sentence}" for way, sentence in sentences.items()]
            blocks.append("\n".join([title, *lines]))
    return "\n\n".join(blocks)


def rest_of_model(job: Job) -> str:
    """Say how much memory the parts take that have no place in a step."""
    config = load_config(job.program.model)
    shapes = code_of(config).parameter_shapes(config, job.program.dtype)
    others = [tree for part, tree in shapes.items() if part not in ("unet", "transformer")]
    return (
        f"Text encoders and VAE take {tree_bytes(others) / 2**30:.2f} GiB more, on each chip or "
        "split by the same rules, unless they are loaded in turn."
    )
