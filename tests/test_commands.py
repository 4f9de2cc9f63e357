"""How the commands end: exit statuses, and sentences on stderr."""

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
        (ImportError("Ray is not installed."), 1, "Ray is not installed.\n"),
        (RuntimeError("There is no such model."), 1, "There is no such model.\n"),
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


def test_a_number_below_1_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(lambda options: None, "--count", "0")
    assert "argument --count: 0 is too small: give at least 1" in capsys.readouterr().err
