"""Record how Stable Diffusion XL's parameters are read: ``python -m benchmarks.record_reading`` writes reading.json.

It makes a folder with safetensors of the real size, random numbers in float16, which takes 7 GB of disk. Then a process
of its own reads it onto the CPU in bfloat16, as ``stable_diffusion.load`` does. Memory is what the system says of that
process. "Held" is what is its own. Pages of the files that it looked at come on top for the system's statistics, which
takes them back when it needs room.
"""

import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import numpy as np
import safetensors
from safetensors.numpy import save_file

import stable_diffusion
from course import tpu
from course.convert import turn_back
from helpers import bundled_checkpoint

TARGET = Path(__file__).with_name("reading.json")
MOST = 2**30  # bytes in one file, as making a file takes twice its size of memory
CONFIGURATIONS = Path(tpu.__file__).with_name("configurations") / "sdxl"


def write_folder(folder: Path) -> int:
    """Make the folder; the bytes of its parameters."""
    shutil.copytree(CONFIGURATIONS, folder, dirs_exist_ok=True)
    for name in ("tokenizer", "tokenizer_2"):
        shutil.copytree(Path(bundled_checkpoint("shapes-sdxl").source) / name, folder / name)
    shapes = stable_diffusion.parameter_shapes(stable_diffusion.read_config(folder))
    some = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(np.float16)
    for part, names in shapes.items():
        stem = "model" if part.startswith("text_encoder") else "diffusion_pytorch_model"
        pieces, places, room = [{}], {}, MOST
        for name, shape in names.items():
            if 2 * shape.size > room:
                pieces.append({})
                room = MOST
            room -= 2 * shape.size
            pieces[-1][name] = turn_back(name, np.broadcast_to(np.float16(0), shape.shape)).shape
        for n, piece in enumerate(pieces):
            file = f"{stem}-{n + 1:05}-of-{len(pieces):05}.safetensors"
            places |= dict.fromkeys(piece, file)
            tensors = {name: np.resize(some, shape) for name, shape in piece.items()}
            save_file(tensors, folder / part / file, metadata={"format": "pt"})
        (folder / part / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def memory(field: str) -> int:
    """Bytes of this process, by the system."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def read(folder: Path) -> dict:
    """Read the folder in this process, and say how long it took and how much memory it held."""
    jax.block_until_ready(jax.numpy.zeros(1))
    before = peak = memory("RssAnon")
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.02):
            peak = max(peak, memory("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    params, _, _ = stable_diffusion.load(folder, jax.numpy.bfloat16)
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


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(read(Path(sys.argv[1]))))
        return
    with tempfile.TemporaryDirectory() as place:
        size = write_folder(Path(place))
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "benchmarks.record_reading", place]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    cpu = next(
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    record = {
        "date": str(datetime.date.today()),
        "machine": {"cpu": cpu, "cores": os.cpu_count()},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "safetensors": safetensors.__version__,
        },
        "model": "Stable Diffusion XL, float16, read in bfloat16 on a CPU",
        "files": size,
        **json.loads(said),
    }
    TARGET.write_text(json.dumps(record, indent=2) + "\n")
    print(f"{record['held at most'] / size:.2f} times the files were held at most, in {record['seconds']} s.")


if __name__ == "__main__":
    main()
