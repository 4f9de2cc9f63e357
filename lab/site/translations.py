"""Keep the Chinese edition beside the English one: ``make translations``.

Each Chinese notebook keeps in its metadata, and each Chinese page in a comment on its first line,
the SHA-256 of the English texts that it translates. As long as they fit, it is current: the code,
order and metadata of its cells are copied from the English chapter. When the English prose has
changed, it is behind: it stays as it was, its code included, and says so below its title.

``--start`` lays the Chinese notebook of a chapter out in the order of today's English one, with
English text where there is no Chinese yet. ``--done`` notes that a translation follows the English
as it is now; nothing here can judge that.

A Chinese notebook may have Markdown cells of its own, such as the explanation of a solution. Such a
cell stands behind the cell whose id it has with ``-zh`` at the end.

``--check`` also looks through the Chinese files that are current for the forms in
``chinese_forms.toml``, which are wrong in Chinese or are another word for the same thing.

Tables that are generated have their Chinese words from ``chinese_tables.toml``.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import tomllib
from functools import partial
from pathlib import Path

import nbformat

from lab.site.set_repo import PLACEHOLDER, replace_name, stamped_repository

ROOT = Path(__file__).resolve().parents[2]
LANGUAGE = "zh-CN"
BANNER = "> **本页依据较早的英文版翻译，英文版此后已有改动。最新内容请看[英文版]({link})。**\n\n"
OLD_BANNER = re.compile(r"^> \*\*本页依据较早的英文版翻译.*\n\n?", flags=re.MULTILINE)
FORMS = Path(__file__).with_name("chinese_forms.toml")
TABLES = Path(__file__).with_name("chinese_tables.toml")
OWN = "-zh"  # at the end of the id of a cell that only the Chinese notebook has
HEAD = re.compile(r"<!-- translation: (\{.*?\}) -->\n\n")  # of a page


def chinese_of(english: Path) -> Path:
    """Where the translation of a chapter or page of the repository is kept."""
    room, *rest = english.relative_to(ROOT).parts
    if not rest or english.stem == "README":  # which lies beside what it is about
        return english.with_name(f"{english.stem}.{LANGUAGE}.md")
    return ROOT / room / LANGUAGE / Path(*rest)


def english_of(chinese: Path) -> Path:
    """The chapter or page of the repository that a Chinese file translates."""
    path = chinese.relative_to(ROOT).as_posix()
    return ROOT / path.replace(f"/{LANGUAGE}/", "/").replace(f".{LANGUAGE}.md", ".md")


def place_of(file: Path) -> tuple[str, Path]:
    """The language of a file of the repository, and where the pages of that language have it."""
    english = english_of(file)
    language = "en" if english == file else LANGUAGE
    if english in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        return language, Path("index.md")  # the first page that a server gives
    if english == ROOT / "CONTRIBUTING.md":
        return language, Path("docs/contribute.md")  # which includes it
    return language, english.relative_to(ROOT)


def translated_files() -> list[Path]:
    """The Chinese files of the repository."""
    return sorted(
        [
            *ROOT.glob(f"*.{LANGUAGE}.md"),
            *(ROOT / "checkpoints").glob(f"*/*.{LANGUAGE}.md"),
            *(ROOT / "lab" / "records").glob(f"*/*.{LANGUAGE}.md"),
            *(ROOT / "docs" / LANGUAGE).rglob("*.md"),
            *(ROOT / "notebooks" / LANGUAGE).glob("[0-9]*.ipynb"),
        ]
    )


def alt_of(cell) -> str | None:
    """The text that stands in for a cell's picture."""
    return cell.metadata.get("mystnb", {}).get("image", {}).get("alt")


def texts_of(notebook) -> dict[str, str]:
    """What is translated of a notebook: Markdown cells by their ids, and pictures' texts."""
    texts = {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and not cell.id.endswith(OWN):
            texts[cell.id] = cell.source
        if alt_of(cell):
            texts[f"{cell.id} (picture)"] = alt_of(cell)
    return texts


def hashes_of(english: Path) -> dict[str, str]:
    """The hash of each text of an English file, the same wherever the course is published."""
    if english.suffix == ".md":
        texts = {"source": english.read_text()}
    else:
        texts = texts_of(nbformat.read(english, as_version=4))
    here = stamped_repository()
    hashes = {}
    for name, text in texts.items():
        unstamped, _ = replace_name(text, here, PLACEHOLDER)
        hashes[name] = hashlib.sha256(unstamped.encode()).hexdigest()
    return hashes


def read(chinese: Path):
    """The hashes that a Chinese file has noted, and its content: a page's text, or a notebook."""
    if chinese.suffix == ".md":
        text = chinese.read_text()
        head = HEAD.match(text)
        if head is None:
            return {}, text
        return json.loads(head.group(1)), text[head.end() :]
    notebook = nbformat.read(chinese, as_version=4)
    return notebook.metadata.get("translation", {}), notebook


def written(hashes: dict[str, str], content) -> str:
    """A Chinese file's text, which `read` reads."""
    if isinstance(content, str):
        return f"<!-- translation: {json.dumps(hashes)} -->\n\n{content}"
    content.metadata["translation"] = hashes
    return nbformat.writes(content) + "\n"


def all_texts_of(notebook) -> list[str]:
    """The texts of a Chinese notebook, those of its own cells among them."""
    own = [cell.source for cell in own_cells_of(notebook).values()]
    return [*texts_of(notebook).values(), *own]


def own_cells_of(notebook) -> dict:
    """The cells that only a Chinese notebook has, by the ids of the cells that they follow."""
    return {cell.id.removesuffix(OWN): cell for cell in notebook.cells if cell.id.endswith(OWN)}


def compose(english: Path, chinese: Path, translated=None):
    """The English notebook with the texts and the own cells of a Chinese one.

    Where there is no Chinese text, the English one stands.

    Raises
    ------
    ValueError
        If an own cell is code, or follows a cell that the English notebook does not have.
    """
    texts, own = {}, {}
    if translated is not None:
        texts, own = texts_of(translated), own_cells_of(translated)
    notebook = nbformat.read(english, as_version=4)
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = texts.get(cell.id, move_links(cell.source, english, chinese))
        if alt_of(cell):
            alt = texts.get(f"{cell.id} (picture)", alt_of(cell))
            cell.metadata["mystnb"]["image"]["alt"] = alt
        cells.append(cell)
        if cell.id in own:
            cells.append(own.pop(cell.id))
    if own:
        raise ValueError(f"its own cells follow none of the English chapter: {', '.join(own)}")
    for cell in cells:
        if cell.id.endswith(OWN) and cell.cell_type != "markdown":
            raise ValueError(f"{cell.id} is code, and the code is that of the English chapter")
    notebook.cells = cells
    return notebook


def move_links(text: str, english: Path, chinese: Path) -> str:
    """English text with links that lead to the same files from where the translation is kept."""

    def move(match: re.Match) -> str:
        target = os.path.normpath(english.parent / match.group(1))
        return f"]({os.path.relpath(target, chinese.parent)}"

    return re.sub(r"\]\((?![a-z]+:|#)([^)\s#]+)", move, text)


def set_banner(text: str, link: str | None) -> str:
    """A text that says below its title that it is behind; without a link, one that does not."""
    text = OLD_BANNER.sub("", text)
    if link is None:
        return text
    return re.sub(r"^(# .*\n+)", rf"\1{BANNER.format(link=link)}", text, count=1, flags=re.M)


def renew(chinese: Path) -> tuple[str, list[str]]:
    """What a Chinese file must hold, and the names of the English texts that it does not follow.

    Raises
    ------
    ValueError
        If it is no notebook any more, or has cells that are neither the English chapter's nor
        marked as its own.
    """
    english = english_of(chinese)
    now = hashes_of(english)
    noted, content = read(chinese)
    changes = [name for name in sorted({*now, *noted}) if now.get(name) != noted.get(name)]
    link = os.path.relpath(english, chinese.parent) if changes else None
    if isinstance(content, str):
        return written(noted, set_banner(content, link)), changes
    if not changes:
        texts = texts_of(content)
        if added := texts.keys() - noted.keys():
            raise ValueError(f"the English has no cell {', '.join(sorted(added))}: use another")
        content = compose(english, chinese, content)
    content.cells[0].source = set_banner(content.cells[0].source, link)
    return written(noted, content), changes


def start(chinese: Path) -> None:
    """Lay a Chinese notebook out in the order of the English one."""
    noted, notebook = {}, None
    if chinese.exists():
        noted, notebook = read(chinese)
    chinese.parent.mkdir(parents=True, exist_ok=True)
    chinese.write_text(written(noted, compose(english_of(chinese), chinese, notebook)))


def finish(chinese: Path) -> None:
    """Note that a Chinese file translates the English one as that is now.

    Raises
    ------
    ValueError
        If the Chinese notebook has other cells than the English one, or English text.
    """
    now = hashes_of(english_of(chinese))
    _, content = read(chinese)
    if not isinstance(content, str):
        texts = texts_of(content)
        if texts.keys() != now.keys():
            raise ValueError("its cells are not those of the English chapter: use --start first")
        left = [name for name, text in texts.items() if not re.search("[\u4e00-\u9fff]", text)]
        if left:
            raise ValueError(f"there is no Chinese in {', '.join(left)}")
    chinese.write_text(written(now, content))


def translate_table(name: str, text: str) -> str:
    """Generated English Markdown, with what `TABLES` has under this name in the place of English.

    Raises
    ------
    KeyError
        If `TABLES` has something that the text has not: then the English has changed.
    """
    for english, chinese in tomllib.loads(TABLES.read_text())[name].items():
        text, count = re.subn(english, chinese, text)
        if not count:
            raise KeyError(f"{TABLES.name} translates {english!r}, which {name} does not have.")
    return text


def prose_of(text: str) -> str:
    """Markdown without code, addresses and comments; a code span is left as one letter."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    block = re.compile(r"^```(\{?).*?^```$", flags=re.DOTALL | re.MULTILINE)
    text = block.sub(lambda match: match.group() if match.group(1) else "", text)
    text = re.sub(r"`[^`\n]+`", "`x`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
    return re.sub(r"</?[a-z][^>]*>", "", text)


def wrong_forms(text: str) -> list[str]:
    """The places of a Chinese text that have a form of `FORMS`, each with what to write instead."""
    prose = prose_of(text)
    found = []
    for wrong, instead in tomllib.loads(FORMS.read_text())["instead"].items():
        for match in re.finditer(wrong, prose):
            place = prose[max(0, match.start() - 10) : match.end() + 10].replace("\n", " ")
            found.append(f"“{place}” ({instead})")
    return found


def update(chinese: Path, check: bool) -> None:
    """Write what a Chinese file must hold, and print whether it is behind.

    Raises
    ------
    ValueError
        If the English file is gone, or where nothing is to be written, if it had to be, or if
        a translation that is current has wrong forms.
    """
    if not english_of(chinese).exists():
        raise ValueError(f"there is no {english_of(chinese).relative_to(ROOT)} any more")
    text, changes = renew(chinese)
    if changes:
        print(f"{chinese.relative_to(ROOT)} is behind: {', '.join(changes)}.")
    if text != chinese.read_text():
        if check:
            raise ValueError("it has to be written anew: run `make translations`")
        chinese.write_text(text)
        print(f"{chinese.relative_to(ROOT)} is written anew.")
    if check and not changes and chinese.name != "glossary.md":  # which lists other words, too
        _, content = read(chinese)
        texts = [content] if isinstance(content, str) else all_texts_of(content)
        if found := [form for text in texts for form in wrong_forms(text)]:
            raise ValueError("\n  ".join(["it has wrong forms:", *found]))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    english = {"nargs": "+", "type": Path, "default": [], "metavar": "ENGLISH"}
    parser.add_argument("--start", help="chapters that are to be translated", **english)
    parser.add_argument("--done", help="chapters and pages that are translated", **english)
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; fail if anything had to be written, or has a wrong form",
    )
    options = parser.parse_args(arguments)
    steps = [(start, chinese_of(file.resolve())) for file in options.start]
    steps += [(finish, chinese_of(file.resolve())) for file in options.done]
    files = {*translated_files(), *(chinese for _, chinese in steps)}
    steps += [(partial(update, check=options.check), chinese) for chinese in sorted(files)]
    failed = False
    for step, chinese in steps:
        try:
            step(chinese)
        except ValueError as error:
            print(f"{chinese.relative_to(ROOT)}: {error}.", file=sys.stderr)
            failed = True
    chapters = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    untranslated = [file.stem for file in chapters if not chinese_of(file).exists()]
    if untranslated:
        print(f"Not translated: {', '.join(untranslated)}.")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
