"""How Stable Diffusion XL's parameters are read: how long it takes, and what memory it holds.

It makes a folder with safetensors of the real size, random numbers in float16, which takes 7 GB of
disk. Then a process of its own reads it onto the CPU in bfloat16, as ``course.sd.load`` does.
Memory is what the system says of that process. "Held" is what is its own. Pages of the files that
it looked at come on top for the system's statistics, which takes them back when it needs room.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file

from course import sd
from course.model.files import to_channels_first, unstack_layers
from course.tpu.programs import CONFIGURATIONS
from helpers import bundled_checkpoint

MODEL = "Stable Diffusion XL, float16, read in bfloat16 on a CPU"
MOST = 2**30  # bytes in one file, as making a file takes twice its size of memory


def write_folder(folder: Path) -> int:
    """Make the folder, and return the bytes of its parameters."""
    shutil.copytree(CONFIGURATIONS / "sdxl", folder, dirs_exist_ok=True)
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(Path(bundled_checkpoint("shapes-sdxl").source) / name, folder / name)
    shapes = sd.parameter_shapes(sd.read_config(folder))
    for part, parameters in shapes.items():
        write_part(folder / part, unstack_layers(parameters))
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def write_part(folder: Path, parameters: dict) -> None:
    """Write one model's parameters, given by their shapes, into several files with an index."""
    is_text = folder.name.startswith("text_encoder")
    stem = "model" if is_text else "diffusion_pytorch_model"
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(np.float16)
    files = [{}]  # of each file: names of parameters, and shapes as PyTorch has them
    room = MOST
    for name, shape in parameters.items():
        size = 2 * shape.size  # float16
        if size > room:
            files.append({})
            room = MOST
        room -= size
        files[-1][name] = to_channels_first(name, np.broadcast_to(np.float16(0), shape.shape)).shape
    places = {}
    for number, content in enumerate(files, start=1):
        file = f"{stem}-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: np.resize(some, shape) for name, shape in content.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        for name in content:
            places[name] = file
    index = json.dumps({"weight_map": places})
    (folder / f"{stem}.safetensors.index.json").write_text(index)


def memory(field: str) -> int:
    """Return the bytes of this process, by the system."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}: this needs Linux.")


def read(folder: Path) -> dict:
    """Read the folder in this process, and return how long it took and how much memory it held."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before = memory("RssAnon")
    peak = before
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    params, _, _ = sd.load(folder, jax.numpy.bfloat16)
    seconds = time.perf_counter() - start
    done.set()
    watcher.join()
    return {
        "seconds": round(seconds, 1),
        "held before": before,
        "held at most": peak,
        "with pages of files at most": memory("VmHWM"),
        "parameters": sum(value.nbytes for value in jax.tree.leaves(params)),
    }


def questions(rows: list[dict]) -> list[dict]:
    return [{"model": MODEL}]


def answer(model: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        size = write_folder(Path(folder))
        command = [sys.executable, "-m", "lab.clock.reading", folder]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {"files": size} | json.loads(ended.stdout)


if __name__ == "__main__":
    print(json.dumps(read(Path(sys.argv[1]))))
