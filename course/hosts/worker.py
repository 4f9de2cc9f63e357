"""One of several processes that draw prompts together.

For example: ``python -m course.hosts.worker --prompts FILE --out DIR``.

Every process runs this same program, one on each host. Together they see all devices as one mesh,
and in each round every device draws one image. The images of a round are gathered across the
processes, and process 0 writes them, so only process 0 needs FILE and DIR. Image ``i`` belongs to
line ``i`` of FILE, and its key follows from the seed and ``i`` alone, so it is the same on any
number of processes and devices. When the program is started again, it draws what is missing.

Without ``--coordinator``, ``--processes`` and ``--process-id``, JAX finds the other processes
itself: on TPU slices, under Slurm, Open MPI and Kubernetes. On one machine, ``python -m
course.hosts.launch`` starts several.
"""

import argparse
import io
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What waits for all processes below has no public name; Orbax takes it from here, too.
from jax._src import distributed
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from helpers.checkpoints import Checkpoint, pick_checkpoint
from helpers.devices import simulate_devices
from helpers.inputs import create_key, warn_about_prompt
from helpers.packages import quiet_warnings, require_flax

PATIENCE = 3600  # seconds that a process waits for the others to load and compile
# From token ids, parameters and key numbers to images, and whether their numbers were finite.
Draw = Callable[[jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]


def join(
    coordinator: str | None, processes: int | None, process_id: int | None, timeout: int
) -> None:
    """Meet the other processes: builds on ``jax.distributed.initialize``.

    Ends this process with a message if they do not all come in time. JAX would end it, too, but
    from C++, where nothing in Python can catch it, and with a stack trace in place of a sentence.
    """
    # Without an accelerator, the CPU of each process acts as several devices.
    simulate_devices()

    def give_up() -> None:
        me = "This process" if process_id is None else f"Process {process_id} of {processes}"
        where = f" at {coordinator}" if coordinator else ""
        print(
            f"Error: {me} waited {timeout} s for the others{where}, and they did not all come: "
            "see what each of them printed last, check that each reaches that address, "
            "and start all of them again.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    watchdog = threading.Timer(timeout, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process_id,
            # JAX looks for a cluster, such as Slurm's, even if it is told everything.
            cluster_detection_method="deactivate" if coordinator else None,
            initialization_timeout=timeout + 60,  # the watchdog comes first
        )
    except ValueError as error:
        raise RuntimeError(
            f"JAX finds no cluster here ({error}) Start the processes with "
            "`python -m course.hosts.launch`, or give each --coordinator, --processes and "
            "--process-id."
        ) from None
    jax.devices()  # here each process tells the others which devices it has
    watchdog.cancel()


def from_process_0(name: str, value: Any) -> Any:
    """Wait for process 0, and give every process the value that process 0 has.

    The value is anything that JSON can hold. What the other processes pass is ignored.
    """
    client = distributed.global_state.client
    if jax.process_index() == 0:
        client.key_value_set(name, json.dumps(value))
    return json.loads(client.blocking_key_value_get(name, PATIENCE * 1000))


def wait_for_all(name: str) -> None:
    """Wait until every process is here.

    Gathering waits, too, but on CPUs only for 30 seconds, and one host may compile that much longer
    than the others.
    """
    distributed.global_state.client.wait_at_barrier(name, PATIENCE * 1000)


def on_mesh(array: Any, sharding: NamedSharding) -> jax.Array:
    """A global array, to which each process contributes the parts that its own devices hold."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def read_prompts(file: Path) -> list[str]:
    """The lines of a file that are not empty."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RuntimeError(f"The prompts cannot be read: {error}.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise RuntimeError(f"There are no prompts in {file}: write one on each line.")
    return prompts


def image_name(index: int) -> str:
    return f"{index:05d}.png"


def describe(prompts: list[str], seed: int, checkpoint: Checkpoint) -> list[dict[str, str]]:
    """What an image follows from, for each prompt: this is written into its file."""
    keys = image_keys(seed, range(len(prompts)))
    return [
        {"prompt": prompt, "key": " ".join(map(str, key)), "checkpoint": checkpoint.name}
        for prompt, key in zip(prompts, keys, strict=True)
    ]


def image_keys(seed: int, indices: Sequence[int]) -> np.ndarray:
    """The keys of images as raw numbers, uint32 of shape (images, 2)."""
    keys = jax.vmap(jax.random.fold_in, (None, 0))(create_key(seed), np.asarray(indices, np.uint32))
    return np.asarray(jax.random.key_data(keys))


def find_missing(folder: Path, descriptions: list[dict[str, str]]) -> list[int]:
    """The indices of images that the folder lacks.

    Raises
    ------
    RuntimeError
        If the folder cannot be written, or holds a different image under such a name.
    """
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RuntimeError(
            f"Images cannot be written to {folder} ({error.strerror}): give a different --out."
        ) from None
    missing = []
    for index, description in enumerate(descriptions):
        file = folder / image_name(index)
        if not file.exists():
            missing.append(index)
            continue
        try:
            with Image.open(file) as image:
                found = image.info
        except OSError as error:
            raise RuntimeError(f"{file} is not an image ({error}): remove it.") from None
        for name, expected in description.items():
            if found.get(name) != expected:
                raise RuntimeError(
                    f"{file} is there already with the {name} {found.get(name)!r}, "
                    f"not {expected!r}: give a different --out, or remove what is in this one."
                )
    return missing


def write_image(file: Path, image: np.ndarray, description: dict[str, str]) -> None:
    """Write an image with its description, whole or not at all.

    The image is uint8 of shape (height, width, 3).
    """
    texts = PngInfo()
    for name, text in description.items():
        texts.add_itxt(name, text)
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png", pnginfo=texts)
    part = file.with_name(f".{file.name}.part")
    try:
        with part.open("wb") as stream:
            stream.write(buffer.getbuffer())
            stream.flush()
            # Otherwise a power cut could leave a file with the new name and no contents.
            os.fsync(stream.fileno())
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RuntimeError(
            f"{file} cannot be written ({error.strerror}): put that right, and start the same "
            "again; the images that are there will not be drawn a second time."
        ) from None


def compile_draw(pipeline: Any, checkpoint: Checkpoint, mesh: Mesh) -> Draw:
    """The program of one round: each device of the mesh draws one image.

    It is ``pipeline._generate``, mapped over the mesh by ``jax.shard_map``.

    Returns
    -------
    callable
        From token ids, int32 of shape (devices, 77), parameters, and key numbers, uint32 of shape
        (devices, 2), to images, uint8 of shape (devices, height, width, 3), and whether each
        image's numbers were finite.
    """

    # On one device: its share is one image.
    def draw(prompt_ids: jax.Array, params: Any, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        numbers = pipeline._generate(
            prompt_ids,
            params,
            jax.random.wrap_key_data(keys[0]),
            checkpoint.num_inference_steps,
            checkpoint.height,
            checkpoint.width,
            checkpoint.guidance_scale,
        )
        # Bytes, so that a quarter as many travel between the hosts.
        images = jnp.rint(numbers.astype(jnp.float32) * 255).astype(jnp.uint8)
        return images, jnp.isfinite(numbers).all(axis=(1, 2, 3))

    mapped = jax.shard_map(
        draw,
        mesh=mesh,
        in_specs=(P("data"), P(), P("data")),
        out_specs=(P("data"), P("data")),
        # The loops inside _generate start from constants, which this check would refuse.
        check_vma=False,
    )
    return jax.jit(mapped)


def make_plan(
    prompts_file: Path, folder: Path, seed: int, checkpoint: Checkpoint
) -> tuple[list[str], list[int]]:
    """The prompts and the indices of the missing images, as process 0 sees them.

    Were each process to look at its own files, they could disagree, and then wait for each other
    forever.
    """
    plan = None
    if jax.process_index() == 0:
        try:
            prompts = read_prompts(prompts_file)
            missing = find_missing(folder, describe(prompts, seed, checkpoint))
            plan = {"checkpoint": checkpoint.name, "prompts": prompts, "missing": missing}
        except RuntimeError as error:
            # The others have to end, too, and to know why.
            plan = {"problem": str(error)}
    plan = from_process_0("plan", plan)
    if "problem" in plan:
        raise RuntimeError(plan["problem"])
    if plan["checkpoint"] != checkpoint.name:
        raise RuntimeError(
            f"Process {jax.process_index()} would draw with {checkpoint.name}, and process 0 with "
            f"{plan['checkpoint']}: set TUTORIAL_CHECKPOINT to the same on every host."
        )
    return plan["prompts"], plan["missing"]


def draw_rounds(
    draw: Draw,
    params: Any,
    tokenize: Callable[[list[str]], np.ndarray],
    prompts: list[str],
    missing: list[int],
    seed: int,
    mesh: Mesh,
    write: Callable[[list[int], np.ndarray, np.ndarray], None],
) -> None:
    """Draw the missing images, one on each device in each round.

    Every process calls this, and process 0 writes.
    """
    split = NamedSharding(mesh, P("data"))
    for start in range(0, len(missing), mesh.size):
        indices = missing[start : start + mesh.size]
        # Every device takes part in every round: the last round is filled with a repeated prompt.
        filled = indices + [indices[-1]] * (mesh.size - len(indices))
        prompt_ids = on_mesh(tokenize([prompts[index] for index in filled]), split)
        keys = on_mesh(image_keys(seed, filled), split)
        drawn = draw(prompt_ids, params, keys)
        if start == 0:
            jax.block_until_ready(drawn)
            wait_for_all("compiled")
        images, finite = multihost_utils.process_allgather(drawn, tiled=True)
        if jax.process_index() == 0:
            write(indices, images, finite)


def run(prompts_file: Path, folder: Path, seed: int) -> None:
    """Draw what is missing. Every process calls this with the same arguments, after ``join``."""
    checkpoint = pick_checkpoint("sd")
    prompts, missing = make_plan(prompts_file, folder, seed, checkpoint)
    first = jax.process_index() == 0
    if first:
        rounds = -(-len(missing) // jax.device_count())
        print(
            f"{len(prompts)} prompt(s), {len(prompts) - len(missing)} drawn already; "
            f"{rounds} round(s) to go, on {jax.device_count()} device(s) of "
            f"{jax.process_count()} process(es)",
            flush=True,
        )
    if not missing:
        return

    # Only now, because main has to make sure first that diffusers still has it.
    from diffusers import FlaxStableDiffusionPipeline

    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(
        checkpoint.source,
        revision=checkpoint.revision,
        dtype=checkpoint.dtype,
        safety_checker=None,
        feature_extractor=None,
    )
    if first:
        for prompt in dict.fromkeys(prompts):
            warn_about_prompt(pipeline.tokenizer, prompt)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, P())
    params = jax.tree.map(lambda leaf: on_mesh(leaf, everywhere), jax.device_get(params))
    draw = compile_draw(pipeline, checkpoint, mesh)
    descriptions = describe(prompts, seed, checkpoint)

    def write(indices: list[int], images: np.ndarray, finite: np.ndarray) -> None:
        for index, image, ok, device in zip(
            indices, images, finite, mesh.devices.flat, strict=False
        ):
            if not ok:
                raise RuntimeError(
                    f"Image {index} has values that are not finite: the numbers went wrong."
                )
            by = {"device": f"{device.device_kind} {device.id} of process {device.process_index}"}
            write_image(folder / image_name(index), image, descriptions[index] | by)
        done = missing.index(indices[-1]) + 1
        print(
            f"{done} of {len(missing)} image(s) written after {time.monotonic() - start:.1f} s",
            flush=True,
        )

    start = time.monotonic()
    draw_rounds(draw, params, pipeline.prepare_inputs, prompts, missing, seed, mesh, write)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="a text file, one prompt on a line",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the images go"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--processes", type=int, metavar="N", help="how many processes there are")
    parser.add_argument("--process-id", type=int, metavar="K", help="which of them this is, from 0")
    parser.add_argument(
        "--start-timeout",
        type=int,
        default=300,
        metavar="SECONDS",
        help="how long to wait for them",
    )
    arguments = parser.parse_args()
    address = (arguments.coordinator, arguments.processes, arguments.process_id)
    if None in address and any(part is not None for part in address):
        parser.error("give --coordinator, --processes and --process-id together, or none of them")
    quiet_warnings()
    try:
        require_flax()
    except ImportError as error:
        parser.exit(1, f"Error: {error}\n")
    try:
        join(*address, arguments.start_timeout)
        run(arguments.prompts, arguments.out, arguments.seed)
        jax.distributed.shutdown()
    except BaseException as error:
        # The errors of this course say all in a sentence; for others, show where they came from.
        message = f"Error: {error}" if type(error) is RuntimeError else traceback.format_exc()
        print(message, file=sys.stderr, flush=True)
        # An orderly exit would wait for the other processes, and these wait for this one.
        os._exit(1)


if __name__ == "__main__":
    main()
