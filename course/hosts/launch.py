"""Start several processes of a program on this machine.

For example: ``python -m course.hosts.launch -n 2 --devices 4 -- hello.py``.

Each process runs Python with what follows ``--`` (``hello.py``, or ``-m course.hosts.worker
--prompts FILE --out DIR``) and three more arguments, which ``jax.distributed.initialize`` needs:
``--coordinator=HOST:PORT --processes=N --process-id=K``. Each line that a process prints is shown
behind its number. If one fails, the launcher says which, stops the others, and exits with 1. It
leaves no process behind, not even when it is interrupted or terminated.
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 5  # seconds that a process has to end by itself


def launch(
    arguments: Sequence[str],
    processes: int = 2,
    devices: int | None = None,
    time_limit: float | None = None,
) -> int:
    """Run a Python program as several processes that can meet, and print what they print.

    Parameters
    ----------
    arguments : sequence of str
        What follows ``python`` on the command line.
    processes : int
        How many, 1 or more.
    devices : int, optional
        Have the CPU of each process act as this many devices. By default, the processes use the
        hardware that they find.
    time_limit : float, optional
        Stop all of them after this many seconds.

    Returns
    -------
    int
        0 if all processes ended well, else 1.

    Raises
    ------
    ValueError
        If there is nothing to run, or the number of processes or devices is less than 1.
    """
    if not arguments:
        raise ValueError(
            "There is nothing to run: give the name of a script, or -m and the name of a module."
        )
    for name, number in (("processes", processes), ("devices", devices)):
        if number is not None and number < 1:
            raise ValueError(f"The number of {name} is {number}: give at least 1.")
    coordinator = f"127.0.0.1:{free_port()}"
    # By default JAX listens on every interface, IPv6 included, and not every machine has IPv6.
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "JAX_COORDINATOR_BIND_ADDRESS": coordinator,
    }
    if devices:
        # The second is read by JAX itself, the third by the helper that every chapter calls.
        environment |= {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices),
            "TUTORIAL_DEVICES": str(devices),
        }
        # XLA starts NPROC threads; without NPROC, one for each device of the process, or for each
        # core if there are more cores. What JAX 0.7 compiles depends on that number, and so does
        # the rounding. With NPROC the number is the same however the devices are grouped.
        environment["NPROC"] = str(max(processes * devices, os.cpu_count() or 1))
    started: list[subprocess.Popen] = []
    try:
        for number in range(processes):
            meeting = [
                f"--coordinator={coordinator}",
                f"--processes={processes}",
                f"--process-id={number}",
            ]
            process = subprocess.Popen(
                [sys.executable, *arguments, *meeting],
                env=environment,
                bufsize=0,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            started.append(process)
            os.set_blocking(process.stdout.fileno(), False)
        return _watch(started, time_limit)
    finally:
        _stop(started)


def _watch(processes: list[subprocess.Popen], time_limit: float | None) -> int:
    """Show what the processes print until all have ended, one has failed, or the time is over."""
    start = time.monotonic()
    unfinished = [b""] * len(processes)  # the line that each process has begun
    while True:
        running = [process for process in processes if process.poll() is None]
        failed = [number for number, process in enumerate(processes) if process.returncode]
        # If one has failed, the others only complain that it is gone: do not show them.
        for number in failed or range(len(processes)):
            unfinished[number] = _show(number, unfinished[number] + _read(processes[number]))
        if failed or not running:
            for number in failed or range(len(processes)):
                _show(number, unfinished[number] + b"\n" if unfinished[number] else b"")
            for number in failed:
                process = processes[number]
                _say(f"process {number} (pid {process.pid}) {_how(process.returncode)}")
            return int(bool(failed))
        if time_limit is not None and time.monotonic() - start > time_limit:
            _say(f"the time limit of {time_limit:g} s is over")
            return 1
        time.sleep(0.05)


def _read(process: subprocess.Popen) -> bytes:
    """What a process has printed since the last time; a pipe holds no more than one read takes."""
    try:
        return os.read(process.stdout.fileno(), 2**20)
    except BlockingIOError:
        return b""


def _show(number: int, text: bytes) -> bytes:
    """Print whole lines behind the number of their process; return what is left."""
    *lines, rest = text.split(b"\n")
    for line in lines:
        # Gloo, which connects CPUs, announces every connection on lines that run into each other.
        if not (line.startswith(b"[Gloo]") or b"peer ranks" in line):
            print(f"[{number}] {line.decode(errors='replace')}", flush=True)
    return rest


def _stop(processes: list[subprocess.Popen]) -> None:
    """End the processes that still run: ask, wait for a while, then kill."""
    running = [number for number, process in enumerate(processes) if process.poll() is None]
    try:
        if running:
            _say(f"stopping process {', '.join(map(str, running))}")
        for number in running:
            processes[number].terminate()
        deadline = time.monotonic() + GRACE
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:  # also if a second Ctrl-C came
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def free_port() -> int:
    """A port of this machine on which nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def _say(text: str) -> None:
    print(f"[launch] {text}", flush=True)


def main() -> int:
    """Launch what the command line says; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "-n", "--processes", type=int, default=2, help="how many processes (default: 2)"
    )
    parser.add_argument(
        "--devices",
        type=int,
        help="simulated CPU devices of each process (default: the hardware's own devices)",
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="stop all of them after this time"
    )
    parser.add_argument(
        "program", nargs="*", metavar="-- program", help="a script or -m module, and its arguments"
    )
    # What follows the first -- is for the program, even if it looks like an option.
    own = sys.argv[1:]
    program = []
    if "--" in own:
        end = own.index("--")
        program = own[end + 1 :]
        own = own[:end]
    options = parser.parse_args(own)
    if options.program:
        parser.error(f"put -- before the program: -- {' '.join(options.program + program)}")
    # A shell that starts the launcher in the background has it ignore Ctrl-C's signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # An exception, as Ctrl-C raises one, leaves launch through its finally: the processes stop.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return launch(program, options.processes, options.devices, options.time_limit)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
