"""What the commands take, where they write, and how they end: with sentences on stderr."""

import argparse
import errno
import os
import signal
import subprocess
import sys
import time

import jax
import pytest

from course import commands


def run(function, *arguments) -> int:
    parser = commands.make_parser("course.example", "What it does.")
    parser.add_argument("--count", type=commands.positive)
    return commands.run(parser, function, arguments, interrupted="Stopped: start it again.")


def raising(error):
    def function(options):
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (ValueError("A number\nis wrong: take another."), 1, "A number is wrong: take another.\n"),
        (OSError("The disk is full."), 1, "The disk is full.\n"),
        (
            OSError(errno.ENOSPC, "No space left on device", "out/a.json"),
            1,
            "out/a.json cannot be written or read (No space left on device): make room, and start "
            "the same again.\n",
        ),
        (ImportError("Ray is not installed."), 1, "Ray is not installed.\n"),
        (RuntimeError("There is no such model."), 1, "There is no such model.\n"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.\nAnd a table"),
            1,
            "There is not enough memory (RESOURCE_EXHAUSTED: Out of memory.): give smaller sizes, "
            "such as a smaller batch, or a machine with more.\n",
        ),
        (
            RuntimeError("No state is saved (RESOURCE_EXHAUSTED: the disk): make room."),
            1,
            "No state is saved (RESOURCE_EXHAUSTED: the disk): make room.\n",
        ),
        (
            MemoryError(),
            1,
            "There is not enough memory (the system gives no more): give smaller sizes, such as a "
            "smaller batch, or a machine with more.\n",
        ),
        (KeyboardInterrupt(), 130, "Stopped: start it again.\n"),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_status(error, status, sentence, capsys):
    assert run(raising(error)) == status
    assert capsys.readouterr().err == sentence


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL"), KeyError("name")])
def test_what_no_sentence_explains_is_raised(error):
    with pytest.raises(type(error)):
        run(raising(error))


def test_a_command_that_works_ends_with_0_or_with_a_status_of_its_own():
    assert run(lambda options: None) == 0
    assert run(lambda options: 3) == 3


@pytest.mark.parametrize("text", ["nan", "inf", "-1e999", "1e39"])
def test_a_number_that_float32_does_not_hold_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is no finite number"):
        commands.finite(text)
    assert commands.finite("-3e38") == -3e38


def test_a_time_to_wait_is_above_0():
    assert commands.seconds("0.5") == 0.5
    for text, sentence in {
        "0": "0 is too short: give seconds above 0",
        "-1": "-1 is too short: give seconds above 0",
        "nan": "nan is no finite number",
        "1e400": "1e400 is no finite number",
    }.items():
        with pytest.raises(argparse.ArgumentTypeError, match=sentence):
            commands.seconds(text)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking them.")
def test_a_process_that_is_told_to_end_says_what_to_do(name, capsys):
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # where `nohup` starts tests, it is ignored
    try:
        assert run(lambda options: os.kill(os.getpid(), number)) == 128 + number
        assert capsys.readouterr().err == "Stopped: start it again.\n"
        assert signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.skipif(sys.platform == "win32", reason="Windows ends processes without asking them.")
def test_a_signal_that_comes_where_python_drops_errors_is_not_lost(name, capsys):
    number = getattr(signal, name)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background lacks

    class Told:
        def __del__(self):
            os.kill(os.getpid(), number)

    def function(options):
        told = Told()
        del told
        time.sleep(10)

    assert run(function) == 128 + number
    assert capsys.readouterr().err == "Stopped: start it again.\n"


SCRIPT = (
    "from course import commands\n"
    "parser = commands.make_parser('course.example', '')\n"
    "function = lambda options: print('a line\\n' * 10**5)\n"
    "raise SystemExit(commands.run(parser, function, interrupted='Start it again.'))\n"
)


@pytest.mark.skipif(sys.platform == "win32", reason="That is how shells of other systems close it.")
def test_a_command_works_where_nothing_can_be_printed():
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", SCRIPT]
    done = subprocess.run(closed, stderr=subprocess.PIPE, text=True)
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_command_whose_output_nobody_reads_says_what_to_do():
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == ("Start it again.\n", 130)
    process.stderr.close()


# Where they write.


def test_two_runs_do_not_write_to_one_folder(tmp_path):
    pytest.importorskip("fcntl", reason="Windows has no such locks.")
    other = commands.writing_to(tmp_path)
    with (
        commands.writing_to(tmp_path),
        pytest.raises(RuntimeError, match=r"Another run is writing to .*: wait until it ends"),
    ):
        other.__enter__()
    with commands.writing_to(tmp_path):  # which is free again
        pass


def test_a_folder_goes_again_if_nothing_was_written(tmp_path):
    for name, is_written in (("empty", False), ("full", True)):
        with commands.writing_to(tmp_path / name):
            if is_written:
                (tmp_path / name / "file").touch()
        assert (tmp_path / name).exists() == is_written


def test_what_a_killed_run_has_half_written_goes_when_the_next_one_begins(tmp_path):
    (tmp_path / "unet").mkdir()
    half = tmp_path / "unet" / "model.safetensors.4321.unfinished"
    half.touch()
    others = [tmp_path / name for name in ("mine.unfinished", "notes.2026-draft.unfinished")]
    for file in others:
        file.touch()
    with commands.writing_to(tmp_path):
        assert not half.exists() and all(file.exists() for file in others)


def test_too_little_room_is_found_before_writing(tmp_path):
    commands.check_room(tmp_path, 1)
    with pytest.raises(RuntimeError, match=r"needs 1000000000\.0 MB, .* make room"):
        commands.check_room(tmp_path, 10**15)
