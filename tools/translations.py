"""Keep the Chinese edition beside the English one: ``make translations``.

A notebook in ``notebooks/zh-CN`` is the one place of its translation. It is written anew here: code, order and metadata
from the English chapter, prose and texts in the place of pictures from what is translated. Each cell's metadata have
the SHA-256 of the English that it follows, ``source``, and ``alt`` for a picture's text; a page has it in a comment on
its first line. What the English has left behind gets a line in Chinese that says so (a mark), and the hash of the
English as it is now, ``pending``. Who mends the text deletes the mark, and the next run takes the one for the other.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

import nbformat

from tools.publish import stamped_repository

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE = "zh-CN"
REQUIRED = range(1, 8)  # chapters of which nothing may be stale or missing
MARKS = {
    "missing": "> 这里还没有翻译，下面是[英文原文]({link})。\n\n",
    "stale": "> 英文原文在翻译之后有改动，请对照[英文原文]({link})。\n\n",
}
ALT_MARKS = {"missing": "（还没有翻译）", "stale": "（英文原文在翻译之后有改动）"}


def chinese_of(english: Path) -> Path:
    """Where the translation of a chapter or page is kept."""
    room, *rest = english.relative_to(ROOT).parts
    return ROOT / room / LANGUAGE / Path(*rest) if rest else ROOT / f"{english.stem}.{LANGUAGE}.md"


def pairs() -> list[tuple[Path, Path]]:
    """The chapters and pages that are translated, and those that must be: English and Chinese."""
    chapters = [file for file in (ROOT / "notebooks").glob("[0-9]*.ipynb") if int(file.name[:2]) in REQUIRED]
    translated = [ROOT / f"README.{LANGUAGE}.md"]
    for room, ending in (("notebooks", "ipynb"), ("docs", "md")):
        translated += [
            file
            for file in (ROOT / room / LANGUAGE).rglob(f"*.{ending}")
            if "/." not in file.relative_to(ROOT).as_posix()
        ]
    names = [file.relative_to(ROOT).as_posix().replace(f"/{LANGUAGE}/", "/") for file in translated if file.exists()]
    english = [ROOT / name.replace(f".{LANGUAGE}.md", ".md") for name in names]
    return [(file, chinese_of(file)) for file in sorted({*chapters, *english})]


def sha256(text: str) -> str:
    """The hash of a text, the same wherever the course lives."""
    return hashlib.sha256(text.replace(stamped_repository(), "OWNER/COURSE").encode()).hexdigest()


def settle(text: str | None, known: dict, english: str, marks: dict[str, str], untranslated: str):
    """Bring one translation up to date.

    Parameters
    ----------
    text : str or None
        The translation as it is kept.
    known : dict
        The hashes that were kept with it.
    english, untranslated : str
        The English as it is now, and as it is shown in the place of a translation.
    marks : dict
        What a text begins with that is missing or stale.

    Returns
    -------
    tuple
        Text, hashes, and "missing", "stale" or "".
    """
    now, pending = sha256(english), known.get("pending")
    # By its first words: the link in it is a different one after a chapter was renamed.
    marked = next((state for state, mark in marks.items() if text and text.startswith(mark.partition("[")[0])), None)
    if marked:
        mark = marks[marked]
        text = text.partition("\n")[2].lstrip("\n") if mark.endswith("\n") else text.removeprefix(mark)
    source = pending if pending and not marked else known.get("source")
    if text is None or (marked == "missing" and not re.search(r"[\u4e00-\u9fff]", text)):
        text, state = untranslated, "missing"
    else:
        state = "missing" if marked == "missing" else "" if source == now else "stale"
    hashes = {"source": source} | ({"pending": now} if state else {})
    return marks.get(state, "") + text, {name: value for name, value in hashes.items() if value}, state


def marks_for(english: Path, chinese: Path) -> dict[str, str]:
    link = os.path.relpath(english, chinese.parent)
    return {state: mark.format(link=link) for state, mark in MARKS.items()}


def moved(text: str, english: Path, chinese: Path) -> str:
    """English text with links that lead to the same files from where the translation is kept."""

    def lead(match: re.Match) -> str:
        target = os.path.normpath(english.parent / match.group(1))
        return f"]({os.path.relpath(target, chinese.parent)}{match.group(2) or ''})"

    return re.sub(r"\]\(([^)\s:#]+)(#[^)\s]*)?\)", lead, text)


def rebuild_notebook(english: Path, chinese: Path) -> tuple[str, list[str]]:
    """The Chinese notebook as it must be, and a sentence for each cell that is missing or stale.

    Raises
    ------
    ValueError
        If the Chinese file is no notebook any more, or has cells of its own.
    """
    notebook, left, kept = nbformat.read(english, as_version=4), [], {}
    if chinese.exists():
        try:
            kept = {(cell.id, cell.cell_type): cell for cell in nbformat.read(chinese, as_version=4).cells}
        except Exception as error:  # nbformat has many
            raise ValueError(f"{chinese.relative_to(ROOT)} is no notebook any more: {error}") from None
    for cell in notebook.cells:
        old = kept.pop((cell.id, cell.cell_type), nbformat.v4.new_raw_cell())
        known, picture = old.metadata.get("translation", {}), cell.metadata.get("mystnb", {}).get("image", {})
        if cell.cell_type == "markdown":
            text, marks = old.source or None, marks_for(english, chinese)
            shown = moved(cell.source, english, chinese)
            cell.source, hashes, state = settle(text, known, cell.source, marks, shown)
            left += [f"{cell.id} is {state}"] if state else []
        else:
            hashes = {"source": sha256(cell.source)}
        if "alt" in picture:
            text = old.metadata.get("mystnb", {}).get("image", {}).get("alt")
            known = {"source": known.get("alt"), "pending": known.get("pending")}
            picture["alt"], known, state = settle(text, known, picture["alt"], ALT_MARKS, picture["alt"])
            hashes |= {"alt" if name == "source" else name: value for name, value in known.items()}
            left += [f"the picture's text of {cell.id} is {state}"] if state else []
        cell.metadata["translation"] = hashes
    if added := [name for (name, _), cell in kept.items() if "translation" not in cell.metadata]:
        raise ValueError(
            f"{chinese.relative_to(ROOT)} has cells that the English does not have: put {added} into others."
        )
    left += [f"{name} is no longer in the English chapter, and is dropped" for name, _ in kept]
    return nbformat.writes(notebook) + "\n", left


def rebuild_page(english: Path, chinese: Path) -> tuple[str, list[str]]:
    """The Chinese page as it must be, and a sentence if it is missing or stale."""
    text = chinese.read_text() if chinese.exists() else None
    head = re.match(r"<!-- translation: (\{.*?\}) -->\n+", text or "")
    known = json.loads(head.group(1)) if head else {}
    source = english.read_text()
    text = text and text[head.end() if head else 0 :]
    text, hashes, state = settle(text, known, source, marks_for(english, chinese), moved(source, english, chinese))
    return f"<!-- translation: {json.dumps(hashes)} -->\n\n{text}", [f"it is {state}"] if state else []


def rebuild(english: Path, chinese: Path) -> tuple[str, list[str]]:
    """What a translated file must hold, and what of it is missing or stale."""
    return (rebuild_notebook if english.suffix == ".ipynb" else rebuild_page)(english, chinese)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", nargs="*", type=Path, help="English chapters or pages of which to start a translation")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything had to be written")
    options = parser.parse_args(arguments)
    started = [(file.resolve(), chinese_of(file.resolve())) for file in options.start]
    problems, said = 0, False
    for english, chinese in sorted({*pairs(), *started}):
        name = chinese.relative_to(ROOT)
        if not english.exists():
            print(f"{name}: there is no {english.relative_to(ROOT)} any more, so delete it or rename it.")
            problems, said = problems + 1, True
            continue
        try:
            text, left = rebuild(english, chinese)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 1
        changed = not chinese.exists() or text != chinese.read_text()
        if changed and not options.check:
            chinese.parent.mkdir(parents=True, exist_ok=True)
            chinese.write_text(text)
        done = ["it has to be written anew: run `make translations`" if options.check else "written anew"] * changed
        for sentence in [*done, *left]:
            print(f"{name}: {sentence}.")
            said = True
        required = english.suffix == ".ipynb" and int(english.name[:2]) in REQUIRED
        problems += changed or (required and bool(left))
    if not said:
        print("The Chinese edition: nothing to do.")
    return int(options.check and problems > 0)


if __name__ == "__main__":
    sys.exit(main())
