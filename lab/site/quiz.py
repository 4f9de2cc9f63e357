"""Make a quiz of the predictions: a form before each folded answer, and a page of progress.

A cell tagged ``predict`` may ask what can be checked, in its metadata::

    "quiz": [{"ask": "GB in bfloat16", "shown": "(.*) GB of 16"}]

``shown`` is a regular expression that finds the answer in the cell's output: a number, which may be
off by a twentieth, or a shape such as ``(8, 2, 77)``. So no answer is typed in. Where there are
``choices``, one of them is ``right``, and ``shown`` finds what proves it, in the output or in the
text of the picture; a test looks for that. To a cell that asks nothing the reader writes freely.

The texts are translated in ``docs/quiz``, whose script does the rest in the reader's browser.
"""

import re
from pathlib import Path

from lab.site.chapters import tags
from lab.site.parts import part_of_page, words_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quiz"


def predictions(notebook) -> list:
    """Return the cells of a chapter that answer a prediction."""
    return [cell for cell in notebook.cells if "predict" in tags(cell)]


def text_of_outputs(cell) -> str:
    """Return what a cell printed."""
    text = ""
    for output in cell.outputs:
        data = output.get("data", {})
        part = output.get("text") or data.get("text/markdown") or data.get("text/plain", "")
        text += part if part.endswith("\n") else f"{part}\n"
    return text


def find_shown(question: dict, text: str) -> re.Match:
    """Find what a question asks for in what its cell shows.

    Raises
    ------
    ValueError
        If it is not there.
    """
    match = re.search(question["shown"], text, flags=re.MULTILINE)
    if match is None:
        raise ValueError(
            f"The answer to {question['ask']!r} is not in the output: {question['shown']!r} finds "
            f"nothing in {text!r}. Correct `shown` in the cell's metadata."
        )
    return match


def form_of(cell, language: str) -> str:
    """Return the form in which a reader answers before the cell unfolds, as HTML."""
    questions = []
    for question in cell.metadata.get("quiz", []):
        if "choices" in question:
            answer = str(question["choices"].index(question["right"]))
        else:
            answer = find_shown(question, text_of_outputs(cell)).group(1)
        questions.append(question | {"answer": answer})
    return part_of_page(PAGE / "quiz.html", language, {"cell": cell.id, "questions": questions})


def progress(chapters: list[tuple[str, object]], language: str) -> str:
    """Return the table in which the script says what the reader has answered, as HTML.

    ``chapters`` has the name and the notebook of each.
    """
    rows = []
    for name, notebook in chapters:
        title = notebook.cells[0].source.splitlines()[0].removeprefix("# ")
        title = re.sub(r"`([^`]*)`", r"<code>\1</code>", title)
        if number := len(predictions(notebook)):
            rows.append((name, title, number))
    return part_of_page(PAGE / "progress.html", language, {"rows": rows}, pages="../")


def words_of_script(language: str) -> dict[str, str]:
    """Return the translations of what the script says, by the English texts; none for English."""
    script = (PAGE / "quiz.js").read_text()
    words = words_of(PAGE, language)
    return {english: word for english, word in words.items() if f't("{english}"' in script}
