"""Keep the Chinese edition beside the English one: ``make translations``.

Each Chinese notebook keeps in its metadata, and each Chinese page in a comment on its first line,
the SHA-256 of the English texts that it translates. As long as they fit, it is current: the code,
order and metadata of its cells are copied from the English chapter. When the English prose has
changed, it is behind: it stays as it was, its code included, and says so below its title.

``--start`` lays the Chinese notebook of a chapter out in the order of today's English one, with
English text where there is no Chinese yet. ``--done`` notes that a translation follows the English
as it is now; nothing here can judge that.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import nbformat

from tools.set_repo import stamped_repository

ROOT = Path(__file__).resolve().parents[1]
LANGUAGE = "zh-CN"
BANNER = "> **本页依据较早的英文版翻译，英文版此后已有改动。最新内容请看[英文版]({link})。**\n\n"
OLD_BANNER = re.compile(r"^> \*\*本页依据较早的英文版翻译.*\n\n?", flags=re.MULTILINE)
HEAD = re.compile(r"<!-- translation: (\{.*?\}) -->\n\n")  # of a page


def chinese_of(english: Path) -> Path:
    """Where the translation of a chapter or page of the repository is kept."""
    room, *rest = english.relative_to(ROOT).parts
    if rest:
        return ROOT / room / LANGUAGE / Path(*rest)
    return ROOT / f"{english.stem}.{LANGUAGE}.md"


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
    return language, english.relative_to(ROOT)


def translated_files() -> list[Path]:
    """The Chinese files of the repository."""
    return sorted(
        [
            *ROOT.glob(f"*.{LANGUAGE}.md"),
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
        if cell.cell_type == "markdown":
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
        hashes[name] = hashlib.sha256(text.replace(here, "OWNER/COURSE").encode()).hexdigest()
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


def compose(english: Path, chinese: Path, texts: dict[str, str]):
    """The English notebook with Chinese texts, and with its own where there are none."""
    notebook = nbformat.read(english, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = texts.get(cell.id, move_links(cell.source, english, chinese))
        if alt_of(cell):
            alt = texts.get(f"{cell.id} (picture)", alt_of(cell))
            cell.metadata["mystnb"]["image"]["alt"] = alt
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
        If it is no notebook any more, or has cells of its own.
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
        content = compose(english, chinese, texts)
    content.cells[0].source = set_banner(content.cells[0].source, link)
    return written(noted, content), changes


def start(chinese: Path) -> None:
    """Lay a Chinese notebook out in the order of the English one."""
    noted, texts = {}, {}
    if chinese.exists():
        noted, notebook = read(chinese)
        texts = texts_of(notebook)
    chinese.parent.mkdir(parents=True, exist_ok=True)
    chinese.write_text(written(noted, compose(english_of(chinese), chinese, texts)))


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


def update(chinese: Path, check: bool) -> None:
    """Write what a Chinese file must hold, and print whether it is behind.

    Raises
    ------
    ValueError
        If the English file is gone, or where nothing is to be written, if it had to be.
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    english = {"nargs": "+", "type": Path, "default": [], "metavar": "ENGLISH"}
    parser.add_argument("--start", help="chapters that are to be translated", **english)
    parser.add_argument("--done", help="chapters and pages that are translated", **english)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if anything had to be written"
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
