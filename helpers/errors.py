"""Errors that a chapter shows on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def show_error(*kinds: type[Exception]) -> Iterator[None]:
    """Run a block that is meant to fail: print its error, and go on after the block.

    *Run all* stops at an error, on Colab even at one that a tag permits, so a chapter catches the
    errors that it shows.

    Parameters
    ----------
    *kinds : type of Exception
        What may happen. Anything else is raised, as it was not meant.

    Raises
    ------
    AssertionError
        If the block does not fail.

    Examples
    --------
    >>> with show_error(ZeroDivisionError):
    ...     1 / 0
    Meant to fail. ZeroDivisionError: division by zero
    """
    try:
        yield
    except kinds as error:
        print(f"Meant to fail. {type(error).__name__}: {error}")
    else:
        raise AssertionError("This block was meant to fail, and it did not.")
