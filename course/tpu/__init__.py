"""What a program needs on a TPU, asked of the TPU's own compiler, without a TPU: ``python -m course.tpu --help``.

The compiler, libtpu, runs on any Linux machine with an x86-64 processor. Programs are lowered from shapes alone.
`ask_compiler` takes any function. Stable Diffusion's programs, whose shapes follow from a pipeline's configuration
files, are in `course.tpu.pipelines`, and reports on them in `course.tpu.reports`.
"""

from course.tpu.chips import CHIPS, Chip, find_chip, tpu_devices
from course.tpu.compiler import Memory, Part, Report, Times, Work, ask_compiler, find_times

__all__ = [
    "CHIPS",
    "Chip",
    "Memory",
    "Part",
    "Report",
    "Times",
    "Work",
    "ask_compiler",
    "find_chip",
    "find_times",
    "tpu_devices",
]
