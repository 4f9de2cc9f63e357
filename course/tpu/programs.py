"""Stable Diffusion's programs: what is drawn and how, the pieces of it, and what was answered."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
from tabulate import tabulate

from course.tpu.chips import Chip
from course.tpu.compiler import Report, Times, ask_compiler, find_times
from course.tpu.products import repeated_flops
from helpers.places import find_data

CONFIGURATIONS = Path(__file__).with_name("configurations")

# The pieces that a program can be asked about. Its parts are those that it runs one after another.
WHOLE = "whole program"
ENCODERS = "text encoders"
STEP = "denoising step"
DECODER = "decoder"
SHARED_STEP = "denoising step shared by two chips"
PARTS = (ENCODERS, STEP, DECODER)


def find_folder(model: str) -> Path:
    """The folder with a model's configuration files, see ``Program.model``."""
    folders = {"sd": CONFIGURATIONS / "sd", "sdxl": CONFIGURATIONS / "sdxl"}
    for unet in sorted(find_data("checkpoints").glob("*/unet")):
        folders[unet.parent.name] = unet.parent
    folder = folders.get(model, Path(model))
    if not (folder / "model_index.json").exists():
        raise ValueError(
            f"There is no model {model!r}: give {', '.join(folders)}, "
            "or a folder with a model_index.json."
        )
    kind = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))["_class_name"]
    if kind.removeprefix("Flax") not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise ValueError(f"{model!r} is a {kind}: only Stable Diffusion 1.x, 2.x and XL are known.")
    return folder


@dataclass(frozen=True)
class Program:
    """What is drawn, and how: everything that the shapes of a program depend on.

    It is a diffusers pipeline's ``_generate``, pmapped; or, with an ``attention``, ``generate`` of
    ``course.sd``. A program has nothing left to a default: what is None is looked up in the
    model's configuration files.

    Raises
    ------
    ValueError
        If there is no such model, or it cannot be drawn like that.
    """

    model: str  #: ``sd``, ``sdxl``, a bundled checkpoint, or a folder in diffusers' format
    chip: str = "v5e"  #: a key of ``CHIPS``
    chips: int = 1  #: 1, 4 or 8, each with images of its own
    batch: int = 1  #: images that each device draws at a time; guidance doubles it
    height: int | None = None  #: of an image, in pixels; None for what the UNet was trained for
    width: int | None = None  #: likewise
    steps: int = 50  #: of denoising
    #: or float32, of the computation and of the parameters, but for the scheduler's
    dtype: str = "bfloat16"
    #: of a pipeline's attention; None for what the chapters take, which is True for XL
    split_head_dim: bool | None = None
    attention: str | None = None  #: a name from ``course.sd.ATTENTION``; None for a pipeline
    decode_batch: int | None = None  #: images that ``course.sd`` decodes at a time; None: all

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"The dtype is {self.dtype!r}: choose bfloat16 or float32.")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")
        if self.attention and (self.chips != 1 or self.split_head_dim is not None):
            raise ValueError("chips and split_head_dim are for pipelines: leave out the attention.")
        if self.decode_batch is not None and not self.attention:
            raise ValueError("decode_batch is for course.sd: give an attention, too.")
        folder = find_folder(self.model)
        unet = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
        vae = json.loads((folder / "vae" / "config.json").read_text(encoding="utf-8"))
        scale = 2 ** (len(vae["block_out_channels"]) - 1)  # pixels for each latent
        side = scale * unet["sample_size"]
        defaults = {"height": side, "width": side}
        if not self.attention:
            is_xl = (folder / "text_encoder_2").exists()
            defaults["split_head_dim"] = is_xl or unet.get("split_head_dim", False)
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)  # the way to complete a frozen object
        multiple = scale * 2 ** (len(unet["block_out_channels"]) - 1)
        for side in (self.height, self.width):
            if side < multiple or side % multiple:
                raise ValueError(
                    f"{self.model} cannot draw {self.height} × {self.width} pixels: "
                    f"give multiples of {multiple}."
                )

    def runs(self, piece: str) -> int:
        """How often a call runs a piece."""
        if piece in (STEP, SHARED_STEP):
            return self.steps
        return 1

    def __str__(self) -> str:
        text = (
            f"{Path(self.model).name}, {self.height} × {self.width} pixels, {self.steps} steps, "
            f"{self.dtype}"
        )
        if self.attention:
            text += f", attention {self.attention}"
        if self.decode_batch:
            text += f", {self.decode_batch} decoded at a time"
        return f"{text}, batch {self.batch} on each device of {self.chips} {self.chip} chip(s)"


class Piece(NamedTuple):
    """What the compiler is asked about: a function, and shapes of its arguments."""

    function: Callable
    arguments: tuple
    #: what a run has to move; None for all arguments that are read, and the result
    least_bytes: int | None = None
    #: whether layers are run by ``jax.lax.scan``, whose body the compiler counts once
    is_scanned: bool = False

    def ask(self, chip: str, timeout: float | None = None) -> Report:
        """Ask the compiler, see `course.tpu.ask_compiler`.

        The operations are then those of a run, but for loops other than scans.
        """
        report = ask_compiler(self.function, *self.arguments, chip=chip, timeout=timeout)
        if report.work is None:
            return report
        work = report.work
        if self.least_bytes is not None:
            work = dataclasses.replace(work, least_bytes=self.least_bytes)
        if self.is_scanned:
            more = repeated_flops(self.function, *self.arguments)
            work = dataclasses.replace(work, flops=work.flops + more)
        return dataclasses.replace(report, work=work)


@dataclass(frozen=True)
class Answer:
    """What the compiler says about a program's pieces. ``print`` makes a page of it."""

    program: Program
    pieces: dict[str, Report]  #: by their names
    #: of each model, with those that the program does not read; empty if nobody counted
    parameter_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def whole(self) -> Report:
        """On the whole program, where the body of the loop over the steps counts once."""
        return self.pieces[WHOLE]

    @property
    def parts(self) -> dict[str, Report]:
        """On what one device does in a call, see `PARTS`; empty if the program does not fit."""
        return {name: self.pieces[name] for name in PARTS if name in self.pieces}

    @property
    def flops(self) -> float:
        """Floating-point operations of a call, on each device."""
        return sum(self.program.runs(name) * part.work.flops for name, part in self.parts.items())

    @property
    def times(self) -> Times | None:
        """The least time for a call; None unless every part was asked about."""
        if len(self.parts) < len(PARTS):
            return None
        return self.times_on(self.parts[STEP].chip)

    def times_on(self, chip: Chip) -> Times:
        """Those times for a chip with other figures, which does the same."""
        runs = [(self.program.runs(name), part.work) for name, part in self.parts.items()]
        return find_times(runs, chip)

    def __str__(self) -> str:
        blocks = [f"{self.program}\n{self.whole.verdict}"]
        if self.whole.memory:
            blocks.append(str(self.whole.memory))
        if self.times:
            rows = []
            for name, part in self.parts.items():
                work = part.work
                figures = [work.flops / 1e9, work.least_bytes / 1e6, work.bytes_accessed / 1e6]
                rows.append([name, self.program.runs(name), *figures])
            header = ["part", "runs", "GFLOP of a run", "MB to move", "MB, as the compiler counts"]
            table = tabulate(rows, header, tablefmt="plain", floatfmt=",.4g")
            blocks.append(f"{table}\nA call: {self.times}")
        return "\n\n".join([*blocks, self.whole.origin])


def ask_pieces(
    program: Program, pieces: dict[str, Piece], params: dict, timeout: float | None = None
) -> Answer:
    """Ask the compiler about a whole program and, if it fits, about its parts.

    ``params`` are the shapes of the models' parameters, of which it notes the bytes.
    """
    reports = {WHOLE: pieces[WHOLE].ask(program.chip, timeout)}
    if reports[WHOLE].fits:
        for name in PARTS:
            reports[name] = pieces[name].ask(program.chip, timeout)
    return Answer(program, reports, parameter_bytes(params))


def parameter_bytes(params: dict) -> dict[str, int]:
    """Bytes of each model's parameters; a scheduler's state is none."""
    return {name: tree_bytes(tree) for name, tree in params.items() if name != "scheduler"}


def tree_bytes(tree) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
