"""What a program needs on a TPU, asked of the TPU's own compiler, without a TPU.

The compiler, libtpu, runs on any Linux machine with an x86-64 processor. Programs are lowered from
shapes alone. From a question to its record:

- `programs`: what Stable Diffusion is to draw, and how, a `Program`
- `pieces`: the functions, with their shapes, that a program is made of; `ask_about` asks about each
- `compiler`, with `worker`: `ask_compiler` takes any function, for one of the `chips`
- `answers`: a `Report` on a function, an `Answer` on a program
- `records`: what was asked before
- `splits`: a step of denoising, split over several chips; `exchange` says how long these exchange
- `plan`: which split should be first, and, in `plan_file`, a file that draws so

`hlo` reads the text of a compiled program, and `products` what JAX traces of a function without a
compiler. From a shell: ``python -m course.tpu --help``.
"""

from course.tpu.answers import Answer, Memory, Report, Times, Work, find_times
from course.tpu.chips import CHIPS, Chip, find_chip, tpu_devices
from course.tpu.compiler import ask_compiler, versions
from course.tpu.programs import Program, make_program
from course.tpu.records import ask_or_recall, compiler_report

__all__ = [
    "CHIPS",
    "Answer",
    "Chip",
    "Memory",
    "Program",
    "Report",
    "Times",
    "Work",
    "ask_compiler",
    "ask_or_recall",
    "compiler_report",
    "find_chip",
    "find_times",
    "make_program",
    "tpu_devices",
    "versions",
]
