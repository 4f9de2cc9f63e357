"""The page of messages: each is said somewhere, and whatever a helper raises is on it."""

import ast
import functools
import json
import re
from pathlib import Path

import jax
import nbformat
import pytest

from tools import build_site

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
GAP = "…"


def template(node: ast.expr) -> str:
    """The text of an expression, with a gap for each part that is known only when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(GAP if isinstance(part, ast.FormattedValue) else template(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return template(node.left) + template(node.right)
    return GAP


def raised(file: Path) -> set[str]:
    """What a module raises, warns of, or reports as a problem: templates of its messages."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            found.add(node.exc.args[0])
        elif isinstance(node, ast.Yield) and node.value is not None and file.stem == "doctor":
            found.add(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("warn", "error") and node.args:
            found.add(node.args[0])
    return {plain(template(message)) for message in found}


def texts(file: Path) -> set[str]:
    """All texts in a module: messages are put together from some of them."""
    nodes = ast.walk(ast.parse(file.read_text()))
    return {plain(template(node)) for node in nodes if isinstance(node, (ast.Constant, ast.JoinedStr, ast.BinOp))}


def plain(text: str) -> str:
    """A message as the page has it: without the marks of code, on one line."""
    return re.sub(r"\s+", " ", re.sub(r"…+", GAP, text.replace("`", ""))).strip()


def fits(listed: str, message: str) -> bool:
    """Whether a message, or a template of one, has all the words of what the page lists, in their order."""
    parts = [re.escape(part.strip()) for part in listed.split(GAP) if part.strip(" .:,")]
    return re.search(".{0,300}".join(parts), message, flags=re.DOTALL) is not None


def listed() -> list[str]:
    """The messages on the page."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == len(re.findall(r"^\| `", PAGE.read_text(), flags=re.MULTILINE)) > 60
    return rows


RAISING = sorted(file for folder in ("helpers", "course") for file in (ROOT / folder).rglob("*.py"))
OWN = {text for file in (*RAISING, *(ROOT / "tools").glob("*.py")) for text in texts(file)}


@functools.cache
def others() -> str:
    """What else a reader sees: chapters and their errors, and where JAX says what it found."""
    chapters = [json.loads(file.read_text()) for file in (ROOT / "notebooks").glob("*.ipynb")]
    prose = ["".join(cell["source"]) for chapter in chapters for cell in chapter["cells"]]
    jax_says = (Path(jax.__file__).parent / "_src" / "xla_bridge.py").read_text()
    # The parts of a text that stand on lines of their own belong together.
    return plain("\n".join([*prose, re.sub(r"\"\s*\n\s*f?\"", "", jax_says)]))


@functools.cache
def printed_by_chapters() -> str:
    """What chapters print, among it the errors that they catch."""
    chapters = [nbformat.read(file, as_version=4) for file in build_site.EXECUTED.glob("*.ipynb")]
    outputs = [output for chapter in chapters for cell in chapter.cells for output in cell.get("outputs", [])]
    return plain("\n".join(output.get("text", "") for output in outputs))


def is_written_somewhere(message: str) -> bool:
    """Whether a message stands in a text of the code, or in what `others` gives."""
    return any(fits(message, text) for text in OWN) or fits(message, others())


WRITTEN = {message: is_written_somewhere(message) for message in listed()}


def test_most_listed_messages_are_written_somewhere():
    assert sum(WRITTEN.values()) > 0.8 * len(WRITTEN)


@pytest.mark.parametrize("message", [message for message, written in WRITTEN.items() if not written])
def test_other_listed_messages_are_printed_by_a_chapter(message, site):
    assert fits(message, printed_by_chapters())


@pytest.mark.parametrize("file", RAISING, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_helper_or_a_command_raises_is_listed(file):
    rows = listed()
    for message in raised(file):
        if len(message.replace(GAP, "").strip(" .:")) < 5:
            continue  # it hands on what another one said
        assert any(fits(row, message) for row in rows), f"add to docs/troubleshooting.md: {message}"
