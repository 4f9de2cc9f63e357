"""Scripts that run in processes of their own, where JAX can start anew."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from helpers.devices import check_number


def run_simulated(script: str | Path, devices: int = 8) -> None:
    """Run a Python file on the CPU as that many JAX devices, and print what it prints.

    JAX fixes the number of its devices when it starts, so this takes a new process. It sets
    ``JAX_PLATFORMS`` and ``JAX_NUM_CPU_DEVICES`` there, and leaves an accelerator to this one.

    Parameters
    ----------
    script : str or Path
        A file, run from the current folder.
    devices : int
        How many CPU devices JAX shows the script, from 1 to 1024.

    Raises
    ------
    ValueError
        If that is no such number.
    RuntimeError
        If the script fails; the message is the end of what it says about that.
    """
    count = check_number("devices", devices)
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}
    ran = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | settings,
        capture_output=True,
        text=True,
    )
    print(ran.stdout, end="")
    if ran.returncode:
        raise RuntimeError(f"{script} failed:\n{ran.stderr[-2000:]}")


def run_together(script: str | Path, processes: int = 2, devices: int = 2) -> list[int]:
    """Run a Python file as several processes, which can meet, and print what they print.

    The script gets two arguments: the address where they meet, and its number. Its CPU acts as
    that many JAX devices. Each line is shown behind the number of its process.

    Returns
    -------
    list of int
        The exit status of each process: 0 if all went well, and a signal's number below 0 if that
        ended it.

    Raises
    ------
    ValueError
        If the number of devices, of all processes together, is not from 1 to 1024.
    """
    check_number("processes * devices", processes * devices)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # a port that is free
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        # By default JAX listens on every interface, IPv6 included, and not every machine has IPv6.
        "JAX_COORDINATOR_BIND_ADDRESS": address,
    }
    started = []
    for number in range(processes):
        started.append(
            subprocess.Popen(
                [sys.executable, str(script), address, str(number)],
                env=os.environ | settings,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for number, process in enumerate(started):
            printed, complaints = process.communicate(timeout=300)
            if process.returncode > 0:  # it ended with an error of its own
                printed += complaints[-1000:]
            for line in printed.splitlines():
                if "[Gloo]" not in line and "peer ranks" not in line:  # how it connects CPUs
                    print(f"[{number}] {line}")
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started]
