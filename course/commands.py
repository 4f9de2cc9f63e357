"""What the commands share: which numbers they take, where they write, and how they end."""

import argparse
import contextlib
import errno
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LARGEST = 3.4028234e38  # of float32
MOST_LETTERS = 2000  # of an error, which may quote a file


def make_parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for ``python -m course.…``, whose help keeps the lines of its description."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


# Numbers, as the ``type`` of an argument.


def positive(text: str) -> int:
    """Return a whole number of at least 1, which fits into 32 bits."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: give at least 1")
    if number >= 2**31:
        raise argparse.ArgumentTypeError(f"{number} is too large: give less than {2**31}")
    return number


def finite(text: str) -> float:
    """Return a number that float32 can hold: no NaN, and not infinite."""
    number = float(text)
    if not abs(number) <= LARGEST:  # which is false for NaN, too
        raise argparse.ArgumentTypeError(f"{text} is no finite number of 32 bits: give one")
    return number


def seconds(text: str) -> float:
    """Return how long to wait: a finite number above 0."""
    number = finite(text)
    if number <= 0:
        raise argparse.ArgumentTypeError(f"{text} is too short: give seconds above 0")
    return number


# Where commands write.


def try_to_write(folder: Path, size: int) -> None:
    """Write so many bytes into a folder, which may be new, and take them away again.

    What the system says of free room leaves out quotas, and limits on the size of a file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as probe:
        block = os.urandom(min(size, 2**20))  # zeros take no room on disks that compress
        for start in range(0, size, len(block)):
            probe.write(block[: size - start])


def check_writable(folder: Path, size: int = 4096) -> None:
    """Make a folder if it is not there; ``RuntimeError`` if so many bytes cannot be written."""
    try:
        try_to_write(folder, size)
    except OSError as error:
        raise RuntimeError(
            f"{folder} cannot be written ({error.strerror}): make room, or give a different place."
        ) from None


@contextlib.contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Make sure, before long work, that a folder can be written, and that no other run does.

    The folder is made if it is not there, and goes again if nothing was written. What a run that
    was killed has half written there goes, too. On Windows and on disks that know no locks, other
    runs go unnoticed, and nothing is taken away.

    Raises
    ------
    RuntimeError
        If the folder cannot be written, or another run of a command is writing to it.
    """
    is_new = not folder.exists()
    check_writable(folder)
    try:
        with locked(folder) as is_alone:
            if is_alone:
                remove_unfinished(folder)
            yield
    finally:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


def remove_unfinished(folder: Path) -> None:
    """Remove what ``course.model.files.write_whole`` left in a folder when it was killed."""
    for file in folder.rglob("*.unfinished"):
        if re.search(r"\.\d+\.unfinished$", file.name):  # the number of the process
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock, which the system takes back if this process dies.

    It gives whether there is a lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield False
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Another run is writing to {folder}: wait until it ends, or give a different "
                "place."
            ) from None
        except OSError:  # a disk without locks
            is_locked = False
        else:
            is_locked = True
        yield is_locked
    finally:
        os.close(handle)


def check_room(folder: Path, size: int) -> None:
    """Raise ``RuntimeError`` if so many bytes do not fit on the disk of a folder."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RuntimeError(
            f"{folder} needs {size / 1e6:.1f} MB, and its disk has {free / 1e6:.1f} MB free: make "
            "room, or give a different place."
        )


def check_apart(folder: Path, source: Path) -> None:
    """Raise ``ValueError`` if a folder to write is that of a model to read, or lies in it.

    The model would be lost, and what the same command makes of it a second time is something else.
    """
    if folder.resolve().is_relative_to(source.resolve()):
        raise ValueError(
            f"{folder} is the folder of {source} itself, or in it, and would change that model: "
            "give a different folder."
        )


def explain_os_error(error: OSError, file: str | Path | None = None) -> str:
    """Return a sentence on what the operating system refused, and what to do about it."""
    if error.errno is None:  # raised by Python code, which wrote a sentence
        return str(error)
    place = file or error.filename or "A file"
    advice = "put that right"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        advice = "make room"
    return (
        f"{place} cannot be written or read ({error.strerror}): {advice}, and start the same again."
    )


# How commands end.


def run(
    parser: argparse.ArgumentParser,
    function: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
    interrupted: str = "Interrupted: start the same again.",
) -> int:
    """Run a command, and turn an error that somebody can put right into a sentence on stderr.

    Parameters
    ----------
    parser : argparse.ArgumentParser
        What the command takes.
    function : callable
        What it does with the options. It may return an exit status of its own.
    arguments : sequence of str, optional
        In place of those of the command line.
    interrupted : str
        What to say when Ctrl-C is pressed, the process is told to end, or nobody reads its output
        any more.

    Returns
    -------
    int
        The exit status: the function's, by default 0; 1 after an error; or 130 after Ctrl-C, and
        143 if the process was told to end, as shells have it. (If the arguments are wrong, argparse
        exits with 2.)
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed before Python started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):  # what an old terminal cannot show must not stop work
            stream.reconfigure(errors="backslashreplace")
    options = parser.parse_args(arguments)
    try:
        with ending_as_ctrl_c():
            status = function(options)
            sys.stdout.flush()
    except BrokenPipeError:
        # Nobody reads: nor would they what Python flushes when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(interrupted, file=sys.stderr)
        return 130
    except (ImportError, MemoryError, OSError, RuntimeError, ValueError) as error:
        said = str(error)
        if is_out_of_memory(error):
            reason = said.split("\n")[0] or "the system gives no more"
            said = (
                f"There is not enough memory ({reason}): give smaller sizes, such as a smaller "
                "batch, or a machine with more."
            )
        elif is_of_jax(error):
            raise  # nothing that a sentence could explain
        elif isinstance(error, OSError):
            said = explain_os_error(error)
        print(in_one_line(said), file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        print(interrupted, file=sys.stderr)
        return 128 + next(iter(error.args), signal.SIGINT)
    return status or 0


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an error says that a device, or the machine, has too little memory."""
    # Other libraries say the same of a full disk.
    return isinstance(error, MemoryError) or (
        is_of_jax(error) and "RESOURCE_EXHAUSTED" in str(error)
    )


def is_of_jax(error: Exception) -> bool:
    """Return whether an error comes from a compiled program, or from its compiler."""
    # JAX is not imported here, as course.doctor runs where it cannot be.
    errors = sys.modules.get("jax.errors")
    return errors is not None and isinstance(error, errors.JaxRuntimeError)


def in_one_line(text: str) -> str:
    """Return a text as one line that a terminal only shows, whoever wrote the names in it.

    >>> in_one_line("a\\nfile called \\x1b[2J")
    'a file called \\\\x1b[2J'
    """
    line = " ".join(text.split())[:MOST_LETTERS]
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)


@contextlib.contextmanager
def ending_as_ctrl_c() -> Iterator[None]:
    """Let a process that is told to end do so as after Ctrl-C: when its machine is shut down.

    The ``KeyboardInterrupt`` has the number of the signal. Where Python drops it, as it drops all
    errors of ``__del__`` and of what is called when garbage is collected, it comes once more.
    """

    def interrupt(number: int, _: object) -> None:
        raise KeyboardInterrupt(number)

    def come_again(dropped: Any) -> None:
        if isinstance(dropped.exc_value, KeyboardInterrupt) and hasattr(signal, "pthread_kill"):
            number = next(iter(dropped.exc_value.args), signal.SIGINT)
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, (main, number)).start()
        else:
            hook(dropped)

    hook, sys.unraisablehook = sys.unraisablehook, come_again
    before = {}
    is_main = threading.current_thread() is threading.main_thread()  # no other gets signals
    for name in ("SIGTERM", "SIGHUP") if is_main else ():  # Windows has no SIGHUP
        number = getattr(signal, name, None)
        # What nohup has set to be ignored stays so.
        if number and signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number, handler in before.items():
            signal.signal(number, handler)
