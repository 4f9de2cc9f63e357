"""How much memory the notebook kernels below this process take at their peak."""

import threading
from pathlib import Path

import psutil

INTERVAL = 0.2  # seconds between two looks
BINDER = 2 * 2**30  # bytes that mybinder.org gives a session, all of its processes together
SERVER = 256 * 2**20  # bytes of these that we leave to JupyterLab


class KernelMemory:
    """Watch the kernels that this process starts, and what they start, while the ``with`` block runs.

    ``peak`` is the largest sum, in bytes, of what those that lived at the same time held of the machine's memory. On
    Linux each one's own record is looked at, too: where that has grown since the last look, it counts, so that no short
    peak escapes that is higher than all before.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._seen: dict[int, tuple[int, int]] = {}  # by process: what it held at the last look, and its record then
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "KernelMemory":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL):
            self.peak = max(self.peak, sum(map(self._since_last_look, _kernels())))

    def _since_last_look(self, process: psutil.Process) -> int:
        now, record = _resident(process)
        before, old_record = self._seen.get(process.pid, (0, 0))
        self._seen[process.pid] = now, record
        return record if record > old_record else max(now, before)


def resident_peak(process: psutil.Process) -> int:
    """The most that a process has held in memory so far, in bytes; 0 if it has ended."""
    return _resident(process)[1]


def _resident(process: psutil.Process) -> tuple[int, int]:
    """What a process holds in memory, and the most that it has held so far where the system keeps that, in bytes."""
    try:
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            now, record = (int(fields.get(name, "0").split()[0]) for name in ("VmRSS", "VmHWM"))
            return now * 1024, record * 1024  # written in kB, which are 1024 bytes there
        return process.memory_info().rss, process.memory_info().rss
    except (psutil.Error, OSError):
        return 0, 0


def _kernels() -> list[psutil.Process]:
    """The kernels among the descendants of this process, and the descendants of these."""
    commands: dict[int, list[str]] = {}  # of all of them, by their numbers
    found = []
    for process in psutil.Process().children(recursive=True):  # a parent comes before its children
        try:
            command, above = process.cmdline(), commands.get(process.ppid())
        except psutil.Error:
            continue  # it ended in the meantime
        if above is None and "ipykernel_launcher" not in command:
            continue
        commands[process.pid] = command
        if command != above:  # a fork that has not become another program shares its parent's memory
            found.append(process)
    return found
