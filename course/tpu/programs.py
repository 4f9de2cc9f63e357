"""Programs that draw: what is drawn and how, and what they are made of."""

from dataclasses import dataclass
from pathlib import Path

from course.families import find_code
from course.flux2.sampler import MOST_STEPS
from course.model.attention import ATTENTION
from course.model.files import read_json
from helpers.models import (
    MODELS,
    NO_WEIGHTS,
    bundled_names,
    find_local,
    find_model,
    which_model,
)

CONFIGURATIONS = Path(__file__).with_name("configurations")
LARGER = ("flux2-9b",)  # which no chapter draws with
CONFIGURED = (*MODELS, *LARGER)  # models whose shapes are known here, without any file

# The pieces that a program can be asked about. Its parts are those that it runs one after another.
WHOLE = "whole program"
ENCODERS = "text encoders"
STEP = "denoising step"
DECODER = "decoder"
PARTS = (ENCODERS, STEP, DECODER)


@dataclass(frozen=True)
class Program:
    """What is drawn, and how: everything that the shapes of a program depend on.

    It is a diffusers pipeline's ``_generate``, pmapped; or, with an ``attention``, ``generate`` of
    ``course.sd`` or ``course.flux2``. `make_program` makes one.
    """

    model: str  #: one of ``CONFIGURED``, a bundled checkpoint, a folder, or a Hub id
    chip: str  #: a key of ``CHIPS``
    chips: int  #: 1, 4 or 8, each with images of its own
    batch: int  #: images that each device draws at a time; guidance doubles it
    height: int  #: of an image, in pixels
    width: int  #: likewise
    steps: int  #: of denoising
    dtype: str  #: of the computation and of the parameters, but for the scheduler's
    split_head_dim: bool | None  #: how a pipeline's attention is laid out; None for ``course.sd``
    attention: str | None  #: a name from ``course.sd.ATTENTION``; None for a pipeline
    decode_batch: int | None  #: images that ``course.sd`` decodes at a time; None: all

    def runs(self, piece: str) -> int:
        """Return how often a call runs a piece."""
        return self.steps if piece == STEP else 1

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


def make_program(
    model: str,
    chip: str = "v5e",
    *,
    chips: int = 1,
    batch: int = 1,
    height: int | None = None,
    width: int | None = None,
    steps: int | None = None,
    dtype: str = "bfloat16",
    split_head_dim: bool | None = None,
    attention: str | None = None,
    decode_batch: int | None = None,
) -> Program:
    """Say what is drawn, and how; what is None is looked up in the model's configuration files.

    Parameters
    ----------
    model, chip, chips, batch, steps, attention, decode_batch
        As in `Program`.
    height, width, steps : int, optional
        By default what the model was trained for, and the steps that suit it: 4 for FLUX.2-klein
        where it is distilled, and else 50.
    dtype : str
        bfloat16 or float32.
    split_head_dim : bool, optional
        Of a pipeline; by default what the chapters take, which is True for XL.

    Raises
    ------
    ValueError
        If there is no such model, or it cannot be drawn like that.
    RuntimeError
        If the folder has no ``model_index.json``.
    """
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"The dtype is {dtype!r}: choose bfloat16 or float32.")
    for name, number, most in (("batch", batch, LARGEST_BATCH), ("steps", steps, MOST_STEPS)):
        if number is not None and number < 1:
            raise ValueError(f"{name} is {number}: give at least 1.")
        if number is not None and number > most:
            raise ValueError(f"{name} is {number}: give at most {most}.")
    if attention and (chips != 1 or split_head_dim is not None):
        raise ValueError("chips and split_head_dim are for pipelines: leave out the attention.")
    if decode_batch is not None and not attention:
        raise ValueError("decode_batch is for course.sd: give an attention, too.")
    folder = configured_folder(model)
    config = find_code(folder).read_config(folder)
    height = config.side if height is None else height
    width = config.side if width is None else width
    check_sides(model, height, width, config.side_multiple)
    if which_model(folder) == "flux2":
        if chips != 1 or split_head_dim is not None or decode_batch is not None:
            raise ValueError(
                "chips, split_head_dim and decode_batch are for Stable Diffusion: leave them out."
            )
        if attention not in (None, "automatic"):
            raise ValueError(f"FLUX.2 has no attention {attention!r}: leave it out.")
        if steps is None:
            steps = 4 if config.is_distilled else 50
        attention = "automatic"
    elif attention and attention not in ATTENTION:
        raise ValueError(
            f"There is no attention {attention!r}: choose one of {', '.join(ATTENTION)}."
        )
    elif split_head_dim is None and not attention:
        unet = read_json(folder / "unet" / "config.json")
        split_head_dim = config.is_xl or unet.get("split_head_dim", False)
    return Program(
        model=model,
        chip=chip,
        chips=chips,
        batch=batch,
        height=height,
        width=width,
        steps=50 if steps is None else steps,
        dtype=dtype,
        split_head_dim=split_head_dim,
        attention=attention,
        decode_batch=decode_batch,
    )


# Beyond these no chip's memory is enough, and to trace such a program takes minutes.
LARGEST_SIDE = 16_384  # pixels
LARGEST_BATCH = 65_536


def check_sides(model: str, height: int, width: int, multiple: int) -> None:
    """Raise ``ValueError`` unless a model can draw images of this size, in pixels."""
    for side in (height, width):
        if side < multiple or side % multiple:
            raise ValueError(
                f"{model} cannot draw {height} × {width} pixels: give multiples of {multiple}."
            )
        if side > LARGEST_SIDE:
            raise ValueError(
                f"{height} × {width} pixels are too many to ask about: give sides of at most "
                f"{LARGEST_SIDE}."
            )


def configured_folder(model: str) -> Path:
    """Return the folder with a model's configuration files, see ``Program.model``."""
    if model in CONFIGURED:
        return CONFIGURATIONS / model
    folder = find_local(model)
    if folder is None and "/" not in model:
        raise ValueError(
            f"There is no model {model!r}: give {', '.join((*MODELS, *bundled_names(), *LARGER))}, "
            "a folder with a model_index.json, or a Hub id."
        )
    folder = folder or find_model(model, only=NO_WEIGHTS)
    which_model(folder)  # which refuses others
    return folder
