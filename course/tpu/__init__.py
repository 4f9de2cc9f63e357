"""What a program needs on a TPU, asked of the TPU's own compiler, without a TPU.

The compiler, libtpu, runs on any Linux machine with an x86-64 processor. Programs are lowered from
shapes alone. `ask_compiler` takes any function and gives a `Report`. For Stable Diffusion there is
one more step: a `Program` says what is drawn and how; `course.tpu.pipelines` and `course.tpu.model`
take it apart into pieces, each a function and its shapes; the `Answer` has a report on each. What
was asked before is in `course.tpu.records`. What JAX's trace of a function says without a compiler
is in `course.tpu.products` and `course.tpu.pallas`. From a shell: ``python -m course.tpu --help``.
"""

from course.tpu.chips import CHIPS, Chip, find_chip, tpu_devices
from course.tpu.compiler import Memory, Report, Times, Work, ask_compiler, find_times, versions
from course.tpu.programs import Answer, Piece, Program
from course.tpu.records import ask_or_recall, compiler_report

__all__ = [
    "CHIPS",
    "Answer",
    "Chip",
    "Memory",
    "Piece",
    "Program",
    "Report",
    "Times",
    "Work",
    "ask_compiler",
    "ask_or_recall",
    "compiler_report",
    "find_chip",
    "find_times",
    "tpu_devices",
    "versions",
]
