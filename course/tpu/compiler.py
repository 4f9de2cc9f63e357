"""Ask the TPU compiler about a function: `ask_compiler` here, `course.tpu.worker` beside it.

libtpu can crash, or wait for another process that holds it, and Python can neither catch the one
nor interrupt the other. So this process traces and lowers a function, which may be any that lives
in it, and another compiles. What goes there is what JAX hands to the compiler: the program in
StableHLO, the compiler's options, and the devices. What comes back is figures, and the text of the
compiled program.

For which devices a program was lowered, which arguments it reads, and which shardings it leaves to
the compiler, JAX says nowhere in public: `read_lowering` reads it from ``_lowering``, which has the
same names from JAX 0.9.2 to 0.12.
"""

import datetime
import importlib.metadata
import io
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.extend.backend import get_compile_options
from jax.sharding import PartitionSpec, Sharding

from course.tpu.answers import Memory, Report, Work
from course.tpu.chips import LOCKED, PLACES, find_chip, is_lock, tpu_devices
from course.tpu.hlo import read_collectives, read_copies, read_overlap

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "course.tpu.worker")


def versions(*names: str) -> dict[str, str]:
    """Return the versions of packages that are there, by default of those that make a program."""
    if not names:
        names = ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers")
    installed = {}
    for name in names:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def ask_compiler(
    function: Callable,
    *arguments,
    chip: str = "v5e",
    timeout: float | None = None,
    keep_text: bool = False,
) -> Report:
    """Compile a function for a TPU that is not there, and say what the compiler finds.

    Builds on ``jax.jit(…).lower(…)`` for compile-only devices. The compiler runs in a process of
    its own: if it crashes, this one goes on.

    Parameters
    ----------
    function : callable
        A function of arrays. One that is jitted or pmapped already is taken as it is.
    *arguments
        Trees of ``jax.ShapeDtypeStruct``, or of arrays, of which only shapes and dtypes count; for
        static arguments their values. What has no sharding lies where JAX puts arrays that nobody
        has placed: on the first device, or with the others. For several devices, give shardings
        over ``tpu_devices(chip, chips)``, or a function that is pmapped over these.
    chip : str
        A key of ``CHIPS``.
    timeout : float, optional
        Seconds after which the compiler is stopped. By default it takes as long as it takes.
    keep_text : bool
        Whether the report has the text of the compiled program. That of a real model is long.

    Raises
    ------
    ValueError
        If the chip is unknown, the function was lowered for other devices, or a Python number is
        among the arguments.
    RuntimeError
        If the compiler cannot be asked here, crashes or takes too long; and a
        ``jax.errors.JaxRuntimeError`` if it refuses the program for anything but its size.

    Examples
    --------
    >>> x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    >>> report = ask_compiler(lambda x: x @ x, x)
    >>> report.fits, report.memory.arguments, report.work.flops
    (True, 33554432, 137438953472.0)
    """
    first = tpu_devices(chip)[0]
    if not hasattr(function, "lower"):
        function = jax.jit(function)
    arguments = jax.tree.map(_shape_of, arguments)
    with jax.default_device(first):
        lowered = function.lower(*arguments)
    shapes = [leaf for leaf in jax.tree.leaves(arguments) if hasattr(leaf, "dtype")]
    if len(shapes) != len(jax.tree.leaves(lowered.args_info)):
        raise ValueError(
            "A Python number is among the arguments: "
            "give jax.ShapeDtypeStruct((), dtype) in its place."
        )
    log.info("compiling %s …", getattr(function, "__name__", "a program"))
    said = compile_apart(lowered, chip, timeout)
    asked = {
        "chip": find_chip(chip),
        "compile_seconds": round(said["seconds"], 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
    }
    if "refused" in said:
        refusal = said["refused"]
        if "RESOURCE_EXHAUSTED" not in refusal or "hbm" not in refusal.lower():
            raise jax.errors.JaxRuntimeError(refusal)
        return Report(memory=None, work=None, message=refusal[:2000], **asked)

    text = said["text"]
    # `pmap` splits the first axis of every argument; its functions have no `trace`.
    read = read_lowering(lowered).arguments
    unread = _unread_bytes(shapes, read, pmapped=not hasattr(function, "trace"))
    moved = said["arguments"] + said["output"]
    if " while(" not in text:
        # Of a table that is looked up, only some rows are accessed. With a loop, whose body counts
        # once, the count of accessed bytes says nothing about that.
        moved = min(moved, int(said["bytes_accessed"]))
    memory = Memory(
        arguments=said["arguments"] + unread,
        temporaries=said["temporaries"],
        program=said["program"],
        output=said["output"] - said["donated"],
    )
    return Report(
        memory=memory,
        work=Work(said["flops"], said["bytes_accessed"], least_bytes=moved),
        message="",
        collectives=tuple(read_collectives(text)),
        note=said["note"],
        copies=tuple(read_copies(text)),
        schedule=read_overlap(text),
        text=without_notes(text) if keep_text else "",
        **asked,
    )


def _shape_of(leaf):
    """Return the shape of an array: where it lies does not matter here."""
    if isinstance(leaf, jax.Array):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def _unread_bytes(shapes: list, read: set[int], pmapped: bool) -> int:
    """Return the bytes on each device of arguments that are not read: they lie there all the same.

    ``read`` has the numbers of those that are.
    """
    unread = 0
    for number, shape in enumerate(shapes):
        if number in read:
            continue
        on_device = shape.shape
        if getattr(shape, "sharding", None):
            on_device = shape.sharding.shard_shape(shape.shape)
        elif pmapped:
            on_device = shape.shape[1:]
        unread += math.prod(on_device) * shape.dtype.itemsize
    return unread


# The other process


def compile_apart(lowered: jax.stages.Lowered, chip: str, timeout: float | None = None) -> dict:
    """Compile a lowered program in another process, and return what the compiler says.

    That is what `course.tpu.worker.compile_question` returns, with the temporaries as
    `read_temporaries` finds them, and in ``note`` what should be known about the figures.

    Raises
    ------
    ValueError
        If the program is for other devices than `tpu_devices` has for the chip.
    RuntimeError
        If the compiler gave no answer, also because it took more than ``timeout`` seconds; a
        sentence says how it ended.
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
                [*WORKER, name, str(os.getpid())],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"The TPU compiler was stopped, because it took more than {timeout:g} s: give it "
                "more time, or a smaller program."
            ) from None
        answer = folder / "answer.json"
        if ended.returncode != 0 or not answer.exists():
            raise RuntimeError(explain_end(ended.returncode, ended.stderr))
        said = json.loads(answer.read_text(encoding="utf-8"))
        temporaries = read_temporaries(folder / "dump")
    if temporaries is None:
        note = (
            "The compiler did not write its buffer assignment in a form that is known here, so "
            "the temporaries are by memory_analysis, which may count gaps twice or say 0."
        )
        return said | {"note": note}
    return said | {"note": "", "temporaries": temporaries}


def write_question(lowered: jax.stages.Lowered, chip: str, folder: Path) -> None:
    """Write what JAX would hand to the compiler into a folder, see `compile_apart`."""
    lowering = read_lowering(lowered)
    devices = lowering.devices
    places = [PLACES.get(device) for device in devices]
    if any(place is None or place.chip != chip for place in places):
        kinds = sorted({device.device_kind for device in devices})
        raise ValueError(
            f"The function was lowered for devices of the kind {', '.join(kinds)}, and not for "
            f"those of tpu_devices({chip!r}, chips): give these to its `pmap`, mesh or "
            "shardings."
        )
    (folder / "dump").mkdir()
    options = get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([devices]),
        env_options_overrides=lowering.options | {"xla_dump_to": str(folder / "dump")},
        backend=devices[0].client,
    )
    build = options.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = lowering.open_inputs
    build.allow_spmd_sharding_propagation_to_output = lowering.open_outputs
    program = io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(program)
    (folder / "program.mlirbc").write_bytes(program.getvalue())
    (folder / "options.pb").write_bytes(options.SerializeAsString())
    (folder / "devices.json").write_text(json.dumps(places), encoding="utf-8")


class Lowering(NamedTuple):
    """What JAX knows of a lowered program beside its text."""

    devices: list[jax.Device]  # in the program's order
    arguments: set[int]  # the numbers of those that it reads: JAX leaves out the others
    open_inputs: list[bool]  # for each that is read, whether the compiler may choose its sharding
    open_outputs: list[bool]
    options: dict  # for the compiler, from ``jax.jit``


def read_lowering(lowered: jax.stages.Lowered) -> Lowering:
    """Read what JAX says nowhere in public, and change nothing."""
    lowering = lowered._lowering
    arguments = lowering.compile_args
    # A program that prints in order takes and returns a token for that, whose sharding is no one's.
    tokens = [False] * len(arguments["ordered_effects"])
    return Lowering(
        devices=list(lowering._device_list),
        arguments=set(arguments["kept_var_idx"]),
        open_inputs=tokens + [_is_open(each) for each in arguments["in_shardings"]],
        open_outputs=tokens + [_is_open(each) for each in arguments["out_shardings"]],
        options=dict(lowering._compiler_options_kvs),
    )


def _is_open(sharding) -> bool:
    """Return whether the compiler may choose a sharding, or a part of it, as nobody has."""
    if not isinstance(sharding, Sharding):
        return True
    return PartitionSpec.UNCONSTRAINED in tuple(getattr(sharding, "spec", ()))


def explain_end(status: int, stderr: str) -> str:
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


# What it wrote


def read_temporaries(dump: Path) -> int | None:
    """Return the bytes of HBM for what comes and goes while a program runs, with the gaps between.

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


def without_notes(text: str) -> str:
    """Return a compiled program's text without what the compiler notes for itself, most of it.

    That is the ``backend_config`` of instructions, and the tables of the files, functions and lines
    that they come from, which have paths of the machine that asked.
    """
    text = re.sub(r", backend_config=.*", "", text)
    tables = "FileNames|FunctionNames|FileLocations|StackFrames"
    return re.sub(rf"^(?:{tables})\n(?:.+\n)*\n*", "", text, flags=re.M)
