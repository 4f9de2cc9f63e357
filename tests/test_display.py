"""show_source and show_table."""

import pytest

from helpers import display, show_source, show_table, split_keys


@pytest.fixture
def shown(monkeypatch):
    """A function that gives the Markdown which a call displays."""
    outputs = []
    monkeypatch.setattr(display, "display", outputs.append)

    def shown(function, *arguments) -> str:
        function(*arguments)
        return outputs.pop().data

    return shown


def test_sources_are_shown_in_order_as_python(shown):
    text = shown(show_source, split_keys, show_table)
    first, second = text.index("def split_keys("), text.index("def show_table(")
    assert text.startswith("```python\n")
    assert first < second
    assert text.count("```python\n") == 2


def test_a_table_keeps_digits_and_sets_columns_of_figures_flush_right(shown):
    text = shown(show_table, [("v5e", "2.50", 16), ("v6e", "12.00", 32)], ["chip", "s", "GB"])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    header, rule, *rows = lines
    assert header == ["chip", "s", "GB"]
    assert [(cell[0], cell[-1]) for cell in rule] == [(":", "-"), ("-", ":"), ("-", ":")]
    assert rows == [["v5e", "2.50", "16"], ["v6e", "12.00", "32"]]


def test_a_bar_in_a_cell_does_not_end_the_cell(shown):
    assert r"a \| b" in shown(show_table, [("a | b", 1)], ["text", "number"])


def test_a_table_may_be_empty(shown):
    assert shown(show_table, [], ["one", "two"]).count("one") == 1
