"""What the setup cell of each chapter does once the course is installed."""

import ctypes
import functools
import sys

from IPython import get_ipython

from helpers import packages
from helpers.devices import simulate_devices

# The setup cell's pip may have replaced these while the kernel holds their old versions.
REPLACED_BY_PIP = ("diffusers", "flax", "huggingface-hub", "numpy", "transformers")


def start() -> None:
    """Make a kernel ready for a chapter, or say in one sentence what stands in the way.

    Without an accelerator, the CPU becomes eight devices, or as many as the environment variable
    ``TUTORIAL_DEVICES`` says (``simulate_devices``), and three warnings of diffusers,
    transformers and tqdm are silenced (``quiet_warnings``). Free memory goes back to the system, as
    some platforms have little. Programs that JAX prints are without colours, some of which are hard
    to read on a white or a black page.

    Raises
    ------
    RuntimeError
        If the kernel has loaded a package in another version than the one that is installed now.
    ImportError
        If a package that every chapter needs is missing or too old.

    Examples
    --------
    >>> start()
    """
    packages.quiet_warnings()
    check_loaded_versions()
    check_installed_versions()
    simulate_devices()
    return_free_memory()
    import jax

    jax.config.update("jax_pprint_use_color", False)


@functools.cache  # listeners stay, so one of each is enough
def return_free_memory() -> None:
    """Return free memory to the system after each cell and each long compilation.

    The C library keeps what was freed, and in a chapter that is hundreds of MB. Only glibc has a
    function for that.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return
    from jax import monitoring

    def after_compilation(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration") and duration > 1:  # seconds
            trim(0)

    monitoring.register_event_duration_secs_listener(after_compilation)
    shell = get_ipython()
    if shell:
        shell.events.register("post_run_cell", lambda _: trim(0))


def check_loaded_versions() -> None:
    """Ask for a restart if the kernel loaded packages before pip replaced them."""
    for name in REPLACED_BY_PIP:
        module = sys.modules.get(name.replace("-", "_"))
        loaded = getattr(module, "__version__", None)
        installed = packages.installed_version(name)
        if loaded and installed and loaded != installed:
            raise RuntimeError(
                f"Restart the kernel and run this cell again: it has loaded {name} {loaded}, and "
                f"{name} {installed} is installed now."
            )


def check_installed_versions() -> None:
    """Stop if no chapter can run, and print a sentence if some can."""
    stopping, only_for_pipelines, newer = [], [], []
    for package in packages.needed_packages():
        if package.fits:
            continue
        if package.name in packages.ONLY_FOR_FLAX_PIPELINES:
            only_for_pipelines.append(package)
        elif package.is_newer:
            newer.append(package)
        else:
            stopping.append(package)
    if stopping:
        raise ImportError(
            f"The course does not run with {packages.list_versions(stopping)}: run "
            f"`{packages.pip_command(stopping)}`, and restart the kernel."
        )
    if only_for_pipelines:
        print(
            "Chapters 0 and 2 to 8 do not run with "
            f"{packages.list_versions(only_for_pipelines)}: for these chapters, run "
            f"`{packages.pip_command(only_for_pipelines)}`, and restart the kernel."
        )
    if newer:
        print(
            f"The course was not tested with {packages.list_versions(newer)}: if a chapter fails, "
            f"run `{packages.pip_command(newer)}`, and restart the kernel."
        )
