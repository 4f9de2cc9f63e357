"""Start several processes of one program on this machine: ``python -m helpers.launch -n 2 --devices 4 -- hello.py``.

Each process runs Python with what follows ``--`` (``hello.py``, or ``-m helpers.worker --prompts FILE --out DIR``) and
three more arguments, which ``jax.distributed.initialize`` needs: ``--coordinator=HOST:PORT --processes=N
--process-id=K``. Each line that they print is shown behind the number of its process. If one fails, the launcher says
which, stops the others, and exits with 1. It leaves no process behind, also when it is interrupted or terminated.
"""

import argparse
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

GRACE = 5  # seconds that a process has to end by itself


def launch(
    arguments: Sequence[str], processes: int = 2, devices: int | None = None, time_limit: float | None = None
) -> int:
    """Run a Python program as several processes that can meet, and print what they print.

    Parameters
    ----------
    arguments : sequence of str
        What follows ``python`` on the command line.
    processes : int
        How many, 1 or more.
    devices : int, optional
        Have the CPU of each process act as so many devices. By default, they use the hardware that they find.
    time_limit : float, optional
        Stop all of them after so many seconds.

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
        raise ValueError("There is nothing to run: give the name of a script, or -m and the name of a module.")
    for name, number in (("processes", processes), ("devices", devices)):
        if number is not None and number < 1:
            raise ValueError(f"The number of {name} is {number}: give at least 1.")
    coordinator = f"127.0.0.1:{_free_port()}"
    # JAX would listen on every interface, of IPv6, too, and not every machine has that.
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_COORDINATOR_BIND_ADDRESS": coordinator}
    if devices:
        # The second is read by JAX itself, the third by the helper that every chapter calls.
        environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "TUTORIAL_DEVICES": str(devices)}
    group = _Group()
    try:
        for number in range(processes):
            meeting = [f"--coordinator={coordinator}", f"--processes={processes}", f"--process-id={number}"]
            group.start([sys.executable, *arguments, *meeting], environment)
        return group.watch(time_limit)
    finally:
        group.stop()


class _Group:
    """Processes, and the lines that they print."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen] = []
        self.readers: list[threading.Thread] = []
        # Threads read the lines, and the main thread prints them: only it can print into a notebook's cell.
        self.lines: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self.processes.append(process)
        reader = threading.Thread(target=self._read, args=(len(self.processes) - 1, process.stdout), daemon=True)
        reader.start()
        self.readers.append(reader)

    def _read(self, number: int, stream) -> None:
        for line in stream:
            # The CPU's collectives announce every connection, on lines that run into each other.
            if not (line.startswith("[Gloo]") or "peer ranks" in line):
                self.lines.put((number, line.rstrip("\n")))

    def watch(self, time_limit: float | None) -> int:
        start = time.monotonic()
        while True:
            self._show(range(len(self.processes)), wait=0.1)
            failed = {k: p.returncode for k, p in enumerate(self.processes) if p.poll()}
            running = self._running()
            if failed:
                for number in failed:
                    self.readers[number].join(1)
                self._show(failed)  # of the others, only complaints about the death of these would come
                for number, status in failed.items():
                    _say(f"process {number} (pid {self.processes[number].pid}) {_how(status)}")
                return 1
            if not running:
                for reader in self.readers:
                    reader.join(1)
                self._show(range(len(self.processes)))
                return 0
            if time_limit is not None and time.monotonic() - start > time_limit:
                _say(f"the time limit of {time_limit:g} s is over")
                return 1

    def _running(self) -> list[int]:
        return [number for number, process in enumerate(self.processes) if process.poll() is None]

    def _show(self, numbers, wait: float = 0) -> None:
        """Print the lines that are there, of some processes; wait for a first one for so many seconds."""
        for number, line in self._waiting_lines(wait):
            if number in numbers:
                print(f"[{number}] {line}", flush=True)

    def _waiting_lines(self, wait: float) -> Iterator[tuple[int, str]]:
        try:
            yield self.lines.get(timeout=wait) if wait else self.lines.get_nowait()
            while True:
                yield self.lines.get_nowait()
        except queue.Empty:
            return

    def stop(self) -> None:
        """End the processes that still run: ask, wait for a while, then kill."""
        running = self._running()
        if not running:
            return
        try:
            _say(f"stopping process {', '.join(map(str, running))}")
            for number in running:
                self.processes[number].terminate()
            deadline = time.monotonic() + GRACE
            while self._running() and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:  # also if a second Ctrl-C came
            for number in self._running():
                self.processes[number].kill()
            for process in self.processes:
                process.wait()


def _free_port() -> int:
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-n", "--processes", type=int, default=2, help="how many processes (default: 2)")
    parser.add_argument("--devices", type=int, help="simulated CPU devices of each; by default, the hardware's own")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="stop all of them after so long")
    parser.add_argument("program", nargs="*", metavar="-- program", help="a script or -m module, and its arguments")
    # What follows the first -- is none of the launcher's business, not even where it looks like an option.
    own, program = sys.argv[1:], []
    if "--" in own:
        own, program = own[: own.index("--")], own[own.index("--") + 1 :]
    options = parser.parse_args(own)
    if options.program:
        parser.error(f"put -- before the program: -- {' '.join(options.program + program)}")
    # Where a shell starts it in the background, Python would ignore Ctrl-C's signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # As Ctrl-C does, this unwinds the stack, so that the processes are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return launch(program, options.processes, options.devices, options.time_limit)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
