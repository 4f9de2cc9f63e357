"""What a cell shows besides images: the source of functions, and tables."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from IPython.display import Markdown, display
from tabulate import tabulate


def show_source(*functions: Callable) -> None:
    """Show the source of functions or classes, with its colours.

    Builds on ``inspect.getsource``, and on Jupyter's display of Markdown.

    Examples
    --------
    >>> show_source(show_source)
    <IPython.core.display.Markdown object>
    """
    blocks = [f"```python\n{inspect.getsource(function)}```" for function in functions]
    display(Markdown("\n\n".join(blocks)))


def show_table(rows: Iterable[Sequence[Any]], headers: Sequence[str]) -> None:
    """Show a table.

    Builds on ``tabulate``, and on Jupyter's display of Markdown.

    Parameters
    ----------
    rows : iterable of sequences
        The cells of each row, left to right. Texts may use Markdown and otherwise stay as they
        are, so format numbers whose digits matter. Columns without letters are flush right.
    headers : sequence of str
        One for each column.

    Examples
    --------
    >>> show_table([("v5e", "16 GB"), ("v6e", "32 GB")], ["chip", "memory"])
    <IPython.core.display.Markdown object>
    """
    rows = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    alignments = []
    for column in zip(*rows, strict=True):
        has_words = any(character.isalpha() for cell in column for character in cell)
        alignments.append("left" if has_words else "right")
    table = tabulate(
        rows, headers, tablefmt="pipe", disable_numparse=True, colalign=alignments or None
    )
    display(Markdown(table))
