"""Options for the compiler that others set, and what they change in a program's schedule.

Google's recipes for Stable Diffusion XL set ``recipe`` (github.com/AI-Hypercomputer/tpu-recipes,
``inference/v5e/MaxDiffusion/SDXL``, ``inference/trillium/MaxDiffusion``); here it is asked for two
pieces of its UNet. MaxDiffusion's README sets ``overlap`` for Wan, so that Ulysses exchanges some
heads while others are computed, and nothing for FLUX.2-klein; here it is asked for a step of
FLUX.2-klein-4B over eight chips. All of it takes half an hour.
"""

from course.tpu.programs import STEP
from lab.ask.int8 import take_pieces
from lab.ask.rooflines import lower_run, schedule_of
from lab.ask.schedules import compile_with_bundles, lower_on_one

FUSION = {"xla_tpu_rwb_fusion": False, "xla_tpu_dot_dot_fusion_duplicated": True}
OVERLAP = {
    "xla_tpu_enable_async_all_to_all": True,
    "xla_tpu_overlap_compute_collective_tc": True,
}
OPTIONS = {
    ("recipe", "v5e"): FUSION | {"xla_tpu_scoped_vmem_limit_kib": 65536},
    ("recipe", "v6e"): FUSION | {"xla_tpu_scoped_vmem_limit_kib": 131072},
    ("overlap", "v6e"): OVERLAP,
}
KLEIN = "step of klein over 8 chips"
PIECES = ("transformer of 1280 channels", "residual block of 320 channels")


def questions(rows: list[dict]) -> list[dict]:
    asked = [(piece, chip, "recipe") for piece in PIECES for chip in ("v5e", "v6e")]
    asked.append((KLEIN, "v6e", "overlap"))
    return [
        {"piece": piece, "chip": chip, "options": options}
        for piece, chip, name in asked
        for options in (None, name)
    ]


def answer(piece: str, chip: str, options: str | None) -> dict:
    settings = OPTIONS[options, chip] if options else None
    chips = 1
    if piece == KLEIN:
        chips = 8
        lowered = lower_run("flux2", chip, chips, 1, STEP, settings)
    else:
        lowered = lower_on_one(take_pieces()[piece](), chip, settings)
    said, bundles = compile_with_bundles(lowered, chip)
    return schedule_of(said, bundles, chip, chips) | {"temporaries": said["temporaries"]}
