"""Which devices JAX sees, and how to see several on a machine that has one."""

import importlib.util
import os
from pathlib import Path

import jax
import psutil

DEVICES_VARIABLE = "TUTORIAL_DEVICES"
MOST_DEVICES = 1024  # JAX starts several threads for each

# What to do, by what find_runtime returns.
_ADVICE = {
    "Colab": (
        "choose Runtime > Change runtime type > TPU in Colab's menu, and run the notebook again "
        "from the top"
    ),
    "Kaggle": (
        "choose Settings > Accelerator > TPU in Kaggle's menu, and run the notebook again from the "
        "top"
    ),
    "TPU VM": (
        "this machine has TPU chips that JAX cannot use: run "
        f'pip install "jax[tpu]=={jax.__version__}", and stop other processes that hold the chips '
        "(sudo lsof -w /dev/accel* /dev/vfio/*)"
    ),
    "GPU": (
        "JAX cannot use the GPU here: if it is NVIDIA's, run "
        f'pip install "jax[cuda13]=={jax.__version__}"'
    ),
    "laptop": (
        "there is no accelerator to switch on here: go on with the CPU, or open the notebook in "
        "Colab or Kaggle"
    ),
}


def simulate_devices(n: int = 8) -> None:
    """Present the CPU as ``n`` JAX devices, so that parallel programs have devices to run on.

    Builds on the configuration option ``jax_num_cpu_devices``. An accelerator is left alone: it
    stays the default backend, and only ``jax.devices("cpu")`` grows. The environment variable
    ``TUTORIAL_DEVICES`` overrides ``n``. Calling it again with the same number does nothing.

    Parameters
    ----------
    n : int
        How many devices, from 1 to 1024.

    Raises
    ------
    ValueError
        If it is no whole number from 1 to 1024.
    RuntimeError
        If JAX has already started with a different number; it reads the option only once.

    Examples
    --------
    >>> simulate_devices(len(jax.devices("cpu")))  # as it is already
    """
    if DEVICES_VARIABLE in os.environ:
        source, wanted = DEVICES_VARIABLE, os.environ[DEVICES_VARIABLE]
    else:
        source, wanted = "n", n
    count = check_number(source, wanted)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # JAX has started
        present = len(jax.devices("cpu"))
        if present != count:
            raise RuntimeError(
                f"JAX has already started with {present} CPU device(s) and cannot change to "
                f"{count}: restart the kernel and call simulate_devices before anything else uses "
                "JAX."
            ) from None
        return
    has_accelerator = has_tpu_chips() or _has_gpu()
    if importlib.util.find_spec("libtpu") and not has_accelerator and not jax.config.jax_platforms:
        # JAX would find the CPU anyway, but after libtpu has logged a screenful about the TPU that
        # is missing.
        jax.config.update("jax_platforms", "cpu")


def check_number(source: str, wanted: int | str) -> int:
    """Return a number of devices; ``ValueError``, with where it comes from, if it cannot be one."""
    if not str(wanted).isdecimal() or not 1 <= int(wanted) <= MOST_DEVICES:
        raise ValueError(
            f"{source} is {wanted!r}, but the number of devices must be a whole number from 1 to "
            f"{MOST_DEVICES}."
        )
    return int(wanted)


def device_report() -> str:
    """Say in a few lines what JAX runs on: platform, kind, number and memory of the devices.

    Builds on ``jax.devices()`` and ``Device.memory_stats()``. Memory is in GiB, and is what JAX may
    allocate.

    Examples
    --------
    >>> print(device_report())  # doctest: +ELLIPSIS
    JAX ... runs on ...
    """
    devices = jax.devices()
    first = devices[0]
    stats = first.memory_stats() or {}
    if "bytes_limit" in stats:
        memory = f"{stats['bytes_limit'] / 2**30:.1f} GiB of memory on each"
    elif first.platform == "cpu":
        memory = f"{psutil.virtual_memory().total / 2**30:.1f} GiB of memory"
        if len(devices) > 1:
            memory += ", shared by all of them"
    else:
        memory = "an unknown amount of memory"
    report = (
        f"JAX {jax.__version__} runs on {len(devices)} device(s) of platform {first.platform!r}, "
        f"kind {first.device_kind!r}, with {memory}."
    )
    if first.platform == "cpu":
        report += (
            f"\nThis is a CPU run on a machine with {os.cpu_count()} core(s). Programs behave as "
            "on real devices, but their speed says nothing about real ones."
        )
    return report


def require_accelerator() -> None:
    """Stop with advice unless JAX runs on a TPU or a GPU.

    Raises
    ------
    RuntimeError
        If the default backend is the CPU. The message names the backend and what to do in this
        runtime.
    """
    if jax.default_backend() == "cpu":
        runtime = find_runtime()
        raise RuntimeError(
            f"JAX runs on the CPU, not on a TPU or GPU. On this machine ({runtime}): "
            f"{_ADVICE[runtime]}."
        )


def find_runtime() -> str:
    """Say where this code runs: a key of the advice above."""
    if "COLAB_RELEASE_TAG" in os.environ:
        return "Colab"
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        return "Kaggle"
    if has_tpu_chips():
        return "TPU VM"
    if _has_gpu():
        return "GPU"
    return "laptop"


def has_tpu_chips() -> bool:
    """Say whether the operating system shows TPU chips, whatever JAX makes of them."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def _has_gpu() -> bool:
    # NVIDIA's driver, the same under WSL, and AMD's.
    return any(Path("/dev", name).exists() for name in ("nvidiactl", "dxg", "kfd"))
