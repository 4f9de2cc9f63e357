# The setup cell is the same in every chapter. Where the course is installed, it only starts JAX's devices; on Colab and
# Kaggle it installs the course first, and leaves the runtime's own JAX and NumPy as they are.
import os
import pathlib
import subprocess
import sys
import tempfile
from importlib import invalidate_caches, metadata

REPOSITORY = ""  # where this course lives on GitHub, as "owner/name"
try:
    from helpers import simulate_devices
except ImportError as error:
    source = os.environ.get("TUTORIAL_SOURCE") or (REPOSITORY and f"git+https://github.com/{REPOSITORY}")
    if not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & set(os.environ):
        raise ImportError(
            f"{error}\nIn a clone of the course, run `make lab`, or `pip install .` and restart the kernel. "
            "(`pip install helpers` would install a stranger's package.)"
        ) from None
    if not source:
        raise RuntimeError(
            'This copy of the course does not know where it lives: set REPOSITORY above to "owner/name" on GitHub, or '
            "the environment variable TUTORIAL_SOURCE to anything that pip can install it from."
        ) from None
    source = pathlib.Path(source).resolve().as_uri() if os.path.exists(source) else source
    present = {d.name: d.version for d in reversed([*metadata.distributions()])}  # the first on the path counts
    kept = {"jax", "jaxlib", "libtpu", "numpy"} & set(present)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        print(*(f"{name}=={present[name]}" for name in kept), sep="\n", file=constraints, flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", constraints.name]
        if subprocess.run([*pip, f"stable-diffusion-jax-course @ {source}"]).returncode:
            raise RuntimeError(
                f"pip says above why it cannot install {source}: is the internet switched on, and does the course "
                f"support what it keeps of this runtime ({', '.join(sorted(f'{k} {present[k]}' for k in kept))})?"
            ) from None
    invalidate_caches()
    if loaded := {"helpers", "diffusers", "flax", "huggingface_hub", "tokenizers", "transformers"} & set(sys.modules):
        names = ", ".join(sorted(loaded))
        raise RuntimeError(f"Installed. Now restart the kernel: another {names} had been imported already.") from None
    from helpers import simulate_devices
import diffusers
import transformers

simulate_devices()  # without an accelerator, the CPU acts as several devices
# Every Flax class announces its removal. This course pins the last versions that have them, and needs no reminder.
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()
