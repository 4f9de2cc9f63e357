"""The Chinese edition: its code is the English one where it is current; where not, it says so."""

import re
import shutil

import nbformat
import pytest

from lab.site import browser_demo, build_site, quiz, translations
from lab.site.chapters import CHAPTERS
from lab.site.parts import words_of
from lab.site.translations import LANGUAGE, chinese_of, main

ROOT = translations.ROOT
CHINESE = translations.translated_files()
BANNER = translations.BANNER.partition("[")[0]


def read(file):
    return nbformat.read(file, as_version=4)


def test_there_is_nothing_to_do(capsys):
    assert main(["--check"]) == 0, capsys.readouterr()


@pytest.mark.parametrize("file", CHINESE, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_translation_is_current_or_says_that_it_is_behind(file):
    english = translations.english_of(file)
    noted, _ = translations.read(file)
    current = noted == translations.hashes_of(english)
    assert (BANNER in file.read_text()) != current
    if file.suffix == ".ipynb" and current:
        cells = [cell for cell in read(file).cells if not cell.id.endswith(translations.OWN)]
        for cell, original in zip(cells, read(english).cells, strict=True):
            assert cell.id == original.id
            assert cell.cell_type == "markdown" or cell.source == original.source


MOVING = [browser_demo.PAGE, build_site.FLOW, quiz.PAGE]


@pytest.mark.parametrize("folder", MOVING, ids=lambda folder: folder.name)
def test_every_text_of_what_moves_is_translated(folder):
    texts = set()
    for file in folder.glob("*.html"):
        texts |= set(re.findall(r'\b_\("([^"]+)"', file.read_text()))
    for file in folder.glob("*js"):
        texts |= set(re.findall(r'\bt\("([^"]+)"', file.read_text()))
    if folder == quiz.PAGE:
        for chapter in CHAPTERS:
            for cell in quiz.predictions(read(chapter)):
                for question in cell.metadata.get("quiz", []):
                    texts |= {question["ask"], *question.get("choices", [])}
    words = words_of(folder, LANGUAGE)
    assert set(words) == texts
    for english, chinese in words.items():
        assert sorted(re.findall(r"\{\d\}", english)) == sorted(re.findall(r"\{\d\}", chinese))


# What happens when the English changes


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of chapter 3 and of a page in both languages, in which both are current."""
    monkeypatch.setattr(translations, "ROOT", tmp_path)
    chapter = tmp_path / "notebooks" / "03_replicate_shard.ipynb"
    page = tmp_path / "docs" / "install.md"
    for file in (chapter, page):
        for path in (file, chinese_of(file)):
            path.parent.mkdir(parents=True, exist_ok=True)
    cells = [
        nbformat.v4.new_markdown_cell("# Chapter\n\nA [page](../docs/install.md).", id="a"),
        nbformat.v4.new_code_cell("x = 1", id="b", metadata={"tags": ["timing"]}),
        nbformat.v4.new_code_cell("draw()", id="c", metadata=picture("A heart")),
        nbformat.v4.new_markdown_cell("The end.", id="d"),
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), chapter)
    cells[0].source = "# 章\n\n一个[页面](../../docs/zh-CN/install.md)。"
    cells[2].metadata = picture("一颗心")
    cells[3].source = "完。"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), chinese_of(chapter))
    page.write_text("# Install\n\nType this.\n")
    chinese_of(page).write_text("# 安装\n\n输入这个。\n")
    assert main(["--done", str(chapter), str(page)]) == 0
    return tmp_path


def picture(alt):
    return {"mystnb": {"image": {"alt": alt}}}


@pytest.fixture
def english(copy):
    return copy / "notebooks" / "03_replicate_shard.ipynb"


@pytest.fixture
def chinese(english):
    return chinese_of(english)


def change(file, number, source):
    notebook = read(file)
    notebook.cells[number].source = source
    nbformat.write(notebook, file)


def sources(file):
    return [cell.source for cell in read(file).cells]


def test_changed_code_is_taken_over(english, chinese):
    change(english, 1, "x = 2")
    assert main(["--check"]) == 1
    assert main([]) == 0
    assert sources(chinese)[1] == "x = 2"
    assert main(["--check"]) == 0


def test_code_that_a_translator_changed_is_put_back(chinese):
    before = chinese.read_bytes()
    change(chinese, 1, "x = 3")
    main([])
    assert chinese.read_bytes() == before


def test_where_the_english_prose_has_changed_the_translation_stays_whole(english, chinese, capsys):
    before = sources(chinese)
    change(english, 3, "The very end.")
    change(english, 1, "x = 2")
    capsys.readouterr()
    assert main(["--check"]) == 1
    assert sources(chinese) == before, "--check writes nothing"
    assert main([]) == 0
    assert f"{LANGUAGE}/03_replicate_shard.ipynb is behind: d." in capsys.readouterr().out
    title, banner, *rest = sources(chinese)[0].split("\n\n")
    assert title == "# 章"
    assert banner.startswith(BANNER) and "(../03_replicate_shard.ipynb)" in banner
    assert [f"{title}\n\n{rest[0]}", *sources(chinese)[1:]] == before, "old code under old prose"
    assert main(["--check"]) == 0, "it may be behind, because it says so"


def test_an_english_sentence_that_comes_back_needs_no_translator(english, chinese):
    before = english.read_bytes(), chinese.read_bytes()
    change(english, 3, "The very end.")
    main([])
    english.write_bytes(before[0])
    main([])
    assert chinese.read_bytes() == before[1]


def test_a_changed_text_of_a_picture_counts_too(english, capsys):
    notebook = read(english)
    notebook.cells[2].metadata = picture("Two hearts")
    nbformat.write(notebook, english)
    main([])
    assert "is behind: c (picture)." in capsys.readouterr().out


def test_a_chapter_is_laid_out_anew_translated_and_noted_as_done(english, chinese, capsys):
    notebook = read(english)
    text = "See [this](../docs/install.md#a), [that](https://a.b)."
    notebook.cells[3] = nbformat.v4.new_markdown_cell(text, id="e")
    notebook.cells[1].source = "x = 2"
    nbformat.write(notebook, english)
    assert main(["--done", str(english)]) == 1
    assert "use --start first" in capsys.readouterr().err
    assert main(["--start", str(english)]) == 0
    first, code, _, last = sources(chinese)
    assert BANNER in first and code == "x = 2"
    assert last == "See [this](../../docs/install.md#a), [that](https://a.b)."
    assert main(["--done", str(english)]) == 1
    assert "there is no Chinese in e" in capsys.readouterr().err
    change(chinese, 3, "看这里。")
    assert main(["--done", str(english)]) == 0
    assert BANNER not in sources(chinese)[0]
    assert read(chinese).cells[1].metadata.tags == ["timing"]
    assert main(["--check"]) == 0


def test_a_chapter_can_be_started(copy, english, capsys):
    shutil.copy(english, copy / "notebooks" / "08_tpu_compiler.ipynb")
    main([])
    assert "Not translated: 08_tpu_compiler." in capsys.readouterr().out
    main(["--start", str(copy / "notebooks" / "08_tpu_compiler.ipynb")])
    started = chinese_of(copy / "notebooks" / "08_tpu_compiler.ipynb")
    assert "is behind: a, c (picture), d." in capsys.readouterr().out
    assert BANNER in sources(started)[0]


def test_a_cell_that_only_the_translation_has_is_named_and_not_lost(chinese, capsys):
    notebook = read(chinese)
    notebook.cells.append(nbformat.v4.new_markdown_cell("还有。", id="mine"))
    nbformat.write(notebook, chinese)
    assert main([]) == 1
    assert "the English has no cell mine" in capsys.readouterr().err
    assert sources(chinese)[-1] == "还有。"


def test_a_cell_of_its_own_stays_behind_the_cell_that_it_is_named_after(english, chinese, capsys):
    notebook = read(chinese)
    notebook.cells.insert(2, nbformat.v4.new_markdown_cell("为什么。", id="b-zh"))
    nbformat.write(notebook, chinese)
    assert main([]) == 0
    change(english, 1, "x = 2")
    assert main([]) == 0
    assert sources(chinese)[1:3] == ["x = 2", "为什么。"]
    notebook = read(english)
    notebook.cells.insert(1, notebook.cells.pop())
    nbformat.write(notebook, english)
    assert main(["--start", str(english)]) == main(["--done", str(english)]) == 0
    assert sources(chinese)[1:4] == ["完。", "x = 2", "为什么。"]
    notebook.cells.pop(2)
    nbformat.write(notebook, english)
    assert main([]) == 1
    assert "its own cells follow none of the English chapter: b" in capsys.readouterr().err
    assert "为什么。" in sources(chinese)


def test_wrong_forms_are_named_but_for_those_in_code_and_addresses(chinese, capsys):
    change(chinese, 3, "一张图像：`图片,`。\n\n```\n图片,\n```\n\n见[图像](图片.md)。")
    assert main([]) == main(["--check"]) == 0
    change(chinese, 3, "一张图片。")
    main([])
    assert main(["--check"]) == 1
    assert "“一张图片。” (图像" in capsys.readouterr().err


def test_a_page_is_behind_as_a_whole(copy):
    english = copy / "docs" / "install.md"
    english.write_text(english.read_text() + "More.\n")
    assert main([]) == 0
    page = chinese_of(english)
    assert f"# 安装\n\n{BANNER}[英文版](../install.md)" in page.read_text()
    page.write_text(page.read_text() + "还有。\n")
    assert main(["--done", str(english)]) == 0
    assert page.read_text().endswith("# 安装\n\n输入这个。\n还有。\n")


def test_what_is_wrong_with_a_file_is_said_with_its_name(english, chinese, capsys):
    chinese.write_text(chinese.read_text().replace('"cells": [', '"cells": [,', 1))
    assert main([]) == 1
    assert f"{LANGUAGE}/03_replicate_shard.ipynb: Notebook does not" in capsys.readouterr().err
    english.unlink()
    assert main([]) == 1
    assert "there is no notebooks/03_replicate_shard.ipynb any more" in capsys.readouterr().err
