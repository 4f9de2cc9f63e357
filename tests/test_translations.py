"""The Chinese edition: that it follows the English one cell by cell, keeps to its words, and can be executed."""

import json
import re
import shutil
from pathlib import Path

import nbformat
import pytest

from tools import translations
from tools.translations import LANGUAGE, main
from tools.workshop import tags

ROOT = translations.ROOT
CHINESE = sorted((ROOT / "notebooks" / LANGUAGE).glob("[0-9]*.ipynb"))
PAGES = [ROOT / f"README.{LANGUAGE}.md", *sorted((ROOT / "docs" / LANGUAGE).rglob("*.md"))]
HAN = "[\u4e00-\u9fff]"


def read(file: Path):
    return nbformat.read(file, as_version=4)


def english_of(chapter: Path) -> Path:
    return ROOT / "notebooks" / chapter.name


def each(files: list[Path]):
    return pytest.mark.parametrize("file", files, ids=lambda file: str(file.relative_to(ROOT)))


def test_there_is_nothing_to_do(capsys):
    assert main(["--check"]) == 0, capsys.readouterr().out
    assert {int(file.name[:2]) for file in CHINESE} >= set(translations.REQUIRED)


@each(CHINESE)
def test_code_is_the_english_chapters_and_prose_is_not(file):
    for cell, english in zip(read(file).cells, read(english_of(file)).cells, strict=True):
        assert (cell.id, cell.cell_type, tags(cell)) == (english.id, english.cell_type, tags(english))
        if int(file.name[:2]) in translations.REQUIRED or cell.cell_type == "code":
            assert cell.metadata["translation"]["source"] == translations.sha256(english.source)
        if cell.cell_type == "code":
            assert cell.source == english.source
            assert not cell.outputs
        for text in [cell.source] * (cell.cell_type == "markdown") + alt_of(cell):
            assert re.search(HAN, text), cell.id
        assert len(alt_of(cell)) == len(alt_of(english))


def alt_of(cell) -> list[str]:
    return [text for text in [cell.metadata.get("mystnb", {}).get("image", {}).get("alt")] if text]


# What happens when the English changes


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of chapter 3 and of a page, in both languages, with a function for each step of a change."""
    for name in ("notebooks/03_replicate_shard.ipynb", "docs/install.md"):
        room, file = name.split("/")
        for path in (name, f"{room}/{LANGUAGE}/{file}"):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    monkeypatch.setattr(translations, "REQUIRED", range(3, 4))
    return tmp_path


@pytest.fixture
def english(copy):
    return copy / "notebooks" / "03_replicate_shard.ipynb"


@pytest.fixture
def chinese(english):
    return translations.chinese_of(english)


def change(file: Path, number: int, kind: str, function) -> str:
    """Change the cell of a kind with this number in a notebook, and give its id."""
    notebook = read(file)
    cell = [cell for cell in notebook.cells if cell.cell_type == kind][number]
    function(cell)
    nbformat.write(notebook, file)
    return cell.id


def cell_of(file: Path, name: str):
    return next(cell for cell in read(file).cells if cell.id == name)


def said(capsys, *arguments: str) -> str:
    capsys.readouterr()
    main(list(arguments))
    return capsys.readouterr().out


def test_a_changed_sentence_is_marked_until_it_is_mended(english, chinese, capsys):
    name = change(english, 1, "markdown", lambda cell: cell.update(source=cell.source + " And more."))
    before = chinese.read_bytes()
    assert main(["--check"]) == 1
    assert chinese.read_bytes() == before, "--check writes nothing"
    assert f"{name} is stale" in said(capsys)
    text, old = cell_of(chinese, name).source, json.loads(before)
    assert text.startswith("> 英文原文在翻译之后有改动") and "(../03_replicate_shard.ipynb)" in text.splitlines()[0]
    (kept,) = ("".join(cell["source"]) for cell in old["cells"] if cell["id"] == name)
    assert text.endswith(f"\n\n{kept}")
    assert main(["--check"]) == 1, "it is in one of the first chapters"
    # The translator's part: mend the text, and delete the line.
    mended = kept + "还有。"
    change(chinese, 1, "markdown", lambda cell: cell.update(source=mended))
    assert said(capsys).count("\n") == 1, "one file is written anew"
    assert "nothing to do" in said(capsys)
    assert cell_of(chinese, name).source == mended
    assert "pending" not in cell_of(chinese, name).metadata["translation"]


def test_an_english_sentence_that_comes_back_needs_no_translator(english, chinese, capsys):
    before = english.read_bytes(), chinese.read_bytes()
    change(english, 1, "markdown", lambda cell: cell.update(source="Another."))
    main([])
    english.write_bytes(before[0])
    main([])
    assert chinese.read_bytes() == before[1]


def test_changed_code_is_taken_over(english, chinese, capsys):
    name = change(english, 2, "code", lambda cell: cell.update(source=cell.source + "\nprint(1)"))
    assert main(["--check"]) == 1
    main([])
    assert cell_of(chinese, name).source.endswith("\nprint(1)")
    assert main(["--check"]) == 0


def test_code_that_a_translator_changed_is_put_back(chinese, capsys):
    before = chinese.read_bytes()
    change(chinese, 2, "code", lambda cell: cell.update(source="print(1)"))
    assert main(["--check"]) == 1
    main([])
    assert chinese.read_bytes() == before


def test_a_changed_text_of_a_picture_is_marked(english, chinese, capsys):
    def change_alt(cell):
        cell.metadata["mystnb"]["image"]["alt"] += " And more."

    pictures = [cell for cell in read(english).cells if alt_of(cell)]
    number = [cell.id for cell in read(english).cells if cell.cell_type == "code"].index(pictures[0].id)
    name = change(english, number, "code", change_alt)
    assert f"the picture's text of {name} is stale" in said(capsys)
    assert alt_of(cell_of(chinese, name))[0].startswith(translations.ALT_MARKS["stale"])


def test_a_new_cell_is_shown_in_english_and_one_that_is_gone_is_dropped(english, chinese, capsys):
    notebook = read(english)
    gone = notebook.cells.pop(3)
    text = "A [page](../docs/teach.md) and [one](https://a.b)."
    notebook.cells.insert(5, nbformat.v4.new_markdown_cell(text, id="03-new"))
    nbformat.write(notebook, english)
    report = said(capsys)
    assert "03-new is missing" in report and f"{gone.id} is no longer" in report
    made = read(chinese)
    assert [cell.id for cell in made.cells] == [cell.id for cell in notebook.cells]
    assert made.cells[5].source.startswith("> 这里还没有翻译")
    assert "A [page](../../docs/teach.md) and [one](https://a.b)." in made.cells[5].source
    # The English changes before anybody has translated it.
    change(english, [c.id for c in notebook.cells if c.cell_type == "markdown"].index("03-new"), "markdown",
           lambda cell: cell.update(source="Other words."))  # fmt: skip
    main([])
    assert cell_of(chinese, "03-new").source.endswith("\n\nOther words.")


def test_a_cell_that_does_not_know_its_source_is_named(chinese, capsys):
    name = change(chinese, 1, "markdown", lambda cell: cell.metadata.pop("translation"))
    assert main(["--check"]) == 1
    assert f"{name} is stale" in capsys.readouterr().out


def test_a_page_is_marked_as_a_whole(copy, capsys):
    with (copy / "docs" / "install.md").open("a") as page:
        page.write("\nMore.\n")
    assert main(["--check"]) == 1
    assert f"docs/{LANGUAGE}/install.md: it is stale" in said(capsys)
    page = copy / "docs" / LANGUAGE / "install.md"
    lines = page.read_text().splitlines()
    assert lines[0].startswith("<!-- translation: ") and lines[2].startswith("> 英文原文在翻译之后有改动")
    assert "(../install.md)" in lines[2]
    assert main(["--check"]) == 0, "a page that says so may be behind"
    page.write_text("\n".join([*lines[:2], *lines[4:]]) + "\n")
    main([])
    assert "nothing to do" in said(capsys)


def test_a_chapter_can_be_started(copy, capsys):
    shutil.copy(ROOT / "notebooks" / "08_tpu_compiler.ipynb", copy / "notebooks")
    assert "nothing to do" in said(capsys)
    assert "08-00 is missing" in said(capsys, str(copy / "notebooks" / "08_tpu_compiler.ipynb"))
    assert main(["--check"]) == 0, "later chapters may be behind"
    assert (copy / "notebooks" / LANGUAGE / "08_tpu_compiler.ipynb").exists()


def test_a_file_that_is_no_notebook_any_more_is_named(chinese, capsys):
    chinese.write_text(chinese.read_text().replace('"cells": [', '"cells": [,', 1))
    assert main([]) == 1
    assert "is no notebook any more" in capsys.readouterr().err


# How it is written


def prose_of(file: Path) -> str:
    """What a reader reads in sentences: no code, headings, addresses and directives' options."""
    texts = [file.read_text()]
    if file.suffix == ".ipynb":
        texts = [cell.source for cell in read(file).cells if cell.cell_type == "markdown"]
    text = "\n\n".join(texts)
    text = re.sub(r"^(`{3,})(?!\{(?:glossary|note|tip|warning)).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(
        r"<!--.*?-->|\]\([^)]*\)|<[^>\u4e00-\u9fff]*>|^(?:#|:[a-z]+:|\([\w-]+\)=).*$", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"\{term\}`(.*?)(?: <.*?>)?`", r"\1", text)
    return re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)|\$[^$\n]+\$", "`", text)


def terms() -> dict[str, list[str]]:
    """The table of terms: the English words that each Chinese one stands for."""
    table = (ROOT / "docs" / LANGUAGE / "glossary.md").read_text().split("## 术语")[1]
    found = {}
    for english, chinese in re.findall(r"^\| (.+?) \| (.+?) \|$", table, flags=re.MULTILINE)[2:]:
        found.setdefault(chinese, []).append(re.sub(r" ?\(.*?\)", "", english))
    return found


NO_TERMS = ("编译器", "进程序")  # in which a term is only by chance


def test_there_are_about_sixty_terms():
    assert len(terms()) > 55
    assert terms()["设备"] == ["device"] and terms()["潜变量"] == ["latent"]


@each(CHINESE)
def test_a_term_has_its_english_word_where_it_is_used_first(file):
    text, known = prose_of(file), terms()
    words = sorted([*known, *NO_TERMS], key=len, reverse=True)  # the longest first
    first = {}
    for match in re.finditer("|".join(words), text):
        first.setdefault(match.group(), match)
    for word in first.keys() & known.keys():
        before, behind = text[: first[word].start()].rpartition("\n")[2], text[first[word].end() :][:60].lstrip("*”")
        in_brackets = any(behind.lower().startswith(f"（{english}") for english in known[word])
        rows = [rf"^\|.*\b{re.escape(english)}" for english in known[word]]  # of chapter 1's table of English words
        in_row = any(re.search(row, before.lower()) for row in rows)
        assert in_brackets or in_row, f"{before}{word}{behind}"


@each([*CHINESE, *PAGES])
def test_chinese_is_spaced_and_punctuated_by_one_rule(file):
    text = prose_of(file)
    wrong = [
        rf"{HAN}[A-Za-z0-9`]|[A-Za-z0-9`]{HAN}",  # a space between Chinese and Latin letters, digits, code
        rf"{HAN} {HAN}|{HAN}\n{HAN}",  # and none within Chinese, also at the end of a line
        rf"{HAN}[,.:;?!()]|[,:;?!()]{HAN}",  # punctuation of full width
        r" [，。：；？！（）、“]|[，。：；？！（）、”] (?=[^\s|])",  # and no space beside it
    ]
    found = [text[max(m.start() - 15, 0) : m.end() + 15] for pattern in wrong for m in re.finditer(pattern, text)]
    assert found == []


@each(CHINESE)
def test_its_links_lead_somewhere(file):
    targets = re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", "\n".join(cell.source for cell in read(file).cells))
    assert targets
    assert [target for target in targets if not (file.parent / target).resolve().exists()] == []
