# @title Setup: run this first
# It starts JAX's devices. On Colab and Kaggle it first installs the course, and keeps the runtime's own jax and numpy.
import os
import subprocess
import sys
from importlib import metadata, util

try:
    from helpers import quiet_deprecations, simulate_devices
except ImportError as error:
    if not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & set(os.environ):
        raise ImportError(f"{error}: run `make lab` or `pip install .` in a clone of the course, and restart") from None
    if "OWNER/" in (source := os.environ.get("TUTORIAL_SOURCE", "git+https://github.com/OWNER/COURSE")):
        raise RuntimeError("This copy does not know where the course lives: set TUTORIAL_SOURCE to it.") from None
    print("Installing the course ...")
    kept = [f"{n}=={metadata.version(n)}" for n in ("jax", "jaxlib", "libtpu", "numpy") if util.find_spec(n)]
    pip = [sys.executable, "-m", "pip", "install", "--upgrade", "flax", source, *kept]  # the flax that fits the jax
    if (result := subprocess.run(pip, capture_output=True, text=True)).returncode:
        why = f"pip cannot install {source} with {', '.join(kept)}. Is the internet switched on?"
        raise RuntimeError(f"{result.stderr}\n{why}") from None
    if loaded := {"diffusers", "flax", "helpers", "huggingface_hub", "transformers"} & set(sys.modules):
        raise RuntimeError(f"Restart the kernel: it has loaded a different {', '.join(sorted(loaded))}.") from None
    from helpers import quiet_deprecations, simulate_devices
simulate_devices()
quiet_deprecations()
