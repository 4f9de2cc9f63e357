"""The site: what its pages have, where its links lead, and that two builds give the same."""

import os
import re
import sys
import time
import unicodedata
import zipfile
import zlib
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit
from xml.etree import ElementTree

import jinja2
import nbformat
import pytest
from bs4 import BeautifulSoup
from docutils import nodes
from docutils.core import publish_doctree

import helpers
from course.tpu import records
from lab.site import build_site, heads, quiz, set_repo, translations
from lab.site.chapters import tags
from lab.site.printing import CHROMIUM
from lab.site.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = build_site.CHAPTERS
CHINESE_CHAPTERS = sorted((ROOT / "notebooks" / LANGUAGE).glob("[0-9]*.ipynb"))


def parse(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(), "html.parser")


def name_of(file: Path) -> str:
    return file.stem


@pytest.fixture(scope="module")
def parsed(site):
    """All pages by their paths, but for those on modules, which Sphinx writes by itself."""
    pages = []
    for page in sorted(site.rglob("*.html")):
        if not {"_static", "_modules", "py-modindex.html"} & set(page.parts):
            pages.append(page)
    return {page: parse(page) for page in pages}


def test_every_public_helper_is_in_the_reference(site):
    terms = parse(site / "docs" / "reference.html").find_all("dt", id=True)
    described = {term["id"] for term in terms}
    missing = {f"helpers.{name}" for name in helpers.__all__} - described
    assert not missing, "add them to docs/reference.md"


def test_links_within_the_site_lead_somewhere(site, parsed):
    """Sphinx looks at most of them, but not at those in HTML and from one language to the other."""
    ids = {page: {tag["id"] for tag in soup.find_all(id=True)} for page, soup in parsed.items()}
    broken = []
    for page, soup in parsed.items():
        links = [tag["href"] for tag in soup.find_all(["a", "link"], href=True)]
        links += [tag["src"] for tag in soup.find_all(["img", "script"], src=True)]
        for link in links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchor = unquote(parts.fragment)
            there = target.is_file() and target.is_relative_to(site)
            if there and anchor and target in ids:
                there = anchor in ids[target]
            if not there:
                broken.append((page.name, link))
    assert broken == []


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=name_of)
def test_links_of_pages_that_are_not_on_the_site_lead_somewhere(page):
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)\s#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_makefile_has_every_target_that_a_page_names():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        if LANGUAGE in str(page):
            continue  # it may be behind
        named = re.findall(r"(?:^|`)make ([a-z-]+)\b", page.read_text(), flags=re.MULTILINE)
        assert set(named) <= targets, page


def test_nothing_is_loaded_from_elsewhere(parsed):
    for page, soup in parsed.items():
        loaded = [tag["src"] for tag in soup.find_all(["script", "img", "iframe"], src=True)]
        sheets = soup.find_all("link", href=True, rel=["stylesheet", "preload", "icon"])
        loaded += [tag["href"] for tag in sheets]
        assert [link for link in loaded if urlsplit(link).netloc] == [], page


def test_every_column_has_a_name(parsed):
    for page, soup in parsed.items():
        for cell in soup.select("article thead th"):
            assert cell.get_text(strip=True), page


def test_every_picture_has_a_text_in_its_place(parsed):
    for page, soup in parsed.items():
        for picture in soup.find_all("img"):
            assert len(picture.get("alt", "").strip()) >= 10, page


def test_pictures_below_the_first_load_when_the_reader_comes_near(parsed):
    late = 0
    for page, soup in parsed.items():
        pictures = [
            img for img in soup.select("article img") if not img.find_parent(class_="recorded")
        ]
        assert [img["src"] for img in pictures[1:] if img.get("loading") != "lazy"] == [], page
        late += len(pictures[1:])
    assert late


def test_every_page_says_what_it_is_about(site, parsed):
    """A published one says as well where its picture is, which programs fetch from there."""
    repository = set_repo.stamped_repository()
    published = repository != set_repo.PLACEHOLDER
    descriptions = {}
    for page, soup in parsed.items():
        head = {}
        for tag in soup.find_all("meta", content=True):
            head[tag.get("name") or tag.get("property")] = tag["content"]
        assert 10 <= len(head["description"]) <= heads.LENGTH, page
        assert head["og:description"] == head["description"]
        assert head["og:title"], page
        descriptions[page] = head["description"]
        if published:
            address = set_repo.site_address(repository)
            assert head["og:url"] == f"{address}{page.relative_to(site).as_posix()}"
            assert (site / unquote(head["og:image"]).removeprefix(address)).is_file(), page
        else:
            assert "og:image" not in head
    chapters = [text for page, text in descriptions.items() if page.parent.name == "notebooks"]
    assert len(set(chapters)) == len(chapters)


@pytest.mark.parametrize(
    "chapter", [*CHAPTERS, *CHINESE_CHAPTERS], ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_chapter_has_one_title_everywhere(chapter):
    title = nbformat.read(chapter, as_version=4).cells[0].source.splitlines()[0].removeprefix("# ")
    readme = ROOT / (f"README.{LANGUAGE}.md" if chapter in CHINESE_CHAPTERS else "README.md")
    place = chapter.relative_to(ROOT).as_posix()
    (row,) = re.findall(rf"^\| \[(.*?)\]\({re.escape(place)}\)", readme.read_text(), re.MULTILINE)
    assert row == title


@pytest.mark.parametrize("chapter", CHAPTERS, ids=name_of)
def test_a_chapter_has_its_outputs_its_neighbours_and_its_notebook(site, chapter):
    page = site / "notebooks" / f"{chapter.stem}.html"
    soup = parse(page)
    assert soup.select(".cell_output"), "outputs"
    number = CHAPTERS.index(chapter)
    if number + 1 < len(CHAPTERS):
        following = soup.select_one("a.right-next")["href"]
        assert following == f"{CHAPTERS[number + 1].stem}.html"
    download = soup.select_one(".chapter-links a[download]")
    assert (page.parent / download["href"]).read_bytes() == chapter.read_bytes()
    cells = nbformat.read(chapter, as_version=4).cells
    folded = [cell for cell in soup.select(".tag_solution") if cell.find("details")]
    assert len(folded) == len([cell for cell in cells if "solution" in tags(cell)])
    assert all("Show the solution" in cell.text for cell in folded)


@pytest.mark.parametrize("folder", ["", LANGUAGE], ids=["English", "Chinese"])
def test_what_answers_a_prediction_is_folded_below_a_question(site, folder):
    for chapter in (ROOT / "notebooks" / folder).glob("[0-9]*.ipynb"):
        asked = quiz.predictions(nbformat.read(chapter, as_version=4))
        soup = parse(site / folder / "notebooks" / f"{chapter.stem}.html")
        forms = {form["data-cell"]: form for form in soup.select("form.quiz")}
        if soup.select_one("h1 + blockquote"):
            continue  # it is behind, and cells whose code has changed have no outputs
        assert list(forms) == [cell.id for cell in asked]
        for cell, form in zip(asked, forms.values(), strict=True):
            answer = form.find_next_sibling()
            assert "tag_predict" in answer["class"], cell.id
            assert [child.name for child in answer.find_all(recursive=False)] == ["details"]
            questions = form.select("[data-answer]")
            assert len(questions) == len(cell.metadata.get("quiz", [])), cell.id


def test_a_question_whose_answer_no_output_shows_stops_the_build():
    metadata = {"tags": ["predict"], "quiz": [{"ask": "MB", "shown": "(.*) MB"}]}
    output = nbformat.v4.new_output("stream", text="48 MB of 50")
    cell = nbformat.v4.new_code_cell("print(x)", metadata=metadata, outputs=[output])
    form = BeautifulSoup(quiz.form_of(cell, "en"), "html.parser")
    assert form.select_one("label")["data-answer"] == "48"
    output.text = "48 GB"
    with pytest.raises(ValueError, match="The answer to 'MB' is not in the output"):
        quiz.form_of(cell, "en")


@pytest.mark.parametrize("chapter", CHINESE_CHAPTERS, ids=name_of)
def test_a_chinese_chapter_has_outputs_and_says_if_it_is_behind(site, chapter):
    english, chinese = (site / folder / "notebooks" for folder in ("", LANGUAGE))
    soup = parse(chinese / f"{chapter.stem}.html")
    download = soup.select_one(".chapter-links a[download]")
    assert (chinese / download["href"]).read_bytes() == chapter.read_bytes()
    cells = nbformat.read(chapter, as_version=4).cells
    folded = [cell for cell in soup.select(".tag_solution") if cell.find("details")]
    solutions = [cell for cell in cells if "solution" in tags(cell)]
    assert len(folded) == len([cell for cell in solutions if cell.cell_type == "code"])
    _, changes = translations.renew(chapter)
    if changes:
        banner = soup.select_one("h1 + blockquote")
        target = (chinese / banner.a["href"]).resolve()
        assert target == english / f"{chapter.stem}.html"
    else:
        original = parse(english / f"{chapter.stem}.html")
        outputs = [output.text for output in soup.select(".cell_output")]
        assert outputs == [output.text for output in original.select(".cell_output")]


def test_every_page_leads_to_itself_in_the_other_language(site, parsed):
    repository = set_repo.stamped_repository()
    published = repository != set_repo.PLACEHOLDER
    for page, soup in parsed.items():
        if page.is_relative_to(site / LANGUAGE):
            own, other = LANGUAGE, "en"
            counterpart = site / page.relative_to(site / LANGUAGE)
            landing_page = site / "index.html"
        else:
            own, other = "en", LANGUAGE
            counterpart = site / LANGUAGE / page.relative_to(site)
            landing_page = site / LANGUAGE / "index.html"
        assert soup.html["lang"] == own, page
        alternates = {}
        for tag in soup.find_all("link", rel="alternate"):
            alternates[tag["hreflang"]] = tag["href"]
        expected = counterpart if counterpart.exists() else landing_page
        if published and counterpart.exists():  # whole addresses, as search engines want them
            address = set_repo.site_address(repository)
            places = {own: page, other: counterpart}
            places["x-default"] = places["en"]
            for language, place in places.items():
                places[language] = f"{address}{place.relative_to(site).as_posix()}"
            assert alternates == places
            canonical = soup.find("link", rel="canonical")
            assert canonical["href"] == places[own], page
        else:
            assert alternates == {}
        switches = soup.select("header a.language-switch")
        assert switches, page
        for switch in switches:  # one for narrow windows, one for wide ones
            assert (page.parent / switch["href"]).resolve() == expected, page
            assert switch["hreflang"] == switch["lang"] == other


@pytest.mark.parametrize("repository", ["", "somebody/a-course"])
def test_a_chapter_has_its_launch_buttons_if_the_course_is_published(repository):
    name = CHAPTERS[0].name
    links = set_repo.launch_links(repository, name) if repository else []
    template = jinja2.Environment(autoescape=True).from_string(
        (ROOT / "docs/_templates/chapter-links.html").read_text()
    )
    words = {"elsewhere": "Elsewhere", "download": "Download .ipynb", "open in": "Open in"}
    html = template.render(
        chapter_file=name, chapter_launch=links, words=words, pathto=lambda path, _: path
    )
    buttons = {a.text: a["href"] for a in BeautifulSoup(html, "html.parser").find_all("a")}
    assert ["Download .ipynb", *(f"Open in {place}" for place, _ in links)] == list(buttons)
    assert all(buttons[f"Open in {place}"] == address for place, address in links)


@pytest.mark.parametrize(("folder", "chapters"), [("", CHAPTERS), (LANGUAGE, CHINESE_CHAPTERS)])
def test_the_book_has_every_chapter_with_its_pictures(site, folder, chapters):
    """Readers of EPUB refuse pages that are no XML."""
    with zipfile.ZipFile(site / folder / f"{build_site.BOOK}.epub") as book:
        files = {name: book.read(name) for name in book.namelist()}
    pictures = set()
    for name, content in files.items():
        if not name.endswith((".xhtml", ".opf")):
            continue
        for tag in ElementTree.fromstring(content).iter():
            kind = tag.tag.rpartition("}")[2]
            assert kind not in ("form", "script"), name
            if kind == "img":
                pictures.add(urljoin(name, unquote(tag.attrib["src"])))
            address = tag.attrib.get("href", "")
            if kind == "a" and not urlsplit(address).scheme and urlsplit(address).path:
                assert urljoin(name, unquote(urlsplit(address).path)) in files, name
    assert pictures and pictures <= set(files)
    contents = ElementTree.fromstring(files["nav.xhtml"])
    linked = {urlsplit(tag.attrib["href"]).path for tag in contents.iter() if "href" in tag.attrib}
    assert {f"notebooks/{chapter.stem}.xhtml" for chapter in chapters} <= linked


@pytest.mark.skipif(CHROMIUM is None, reason="There is no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("folder", "chapters"), [("", CHAPTERS), (LANGUAGE, CHINESE_CHAPTERS)])
def test_the_printed_book_has_every_chapter_in_its_outline(site, folder, chapters):
    """Titles and addresses stand in a PDF as they are, and in streams what its fonts can write."""
    name = f"{build_site.BOOK}.pdf"
    page = parse(site / folder / "docs" / "chapters.html")
    assert page.select_one(f"a[href='../{name}']")
    pdf = (site / folder / name).read_bytes()
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 100
    outline = []
    for title in re.findall(rb"/Title\s*(<[0-9A-F]*>|\((?:\\.|[^\\)])*\))", pdf):
        if title.startswith(b"<"):
            outline.append(bytes.fromhex(title[1:-1].decode()).decode("utf-16"))
        else:
            outline.append(re.sub(rb"\\(.)", rb"\1", title[1:-1]).decode())
    assert outline[0] == parse(site / folder / "index.html").h1.text.removesuffix("#")
    # Where a title is broken into lines, Chromium loses a space, or says it twice.
    closed = ["".join(text.split()) for text in outline]
    for file in chapters:
        title = parse(site / folder / "notebooks" / f"{file.stem}.html").h1.text
        assert any("".join(title.removesuffix("#").split()) in text for text in closed), title
    assert b"file:" not in pdf
    if folder:
        written = ""
        for stream in re.findall(rb"stream\r?\n(.*?)endstream", pdf, re.DOTALL):
            try:
                text = zlib.decompress(stream)
            except zlib.error:
                continue
            if b"beginbfchar" in text or b"beginbfrange" in text:
                codes = re.findall(rb"<([0-9A-F]{4})>\s", text)
                written += "".join(chr(int(code, 16)) for code in codes)
        # Some signs are written as the radicals that look like them.
        assert set("章设备图像提示词练习答案") <= set(unicodedata.normalize("NFKC", written))


def test_it_names_no_machine(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for place in (str(ROOT), sys.prefix, f"{Path.home()}/"):
            assert place not in text, f"{place} in {page}"


PAGE = """
Title
=====

.. note:: Not this.

What the page is about. You will

- draw an image,
- load it
  again.

========  =====
in a row  no
========  =====
nothing   here
========  =====

.. container:: tag_timing

   A time, which differs.

   .. image:: ../_images/clock.png

.. image:: ../_images/logo.svg
.. image:: ../_images/drawn%20first.png
   :alt: A red heart
"""


def test_a_head_says_how_the_text_begins_and_has_the_first_picture_that_stays():
    doctree = publish_doctree(PAGE)
    for cell in doctree.findall(nodes.container):
        cell["classes"] = ["tag_timing"]  # as MyST-NB writes it; a page's own would have a hyphen
    about = ("Title", "The site", "All of it", LANGUAGE)
    head = heads.head_of(doctree, *about, "https://me.github.io/course/", "docs/page.html")
    assert head["description"] == "What the page is about. You will draw an image, load it again."
    assert head["og:url"] == "https://me.github.io/course/docs/page.html"
    assert head["og:image"] == "https://me.github.io/course/_images/drawn%20first.png"
    assert (head["og:image:alt"], head["og:locale"]) == ("A red heart", "zh_CN")
    made_up = heads.head_of(None, *about, "https://me.github.io/course/", "search.html")
    assert made_up["description"] == "All of it"
    assert made_up["og:image"] == "https://me.github.io/course/_static/samples.png"
    assert "og:image" not in heads.head_of(doctree, *about, "", "docs/page.html")
    html = heads.written({"description": 'a "b" & c', "og:type": "website"})
    first, second = BeautifulSoup(html, "html.parser").find_all("meta")
    assert (first["name"], first["content"]) == ("description", 'a "b" & c')
    assert second["property"] == "og:type"


@pytest.mark.parametrize("text", ["word " * 100, "没有空格的句子，" * 100, "x" * 1000])
def test_a_long_description_is_cut_where_a_reader_pauses(text):
    short = heads.shorten(text)
    assert heads.LENGTH - 10 < len(short) <= heads.LENGTH
    assert short.endswith(("word …", "没有空格的句子 …", "x …"))
    assert heads.shorten(short) == short


def test_the_sitemap_has_the_pages_that_people_wrote(tmp_path):
    names = ["index.html", "docs/a&b.html", "zh-CN/index.html", "404.html", "zh-CN/search.html"]
    for name in [*names, "_modules/code.html", "zh-CN/_static/page.html"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    address = set_repo.site_address("Me/course")
    found = BeautifulSoup(heads.sitemap(tmp_path, address), "html.parser").find_all("loc")
    expected = ["docs/a&b.html", "index.html", "zh-CN/index.html"]
    assert [tag.text for tag in found] == [
        f"https://me.github.io/course/{name}" for name in expected
    ]
    assert set_repo.site_address("Me/me.github.io") == "https://me.github.io/"


# What the build does


def test_a_chapter_runs_only_where_its_copy_is_missing_old_or_in_part(tmp_path):
    chapter = CHAPTERS[0]
    stale = [chapter]
    assert build_site.find_stale([chapter], tmp_path) == stale
    notebook = nbformat.read(chapter, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for number, cell in enumerate(code, start=1):
        cell.execution_count = number
    copy = tmp_path / chapter.name
    nbformat.write(notebook, copy)
    assert build_site.find_stale([chapter], tmp_path) == []
    os.utime(copy, (0, time.time() - 10**9))
    assert build_site.find_stale([chapter], tmp_path) == stale
    code[0].execution_count = None
    nbformat.write(notebook, copy)
    assert build_site.find_stale([chapter], tmp_path) == stale


def test_a_chapter_that_is_behind_has_outputs_where_its_code_was_executed(tmp_path):
    code = {"a": "x = 1", "b": "print(x)", "c": "print('gone')"}
    cells = [nbformat.v4.new_code_cell(source, id=name) for name, source in code.items()]
    chapter = tmp_path / "chapter.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), chapter)
    for cell in cells:  # what a kernel sends in two parts
        cell.outputs = [nbformat.v4.new_output("stream", text=text) for text in ("1\n", "2\n")]
    cells[1].source = "print(2 * x)"
    metadata = {"language_info": {"name": "python"}}
    executed = tmp_path / "executed.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells[:2], metadata=metadata), executed)
    made = build_site.with_outputs(chapter, executed)
    assert [cell.source for cell in made.cells] == list(code.values())
    assert [len(cell.outputs) for cell in made.cells] == [1, 0, 0]
    assert made.cells[0].outputs[0].text == "1\n2\n"


def test_a_warning_stops_the_build_and_links_to_files_lead_to_pages(tmp_path, capfd):
    """The pages lie in docs/ and in docs/zh-CN/ there, and so are the links written."""
    links = {
        "en": ["../README.md", "zh-CN/glossary.md", "glossary.md", "../LICENSE"],
        LANGUAGE: ["../../README.zh-CN.md", "../glossary.md", "glossary.md", "../../LICENSE"],
    }
    for language, names in links.items():
        docs = tmp_path / "source" / language / "docs"
        docs.mkdir(parents=True)
        docs.with_name("index.md").write_text("# Index\n\n```{toctree}\n:glob:\ndocs/*\n```\n")
        text = " ".join(f"[a]({name})" for name in names)
        (docs / "page.md").write_text(f"# Page\n\n{text}\n")
        (docs / "glossary.md").write_text(f"# Glossary\n\n[nowhere](nowhere-{language}.md)\n")
    with pytest.raises(RuntimeError, match="Sphinx complains"):
        build_site.run_sphinx(tmp_path)
    said = capfd.readouterr().err
    assert said.count("WARNING") == 2  # but of the links to pages there is nothing to complain
    assert "nowhere-en.md" in said and f"nowhere-{LANGUAGE}.md" in said
    expected = {
        tmp_path / "html": ["../index.html", "../zh-CN/docs/glossary.html", "glossary.html"],
        tmp_path / LANGUAGE / "html": [
            "../index.html",
            "../../docs/glossary.html",
            "glossary.html",
        ],
    }
    for folder, addresses in expected.items():
        page = parse(folder / "docs" / "page.html")
        *found, download = [tag["href"] for tag in page.select("article p a")]
        assert found == addresses
        assert re.fullmatch(r"../_downloads/\w+/LICENSE", download)


def test_the_report_has_every_recorded_program_and_the_published_times():
    page = build_site.tpu_report()
    answers = records.recorded_answers(attention=None)
    assert page.startswith(records.table_of(answers))
    for published, times in records.published_times():
        (row,) = (line for line in page.splitlines() if f"[{published.system}]" in line)
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        assert cells[0] == f"[{published.system}]({published.source})"
        seconds = [published.seconds, times.operations, times.transfers]
        assert cells[1:4] == [f"{each:.2f} s" for each in seconds]


def test_no_english_is_left_in_the_chinese_report():
    text = translations.translate_table("tpu-report", build_site.tpu_report())
    prose = re.sub(r"\]\(.*?\)|split_head_dim", "", text)
    names = {"float", "GFLOP", "Inference", "JAX", "jax", "libtpu", "MFU", "MiB", "MLPerf", "sd"}
    names |= {"bfloat", "False", "sdxl", "shapes", "TPU", "tpu", "True"}
    assert set(re.findall(r"[A-Za-z]{2,}", prose)) <= names


def test_no_english_is_left_in_the_chinese_tables_of_kernels():
    text = translations.translate_table("kernels", records.table_of_kernels())
    assert set(re.findall(r"[A-Za-z]{2,}", text)) == {"flash", "flux", "sdxl", "splash"}
    text = translations.translate_table("steps", records.table_of_steps())
    assert set(re.findall(r"[A-Za-z]{2,}", text)) == {"splash", "libtpu", "jax"}


def test_the_table_of_chapters_is_the_readmes_without_badges(monkeypatch, tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text(
        "| command | use |\n| --- | --- |\n| `make` | all |\n\n"
        "| chapter | on a CPU | try it |\n| --- | --- | --- |\n"
        "| [1. One](notebooks/01.ipynb) | 5 s | [![Colab](https://a.b/c.svg)](https://a.b) |\n"
    )
    monkeypatch.setitem(build_site.READMES, "en", readme)
    assert build_site.chapters_table("en").splitlines() == [
        "| chapter | on a CPU |",
        "| --- | --- |",
        "| [1. One](../notebooks/01.ipynb) | 5 s |",
    ]
