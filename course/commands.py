"""What the commands share: how they say what they take, and how they end."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any


def make_parser(command: str, description: str, **options: Any) -> argparse.ArgumentParser:
    """Return a parser for ``python -m course.…``, whose help keeps the lines of its description."""
    return argparse.ArgumentParser(
        prog=f"python -m {command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **options,
    )


def positive(text: str) -> int:
    """Return a number of at least 1, as the ``type`` of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is too small: give at least 1")
    return number


def run(
    parser: argparse.ArgumentParser,
    function: Callable[[argparse.Namespace], int | None],
    arguments: Sequence[str] | None = None,
    interrupted: str = "Interrupted.",
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
        What to say when Ctrl-C is pressed.

    Returns
    -------
    int
        The exit status: the function's, by default 0; 1 after an error, or 130 after Ctrl-C. (If
        the arguments are wrong, argparse exits with 2.)
    """
    options = parser.parse_args(arguments)
    try:
        status = function(options)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # JAX is not imported here, as course.doctor runs where it cannot be.
        errors = sys.modules.get("jax.errors")
        if errors and isinstance(error, errors.JaxRuntimeError):
            raise  # nothing that a sentence could explain
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return 130
    return status or 0
