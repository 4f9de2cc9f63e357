"""Compile what `course.tpu.compiler` has written, which starts this: a folder, and its own number.

It writes what the compiler says into the same folder. If the compiler crashes, this process ends,
and the one that asked goes on. If the one that asked is killed, this one ends as well.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jaxlib import xla_client

from course.tpu.chips import compile_only_devices


def compile_question(folder: Path) -> dict:
    """Compile the program in a folder, and return what the compiler says about it.

    Sizes are bytes on each device; ``donated`` is what of the output takes the place of an
    argument. If the compiler refuses the program, there is only its message, ``refused``, and the
    ``seconds``.
    """
    places = json.loads((folder / "devices.json").read_text(encoding="utf-8"))
    devices = tuple(compile_only_devices(chip, chips)[index] for chip, chips, index in places)
    options = xla_client.CompileOptions.ParseFromString((folder / "options.pb").read_bytes())
    with mlir.make_ir_context():
        module = ir.Module.parse((folder / "program.mlirbc").read_bytes())
        start = time.monotonic()
        try:
            # Devices that are not there have a client of their own kind, which compiles only.
            executable = devices[0].client.compile(module, xla_client.DeviceList(devices), options)
        except jax.errors.JaxRuntimeError as error:
            return {"refused": str(error), "seconds": time.monotonic() - start}
    seconds = time.monotonic() - start
    memory = executable.get_compiled_memory_stats()
    cost = executable.cost_analysis()
    (module,) = executable.hlo_modules()
    return {
        "arguments": memory.argument_size_in_bytes,
        "output": memory.output_size_in_bytes,
        "donated": memory.alias_size_in_bytes,
        "program": memory.generated_code_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "flops": cost.get("flops", 0.0),  # absent if there are none
        "bytes_accessed": cost.get("bytes accessed", 0.0),
        "text": module.to_string(),
        "seconds": seconds,
    }


def end_with(parent: int) -> None:
    """End this process when the one that asked is gone, and nobody waits for an answer.

    On Windows it is never known to be gone.
    """
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    folder, parent = Path(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=end_with, args=(parent,), daemon=True).start()
    said = compile_question(folder)
    (folder / "answer.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
