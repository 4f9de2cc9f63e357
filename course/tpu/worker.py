"""Compile what `course.tpu.apart` has written: ``python -m course.tpu.worker FOLDER`` starts it.

It writes its answer into the same folder. If the compiler crashes, this process is what ends.
"""

import dataclasses
import json
import re
import sys
import time
from pathlib import Path

import jax
from jax._src import compiler as jax_compiler
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import xla_client

from course.tpu.chips import describe
from course.tpu.collectives import read_collectives
from course.tpu.copies import read_copies
from course.tpu.schedule import read_schedule


def compile_question(folder: Path) -> dict:
    """Compile the program in a folder, and return the figures.

    Sizes are bytes on each device; ``donated`` is what of the output takes the place of an
    argument, and ``note`` what should be known about the figures. If the compiler refuses the
    program, there is only its message, ``refused``, and the ``seconds``.
    """
    places = json.loads((folder / "devices.json").read_text(encoding="utf-8"))
    devices = xla_client.DeviceList(
        tuple(describe(chip, chips)[index] for chip, chips, index in places)
    )
    options = xla_client.CompileOptions.ParseFromString((folder / "options.pb").read_bytes())
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "program.mlirbc").read_bytes())
        start = time.monotonic()
        try:
            executable = jax_compiler.backend_compile_and_load(
                devices[0].client, module, devices, options, []
            )
        except jax.errors.JaxRuntimeError as error:
            return {"refused": str(error), "seconds": time.monotonic() - start}
    seconds = time.monotonic() - start
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    temporaries = read_temporaries(folder / "dump")
    note = ""
    if temporaries is None:
        temporaries = memory.temp_size_in_bytes
        note = (
            "The compiler did not write its buffer assignment in a form that is known here, so "
            "the temporaries are by memory_analysis, which may count gaps twice or say 0."
        )
    (module,) = executable.hlo_modules()
    text = module.to_string()
    return {
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "donated": memory.alias_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "temporaries": temporaries,
        "flops": cost.get("flops", 0.0),  # absent if there are none
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "collectives": [dataclasses.asdict(collective) for collective in read_collectives(text)],
        "schedule": dataclasses.asdict(read_schedule(text)),
        "copies": [dataclasses.asdict(copy) for copy in read_copies(text)],
        "text": without_notes(text),
        "note": note,
        "seconds": seconds,
    }


def without_notes(text: str) -> str:
    """A compiled program's text without what the compiler notes for itself, the larger part of it.

    That is the ``backend_config`` of instructions, and the tables of the files, functions and lines
    that they come from, which have paths of the machine that asked.
    """
    text = re.sub(r", backend_config=.*", "", text)
    tables = "FileNames|FunctionNames|FileLocations|StackFrames"
    return re.sub(rf"^(?:{tables})\n(?:.+\n)*\n*", "", text, flags=re.M)


def read_temporaries(dump: Path) -> int | None:
    """Bytes of HBM for what comes and goes while a program runs, with the gaps between.

    By these the compiler decides whether a program fits. They are read from its buffer assignment,
    which it writes into the folder that was given as ``xla_dump_to``, and which nobody documents:
    None if it is not there as expected. No figure of ``memory_analysis`` says it: of libtpu 0.0.42,
    ``temp_size_in_bytes`` counts gaps twice, or is 0, and ``peak_memory_in_bytes`` leaves gaps out,
    and counts memory on the chip. For Stable Diffusion XL in bfloat16 on v4 with a batch of 16, the
    first says 28.17 GB, where the buffer assignment has 22.68.
    """
    files = list(dump.glob("*after_optimizations-buffer-assignment.txt"))
    if len(files) != 1:
        return None
    # Such as "allocation 8: size 2560, color 6, preallocated-temp:". HBM has no color.
    allocations = re.findall(
        r"^allocation \d+: size (\d+), (.+)", files[0].read_text(encoding="utf-8"), re.M
    )
    if not allocations:
        return None
    total = 0
    for size, properties in allocations:
        if "preallocated-temp" in properties and "color" not in properties:
            total += int(size)
    return total


def main() -> None:
    folder = Path(sys.argv[1])
    answer = compile_question(folder)
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main()
