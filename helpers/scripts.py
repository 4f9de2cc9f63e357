"""Scripts that run in a process of their own, where JAX can start anew."""

import os
import subprocess
import sys
from pathlib import Path


def run_simulated(script: str | Path, devices: int = 8) -> None:
    """Run a Python file on the CPU as that many JAX devices, and print what it prints.

    JAX fixes the number of its devices when it starts, so this takes a new process. It sets
    ``JAX_PLATFORMS`` and ``JAX_NUM_CPU_DEVICES`` there, and leaves an accelerator to this one.

    Parameters
    ----------
    script : str or Path
        A file, run from the current folder.
    devices : int
        How many CPU devices JAX shows the script, 1 or more.

    Raises
    ------
    RuntimeError
        If the script fails; the message is the end of what it says about that.
    """
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    print(ran.stdout, end="")
    if ran.returncode:
        raise RuntimeError(f"{script} failed:\n{ran.stderr[-2000:]}")
