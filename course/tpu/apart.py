"""Compile in a process of its own: `compile_apart` here, `course.tpu.worker` there.

libtpu can crash, or wait for another process that holds it, and Python can neither catch the one
nor interrupt the other. So this process traces and lowers a function, which may be any that lives
in it, and another compiles. What goes there is what JAX hands to the compiler: the program in
StableHLO, the compiler's options, and the devices. What comes back is figures, in JSON.

JAX has no public way to hand this over, so a few names here are its own (`jax._src`, `_lowering`).
They are the same from JAX 0.9.2 to 0.12, as are those of the worker.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
from jax._src import compiler as jax_compiler

from course.tpu.chips import LOCKED, PLACES, is_lock

WORKER = (sys.executable, "-m", "course.tpu.worker")


class NotCompiledHereError(Exception):
    """Raised in the place of compiling, when the program has been written down."""


def compile_apart(lowered: jax.stages.Lowered, chip: str, timeout: float | None = None) -> dict:
    """Compile a lowered program, and return the figures of `course.tpu.worker.compile_question`.

    The program must be for devices of `tpu_devices`, of the given chip. A ValueError says that it
    is for others. A RuntimeError says in a sentence how the compiler ended, if it gave no answer,
    also because it took more than ``timeout`` seconds.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_question(lowered, chip, folder)
        environment = os.environ | {
            # What this process can import, the other can, too.
            "PYTHONPATH": os.pathsep.join(sys.path),
            # It leaves chips alone, and so it may load libtpu beside a process that uses them.
            "JAX_PLATFORMS": "cpu",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        try:
            ended = subprocess.run(
                [*WORKER, name], env=environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"The TPU compiler was stopped, because it took more than {timeout:g} s: give it "
                "more time, or a smaller program."
            ) from None
        answer = folder / "answer.json"
        if ended.returncode != 0 or not answer.exists():
            raise RuntimeError(explain(ended.returncode, ended.stderr))
        return json.loads(answer.read_text(encoding="utf-8"))


def explain(status: int, stderr: str) -> str:
    """Say in a sentence how a process that gave no answer has ended."""
    if is_lock(stderr):
        return LOCKED
    if status == -signal.SIGKILL:
        return (
            "The system ended the TPU compiler (SIGKILL), most likely because memory ran out: give "
            "it a smaller program, or a machine with more memory."
        )
    if status < 0:
        how = f"crashed ({signal.Signals(-status).name})"
    else:
        how = f"ended with status {status}"
    lines = stderr.strip().splitlines()
    last = f" Its last words: {lines[-1]}" if lines else ""
    return (
        f"The TPU compiler {how}, and this process goes on: give it a smaller program, or install "
        f"another version of libtpu.{last}"
    )


def write_question(lowered: jax.stages.Lowered, chip: str, folder: Path) -> None:
    """Write what JAX hands to the compiler into a folder."""

    def take(backend, module, executable_devices, options, host_callbacks):
        # Callbacks matter when a program runs, and not when it is compiled.
        places = [PLACES.get(device) for device in executable_devices]
        if any(place is None or place.chip != chip for place in places):
            kinds = sorted({device.device_kind for device in executable_devices})
            raise ValueError(
                f"The function was lowered for devices of the kind {', '.join(kinds)}, and not for "
                f"those of tpu_devices({chip!r}, chips): give these to its `pmap`, mesh or "
                "shardings."
            )
        program = io.BytesIO()
        module.operation.write_bytecode(program)
        (folder / "program.mlirbc").write_bytes(program.getvalue())
        (folder / "options.pb").write_bytes(options.SerializeAsString())
        (folder / "devices.json").write_text(json.dumps(places), encoding="utf-8")
        raise NotCompiledHereError

    (folder / "dump").mkdir()
    with (
        mock.patch.object(jax_compiler, "backend_compile_and_load", take),
        contextlib.suppress(NotCompiledHereError),
    ):
        lowered.compile(compiler_options={"xla_dump_to": str(folder / "dump")})


def read_arguments(lowered: jax.stages.Lowered) -> set[int]:
    """Which of a program's arguments it reads, by their numbers: JAX leaves out the others."""
    return set(lowered._lowering.compile_args["kept_var_idx"])
