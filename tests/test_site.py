"""The site: what its pages have, that its links lead somewhere, and that two builds give the same."""

import os
import re
import shutil
import sys
import time
import zlib
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jinja2
import nbformat
import pytest
from bs4 import BeautifulSoup

import helpers
from course.tpu import reports
from tools import build_site, inventories, publish, translations
from tools.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    "index",
    "docs/install",
    "docs/chapters",
    "docs/troubleshooting",
    "docs/glossary",
    "docs/reference",
    "docs/teach",
]
PAGES += [
    "docs/tpu-report",
    "docs/ask-the-compiler",
    "docs/versions",
    "docs/original-guides",
    "docs/contribute",
    "docs/changelog",
    "docs/cite",
]
PAGES += ["docs/real-models", *(f"docs/platforms/{page.stem}" for page in (ROOT / "docs" / "platforms").glob("*.md"))]
PAGES += [f"checkpoints/{card.parent.name}/README" for card in (ROOT / "checkpoints").glob("*/README.md")]
CHAPTERS = build_site.CHAPTERS
CHINESE = [build_site.place_of(file.relative_to(ROOT)) for _, file in translations.pairs()]
PAGES += [f"{language}/{page.with_suffix('')}" for language, page in CHINESE if "workshop" not in page.parts]


def parse(page: Path) -> BeautifulSoup:
    return BeautifulSoup(page.read_text(), "html.parser")


@pytest.fixture(scope="module")
def parsed(site):
    """All pages, by their paths."""
    return {page: parse(page) for page in sorted(site.rglob("*.html")) if "_static" not in page.parts}


def test_it_has_its_pages(site):
    missing = [page for page in PAGES if not (site / f"{page}.html").exists()]
    assert missing == []
    assert len(CHAPTERS) >= 7


def test_every_public_helper_is_in_the_reference(site):
    described = {tag["id"] for tag in parse(site / "docs" / "reference.html").find_all("dt", id=True)}
    assert {f"helpers.{name}" for name in helpers.__all__} <= described, "add it to docs/reference.md"


def test_links_lead_somewhere(site, parsed):
    """Within the site; what is elsewhere is no business of a test that has no network."""
    ids = {page: {tag["id"] for tag in soup.find_all(id=True)} for page, soup in parsed.items()}
    checked, broken = 0, []
    for page, soup in parsed.items():
        found = [tag["href"] for tag in soup.find_all(["a", "link"], href=True)]
        found += [tag["src"] for tag in soup.find_all(["img", "script"], src=True)]
        for link in found:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            checked += 1
            there = target.is_file() and target.is_relative_to(site)
            if not there or (parts.fragment and target in ids and unquote(parts.fragment) not in ids[target]):
                broken.append((page.name, link))
    assert broken == []
    assert checked > 1000


def test_nothing_is_loaded_from_elsewhere(parsed):
    for page, soup in parsed.items():
        loaded = [tag.get("src") or tag.get("href") for tag in soup.find_all(["script", "img", "iframe"], src=True)]
        loaded += [tag["href"] for tag in soup.find_all("link", href=True, rel=["stylesheet", "preload", "icon"])]
        assert [link for link in loaded if urlsplit(link).netloc] == [], page


def test_every_picture_has_a_text_in_its_place(parsed):
    pictures = [(page.name, img) for page, soup in parsed.items() for img in soup.find_all("img")]
    assert len(pictures) > 15
    assert [name for name, img in pictures if len(img.get("alt", "").strip()) < 10] == []


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)
def test_a_chapter_has_its_outputs_its_neighbours_and_its_notebook(site, chapter):
    page = site / "notebooks" / f"{chapter.stem}.html"
    soup = parse(page)
    assert soup.select(".cell_output"), "outputs"
    assert soup.select_one("a.right-next") and soup.select_one("a.left-prev")
    number = CHAPTERS.index(chapter)
    if number + 1 < len(CHAPTERS):
        assert soup.select_one("a.right-next")["href"] == f"{CHAPTERS[number + 1].stem}.html"
    download = soup.select_one(".chapter-links a[download]")
    assert (page.parent / download["href"]).read_bytes() == chapter.read_bytes()
    folded = [cell for cell in soup.select(".tag_solution") if cell.find("details")]
    assert len(folded) == len([cell for cell in nbformat.read(chapter, 4).cells if "solution" in tags(cell)])
    assert "Show the solution" in folded[0].text


@pytest.mark.parametrize("chapter", [page.stem for _, page in CHINESE if page.suffix == ".ipynb"])
def test_a_chinese_chapter_shows_the_outputs_of_the_english_one(site, chapter):
    pages = [site / folder / "notebooks" / f"{chapter}.html" for folder in ("", LANGUAGE)]
    english, chinese = ([out.text for out in parse(page).select(".cell_output")] for page in pages)
    assert english == chinese
    soup = parse(pages[1])
    download = soup.select_one(".chapter-links a[download]")["href"]
    kept = (ROOT / "notebooks" / LANGUAGE / f"{chapter}.ipynb").read_bytes()
    assert (pages[1].parent / download).read_bytes() == kept
    assert "收起答案" in soup.select_one(".tag_solution").text


def test_every_page_leads_to_itself_in_the_other_language(site, parsed):
    for page, soup in parsed.items():
        chinese = page.is_relative_to(site / LANGUAGE)
        name = page.relative_to(site / (LANGUAGE if chinese else ""))
        own, other = (LANGUAGE, "en") if chinese else ("en", LANGUAGE)
        assert soup.html["lang"] == own, name
        there = site / ("" if chinese else LANGUAGE)
        same = (there / name).exists()
        switches = soup.select("header a.language-switch")  # one for narrow windows, one for wide ones
        assert switches, page
        for switch in switches:
            assert (page.parent / switch["href"]).resolve() == there / (name if same else "index.html"), page
            assert switch["hreflang"] == switch["lang"] == other
        alternates = {tag["hreflang"]: tag["href"] for tag in soup.find_all("link", rel="alternate")}
        assert {language: (page.parent / link).resolve() for language, link in alternates.items()} == (
            {own: page, other: there / name} if same else {}
        )


def test_a_table_that_a_chapter_prints_is_one_on_its_page(site):
    soup = parse(site / "notebooks" / "08_tpu_compiler.html")
    assert [table.th.text for table in soup.select(".cell_output table")] == ["pipeline"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


@pytest.mark.parametrize("repository", ["", "somebody/a-course"])
def test_a_chapter_has_its_launch_buttons_if_the_course_is_published(repository):
    name = CHAPTERS[0].name
    links = publish.launch_links(repository, name) if repository else []
    template = jinja2.Environment(autoescape=True).from_string(
        (ROOT / "docs/_templates/chapter-links.html").read_text()
    )
    words = {"elsewhere": "Elsewhere", "download": "Download .ipynb", "open in": "Open in"}
    html = template.render(chapter_file=name, chapter_launch=links, words=words, pathto=lambda path, _: path)
    buttons = {a.text: a["href"] for a in BeautifulSoup(html, "html.parser").find_all("a")}
    assert ["Download .ipynb", *(f"Open in {place}" for place, _ in links)] == list(buttons)
    assert all(buttons[f"Open in {place}"] == address for place, address in links)


def test_it_names_no_machine(site):
    for page in site.rglob("*.html"):
        text = page.read_text()
        for place in (str(ROOT), sys.prefix, str(Path.home()) + "/"):
            assert place not in text, f"{place} in {page}"


# Two builds


def without_times(html: str) -> str:
    """A page without what is marked as differing from run to run."""
    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.select(".tag_timing"):
        tag.decompose()
    return str(soup)


def shown_without_times(site: Path) -> set[str]:
    """The names of the files that pages refer to outside of what is marked so."""
    pages = [BeautifulSoup(without_times(page.read_text()), "html.parser") for page in site.rglob("*.html")]
    return {Path(unquote(tag["src"])).name for soup in pages for tag in soup.find_all("img", src=True)}


def test_two_builds_give_the_same(site, executed_again, without_network, tmp_path):
    """The second has the outputs of a chapter that was executed once more, and no network."""
    executed = shutil.copytree(build_site.EXECUTED, tmp_path / "chapters")
    chapter = nbformat.read(executed / "03_replicate_shard.ipynb", as_version=4)
    again = [cell for cell in executed_again if "speaker-note" not in tags(cell)]
    for first, second in zip(chapter.cells, again, strict=True):
        assert first.source == second.source
        if first.cell_type == "code":
            first.outputs = second.outputs
    nbformat.write(chapter, executed / "03_replicate_shard.ipynb")
    code = "import sys; from pathlib import Path; from tools.build_site import build; build(*map(Path, sys.argv[1:]))"
    without_network([sys.executable, "-c", code, str(tmp_path / "site"), str(executed)])
    again = tmp_path / "site" / "html"
    files = {path.relative_to(site) for path in site.rglob("*") if path.is_file()}
    files_again = {path.relative_to(again) for path in again.rglob("*") if path.is_file()}
    needed = shown_without_times(site)
    assert [str(f) for f in files ^ files_again if f.parent != Path("_images") or f.name in needed] == []
    for file in sorted(files & files_again):
        first, second = (folder / file for folder in (site, again))
        if file.suffix == ".html":
            assert without_times(first.read_text()) == without_times(second.read_text()), file
        else:
            assert first.read_bytes() == second.read_bytes(), file


# What the build does


def test_a_chapter_is_executed_only_where_its_copy_is_missing_old_or_in_part(tmp_path):
    chapter = CHAPTERS[0]
    stale = [chapter]
    assert build_site.find_stale([chapter], tmp_path) == stale
    notebook = nbformat.read(chapter, as_version=4)
    for number, cell in enumerate(cell for cell in notebook.cells if cell.cell_type == "code"):
        cell.execution_count = number + 1
    copy = tmp_path / chapter.name
    nbformat.write(notebook, copy)
    assert build_site.find_stale([chapter], tmp_path) == []
    os.utime(copy, (0, time.time() - 10**9))
    assert build_site.find_stale([chapter], tmp_path) == stale
    next(cell for cell in notebook.cells if cell.cell_type == "code").execution_count = None
    nbformat.write(notebook, copy)
    assert build_site.find_stale([chapter], tmp_path) == stale


def test_a_chapter_follows_from_what_is_recorded_too(monkeypatch, tmp_path):
    sources = []
    monkeypatch.setattr(build_site, "_is_fresh", lambda copy, of: sources.extend(of))
    build_site.find_stale(CHAPTERS[:1], tmp_path)
    assert {ROOT / "benchmarks" / "shardings.json", *(ROOT / "benchmarks" / "tpu").glob("*.json")} < set(sources)


def test_a_warning_stops_the_build(site, monkeypatch, tmp_path, capfd):
    def lay_out_a_page_with_a_link_that_leads_nowhere(source, *_):
        others = shutil.ignore_patterns("*.ipynb", "*.md", "checkpoints")
        shutil.copytree(build_site.SITE / source.name, source, ignore=others)
        (source / "index.md").write_text(f"# A page\n\n[nowhere](nowhere-{source.name}.md)\n")

    monkeypatch.setattr(build_site, "lay_out", lay_out_a_page_with_a_link_that_leads_nowhere)
    monkeypatch.setattr(build_site, "lay_out_translation", lay_out_a_page_with_a_link_that_leads_nowhere)
    with pytest.raises(RuntimeError, match="Sphinx complains"):
        build_site.build(tmp_path)
    said = capfd.readouterr().err
    assert "nowhere-source.md" in said and f"nowhere-source-{LANGUAGE}.md" in said


def test_links_follow_a_page_that_moves(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").touch()
    text = "[r](../README.md#start) [a](a.md) [web](https://a.b) [l](../LICENSE)\n```\n[code](../README.md)\n```\n"
    moved = build_site.relink(text, Path("docs/index.md"), tmp_path)
    expected = "[r](index.md#start) [a](docs/a.md) [web](https://a.b) [l](LICENSE)\n```\n[code](../README.md)\n```\n"
    assert moved == expected
    assert (tmp_path / "LICENSE").exists(), "a file that is no page goes along"


def test_links_lead_from_one_language_to_the_other(tmp_path):
    links = ["03_replicate_shard.ipynb", "../08_tpu_compiler.ipynb", "../../docs/zh-CN/install.md#x", "../../README.md"]
    text = " ".join(f"[a]({link})" for link in links)
    (tmp_path / "notebooks").mkdir()
    made = build_site.relink(text, Path("notebooks/zh-CN/01_tpu_detection.ipynb"), tmp_path)
    assert re.findall(r"\((.*?)\)", made.replace(build_site.PLACE, "/")) == [
        "03_replicate_shard.ipynb",
        "/notebooks/08_tpu_compiler.html",
        "/zh-CN/docs/install.html#x",
        "/index.html",
    ]
    made = build_site.relink("[a](zh-CN/glossary.md)", Path("docs/contribute.md"), tmp_path)
    assert made == f"[a]({build_site.PLACE}zh-CN/docs/glossary.html)"


def test_the_report_has_every_recorded_program_and_the_published_times():
    page = build_site.tpu_report()
    recorded = reports.recorded_reports()
    assert page.startswith(reports.table_of(recorded))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]
    for published, times in reports.published_times(recorded):
        figures = [f"{seconds:.2f} s" for seconds in (published.seconds, times.bound, times.estimate)]
        assert [f"[{published.system}]({published.source})", *figures] in rows


@pytest.mark.parametrize("project", ["flax", "jax", "numpy", "python"])
def test_inventories_are_what_the_tool_writes(project):
    kept = (inventories.FOLDER / f"{project}.inv").read_bytes()
    made = inventories.inventory(project)
    head = 4  # lines of text, then compressed ones
    lines = [zlib.decompress(data.split(b"\n", head)[head]).decode().splitlines() for data in (kept, made)]
    assert lines[0] == lines[1], "run tools/inventories.py"
    assert kept.split(b"\n")[:head] == made.split(b"\n")[:head]


def test_the_readmes_table_of_chapters_is_complete():
    table = build_site.chapters_table()
    assert all(chapter.name in table for chapter in CHAPTERS)
