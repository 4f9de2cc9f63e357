"""What a pipeline needs on a TPU, asked of the TPU's own compiler, without a TPU: ``python -m helpers.tpu sd``.

The compiler, libtpu, runs on any Linux machine with an x86-64 processor. Programs are lowered from shapes alone, which
follow from a pipeline's configuration files, so no weights are needed either.
"""

from helpers.tpu.compiler import (
    CHIPS,
    Chip,
    ask_compiler,
    default_cache,
    require_compiler,
    temporary_bytes,
    tpu_devices,
    usable_hbm,
)
from helpers.tpu.programs import Program, load_shapes, lower_parts, lower_program, tree_bytes
from helpers.tpu.reports import (
    KINDS,
    compile_report,
    largest_batch,
    least_seconds,
    memory_report,
    published_times,
    recorded_reports,
    table_of,
    text_of,
)

__all__ = [
    "CHIPS",
    "KINDS",
    "Chip",
    "Program",
    "ask_compiler",
    "compile_report",
    "default_cache",
    "largest_batch",
    "least_seconds",
    "load_shapes",
    "lower_parts",
    "lower_program",
    "memory_report",
    "published_times",
    "recorded_reports",
    "require_compiler",
    "table_of",
    "temporary_bytes",
    "text_of",
    "tpu_devices",
    "tree_bytes",
    "usable_hbm",
]
