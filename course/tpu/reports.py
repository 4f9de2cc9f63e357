"""Reports on Stable Diffusion's programs: the whole, its parts, the bound and the estimate, and what was recorded."""

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from course.tpu.compiler import Memory, Part, Report, Times, find_times, from_json
from course.tpu.pipelines import Program, ask_about_whole, complete, load_shapes, take_apart, tree_bytes
from helpers.places import find_data

_KINDS = [field.name for field in dataclasses.fields(Memory)]


@dataclass(frozen=True)
class Attempt:
    """What the compiler said about one batch."""

    batch: int
    fits: bool
    memory: Memory | None  #: None if it refused
    compile_seconds: float


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch that fits on each device, and what was compiled to find it."""

    largest: int  #: 0 if none fits
    tried: tuple[Attempt, ...]
    date: str
    versions: dict[str, str]


@dataclass(frozen=True)
class PipelineReport:
    """What the compiler says about a pipeline's program. ``print`` makes a page of it."""

    program: Program  #: with nothing left to a default
    whole: Report  #: on the whole program, where the body of the loop over the steps counts once
    parameter_bytes: dict[str, int]  #: of each model, with the parameters that the program does not read
    parts: tuple[Part, ...]  #: what one device does in a call; none if the program does not fit
    times: Times | None  #: for a call; None if the program does not fit
    largest_batch: LargestBatch | None = None  #: None if nobody looked for it

    @property
    def flops(self) -> float:
        """Floating-point operations of a call, on each device."""
        return sum(part.runs * part.work.flops for part in self.parts)

    def __str__(self) -> str:
        p = self.program
        title = f"{p.pipeline}, {p.height} × {p.width} pixels, {p.steps} steps, {p.dtype}, batch {p.batch} on each "
        blocks = [f"{title}device of {p.chips} {p.chip} chip(s)\n{self.whole.verdict}"]
        if self.whole.memory:
            blocks.append(str(self.whole.memory))
        if self.parts:
            rows = [f"{'part':<16}{'runs':>5}{'GFLOP':>10}{'weights':>12}{'accessed':>12}  (of one run)"]
            for part in self.parts:
                flops, accessed, weights = dataclasses.astuple(part.work)
                rows.append(f"{part.name:<16}{part.runs:>5}{flops / 1e9:>10.4g}{weights / 1e6:>9.1f} MB")
                rows[-1] += f"{accessed / 1e6:>9.0f} MB"
            blocks.append("\n".join([*rows, f"A call: {self.times}"]))
        return "\n\n".join([*blocks, self.whole.origin])


def ask_about_pipeline(program: Program) -> PipelineReport:
    """Ask the compiler about a pipeline's program and its parts. Half a minute for a small one, long for a real one."""
    shapes = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    whole, parts, times = ask_about_whole(program, shapes), (), None
    if whole.fits:
        parts = tuple(piece.ask(program.chip) for piece in take_apart(program, shapes))
        times = find_times(parts, whole.chip)
    sizes = {name: tree_bytes(tree) for name, tree in shapes.params.items() if name != "scheduler"}
    return PipelineReport(complete(program, shapes), whole, sizes, parts, times)


def recorded_reports() -> list[PipelineReport]:
    """The reports in ``benchmarks/tpu``, sorted by their files' names."""
    files = sorted(find_data("benchmarks/tpu").glob("*.json"))
    return [from_json(PipelineReport, json.loads(file.read_text())) for file in files]


def table_of(reports: Iterable[PipelineReport]) -> str:
    """Reports as a table in Markdown, with a row for each program and for its largest batch, and who answered when."""
    rows, answers = [["pipeline", "chips", "batch", "fits", *_KINDS, "GFLOP", "bound", "estimate", "compiled"]], []
    for report in reports:
        p, found = report.program, report.largest_batch
        name = f"{p.pipeline}, {p.height} × {p.width}, {p.steps} steps, {p.dtype}"
        if p.split_head_dim != ("text_encoder_2" in report.parameter_bytes):  # which only XL has
            name += f", split_head_dim={p.split_head_dim}"
        per_image = [""] * 3
        if report.times:
            seconds = report.times.bound / p.batch, report.times.estimate / p.batch
            per_image = [f"{report.flops / p.batch / 1e9:,.0f}", *(f"{second:.3g} s" for second in seconds)]
        entries = [Attempt(p.batch, report.whole.fits, report.whole.memory, report.whole.compile_seconds)]
        entries += [entry for entry in found.tried if entry.batch == found.largest > p.batch] if found else []
        for number, entry in enumerate(entries):
            largest = ", the largest" if found and entry.batch == found.largest else ""
            sizes = [f"{getattr(entry.memory, kind) / 2**20:,.1f}" if entry.memory else "" for kind in _KINDS]
            chips = f"{p.chips}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{p.chip}"
            row = [name, chips, f"{entry.batch}{largest}", "yes" if entry.fits else "no", *sizes]
            rows.append([*row, *(per_image if number == 0 else [""] * 3), f"{entry.compile_seconds:.0f} s"])
        answers += [report.whole, found] if found else [report.whole]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths[:4]] + [f"{'-' * (width - 1)}:" for width in widths[4:]])
    aligned = [[*map(str.ljust, row[:4], widths), *map(str.rjust, row[4:], widths[4:])] for row in rows]
    asked = {f"libtpu {answer.versions['libtpu']} with jax {answer.versions['jax']}" for answer in answers}
    first, last = min(answer.date for answer in answers), max(answer.date for answer in answers)
    when = f"on {first}" if first == last else f"from {first} to {last}"
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    lines += ["", "Memory is in MiB on each device; operations, the bound and the estimate are those of an image. "]
    lines[-1] += f"Answered by {', '.join(sorted(asked))}, {when}."
    return "\n".join(lines)


class Published(NamedTuple):
    """A time that others measured: SDXL in bfloat16, 1024 × 1024 pixels, 20 steps, one image on each chip at a time."""

    system: str
    chip: str
    seconds: float
    source: str


_BLOG, _MLPERF = "https://huggingface.co/blog/sdxl_jax", "https://mlcommons.org/benchmarks/inference-datacenter/"
# The v4-8 has four chips: its name counts cores. MLPerf gives images in a second on four chips, "offline": in a row.
PUBLISHED = (
    Published("TPU v5e-4, MLPerf Inference v4.1", "v5e", 4 / 1.753, _MLPERF),
    Published("TPU v6e-4, MLPerf Inference v4.1", "v6e", 4 / 5.439, _MLPERF),
    Published("TPU v5e-4, JAX 0.4.16", "v5e", 2.33, _BLOG),
    Published("TPU v4-8, JAX 0.4.16", "v4", 2.16, _BLOG),
)


def published_times(reports: Iterable[PipelineReport]) -> list[tuple[Published, Times]]:
    """The published times, each with the bound and the estimate of the same program, if that is among the reports."""
    wanted = {"pipeline": "sdxl", "dtype": "bfloat16", "steps": 20, "batch": 1, "split_head_dim": True}
    times = {r.program.chip: r.times for r in reports if wanted.items() <= dataclasses.asdict(r.program).items()}
    return [(published, times[published.chip]) for published in PUBLISHED if published.chip in times]
