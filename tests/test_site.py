"""The site: what its pages have, that its links lead somewhere, and that two builds give the same."""

import importlib
import json
import os
import re
import shutil
import subprocess
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
from helpers.tpu import reports
from tools import build_site, inventories, publish

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
PAGES += ["docs/tpu-report", "docs/versions", "docs/original-guides", "docs/contribute", "docs/changelog", "docs/cite"]
PAGES += ["docs/real-models", *(f"docs/platforms/{page.stem}" for page in (ROOT / "docs" / "platforms").glob("*.md"))]
PAGES += [f"checkpoints/{card.parent.name}/README" for card in (ROOT / "checkpoints").glob("*/README.md")]
CHAPTERS = build_site.CHAPTERS


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


def test_a_table_that_a_chapter_prints_is_one_on_its_page(site):
    soup = parse(site / "notebooks" / "08_tpu_compiler.html")
    assert [table.th.text for table in soup.select(".cell_output table")] == ["pipeline", "pipeline"]


def tags(cell) -> list[str]:
    return cell.metadata.get("tags", [])


@pytest.mark.parametrize("repository", ["", "somebody/a-course"])
def test_launch_buttons_follow_from_what_publish_wrote(repository):
    name = CHAPTERS[0].name
    links = publish.launch_links(repository, name)
    template = jinja2.Environment(autoescape=True).from_string(
        (ROOT / "docs/_templates/chapter-links.html").read_text()
    )
    html = template.render(chapter_file=name, chapter_launch=links, pathto=lambda path, _: path)
    buttons = {a.text: a["href"] for a in BeautifulSoup(html, "html.parser").find_all("a")}
    assert ["Download .ipynb", *(f"Open in {place}" for place, _ in links)] == list(buttons)
    assert len(links) == (3 if repository else 0)
    for place, address in links:
        assert buttons[f"Open in {place}"] == address
        assert f"[{place}]({address})" in publish.links(repository)
    stamped = publish.stamp_chapter(CHAPTERS[0].read_text(), repository)
    assert re.search(r'REPOSITORY = \\"(.*?)\\"', stamped).group(1) == repository


def test_publish_stamps_the_citation():
    text = (ROOT / "CITATION.cff").read_text()
    stamped = publish.stamp_citation(text, "somebody/a-course")
    assert 'repository-code: "https://github.com/somebody/a-course"\n' in stamped
    assert publish.stamp_citation(stamped, "") == publish.stamp_citation(text, "")
    assert ROOT / "CITATION.cff" in publish.places()


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


def test_two_builds_give_the_same(site, executed_offline, without_network, tmp_path):
    """The second has chapters that were executed once more, and no network."""
    executed = shutil.copytree(build_site.EXECUTED, tmp_path / "chapters")
    for chapter in executed_offline.glob("*.ipynb"):
        shutil.copy(chapter, executed)
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


def test_only_what_is_marked_may_differ():
    page = "<p>a</p><div class='cell tag_timing'><p>{}</p></div><p>{}</p>"
    assert without_times(page.format(1, 2)) == without_times(page.format(3, 2))
    assert without_times(page.format(1, 2)) != without_times(page.format(1, 3))


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


def test_a_warning_stops_the_build(site, tmp_path):
    """The page that this adds has a link that leads nowhere."""
    source = tmp_path / "source"
    shutil.copytree(ROOT / "build" / "site" / "source", source, ignore=shutil.ignore_patterns("*.ipynb", "checkpoints"))
    for page in source.rglob("*.md"):
        page.unlink()
    (source / "index.md").write_text("# A page\n\n[nowhere](nowhere.md)\n")
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(tmp_path / "html")]
    result = subprocess.run(command, env=os.environ | {"COURSE_ROOT": str(ROOT)}, capture_output=True, text=True)
    assert result.returncode == 1
    assert "nowhere.md" in result.stderr


def test_links_follow_a_page_that_moves(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").touch()
    text = "[r](../README.md#start) [a](a.md) [web](https://a.b) [l](../LICENSE)\n```\n[code](../README.md)\n```\n"
    moved = build_site.relink(text, Path("docs/index.md"), tmp_path, moved_to=Path("index.md"))
    expected = "[r](index.md#start) [a](docs/a.md) [web](https://a.b) [l](LICENSE)\n```\n[code](../README.md)\n```\n"
    assert moved == expected
    assert (tmp_path / "LICENSE").exists(), "a file that is no page goes along"


def test_the_report_says_that_there_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(reports, "_RECORDED", (tmp_path,))
    assert "holds none" in build_site.tpu_report()


def test_the_report_has_a_row_for_each_program_and_its_largest_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(reports, "_RECORDED", (tmp_path,))
    program = {"pipeline": "sdxl", "height": 1024, "width": 1024, "steps": 20, "dtype": "bfloat16", "batch": 1}
    hbm = {"parameters": 2 * 2**30, "temporaries": 2**20, "program": 3 * 2**19, "output": 0}
    report = {
        "program": program | {"chip": "v5e", "chips": 1, "split_head_dim": True},
        "parameter_bytes": {"text_encoder_2": 1},
        "hbm": hbm,
        "fits": True,
        "parts": [{"flops": 3e12, "runs": 20}, {"flops": 5e12, "runs": 1}],
        "least_seconds": 1.5,
        "least_seconds_per_picture": 1.5,
        "compile_seconds": 9.0,
        "largest_batch": None,
        "date": "2026-11-21",
        "versions": {"libtpu": "0.0.42.1", "jax": "0.10.2"},
    }
    tried = [{"batch": 1, "fits": True, "hbm": hbm}, {"batch": 2, "fits": True, "hbm": hbm}, {"batch": 3}]
    tried = [entry | {"compile_seconds": 8.0} for entry in tried]
    others = report["versions"] | {"jax": "0.11.0"}
    largest = {"largest": 2, "tried": tried, "versions": others, "date": "2026-11-22"}
    refused = {"fits": False, "hbm": None, "parts": [], "largest_batch": largest | {"largest": 0, "tried": []}}
    for number, other in enumerate([{}, {"largest_batch": largest}, refused]):
        program = report["program"] | {"chip": ("v5e", "v4", "v6e")[number], "split_head_dim": number != 2}
        (tmp_path / f"{number}.json").write_text(json.dumps(report | other | {"program": program}))
    page = build_site.tpu_report()
    lines = page.replace("\N{NO-BREAK SPACE}", " ").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    name, sizes = "sdxl, 1024 × 1024, 20 steps, bfloat16", ["2,048.0", "1.0", "1.5", "0.0"]
    assert rows[2:6] == [
        [name, "1 × v5e", "1", "yes", *sizes, "65,000", "1.5 s", "9 s"],
        [name, "1 × v4", "1", "yes", *sizes, "65,000", "1.5 s", "9 s"],
        [name, "1 × v4", "2, the largest", "yes", *sizes, "", "", "8 s"],
        [f"{name}, split_head_dim=False", "1 × v6e", "1", "no", "", "", "", "", "", "", "9 s"],
    ]
    assert rows[-2:] == [
        ["SDXL on each chip of a TPU v5e-4", "2.33 s", "1.50 s", "1.6"],
        ["SDXL on each chip of a TPU v4-8", "2.16 s", "1.50 s", "1.4"],
    ]
    answered = (
        "Answered by libtpu 0.0.42.1 with jax 0.10.2, libtpu 0.0.42.1 with jax 0.11.0, from 2026-11-21 to 2026-11-22."
    )
    assert answered in page


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


# What changed since the original guides: what the page says of their lines


def test_the_guides_assertion_never_fails():
    device_type = "cpu"
    with pytest.warns(SyntaxWarning, match="always true"):
        line = compile('assert ("TPU" in device_type, "Available device is not a TPU")', "guide", "exec")
    exec(line, {"device_type": device_type})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import jax.tools.colab_tpu", ImportError),
        ("from diffusers import make_image_grid", ImportError),
        ("from jax.experimental.compilation_cache import compilation_cache as cc; cc.initialize_cache", AttributeError),
    ],
)
def test_a_line_of_the_guides_fails(line, error):
    with pytest.raises(error):
        exec(line, {})


def test_lines_of_the_guides_that_still_work():
    jax = importlib.import_module("jax")
    assert jax.random.PRNGKey(0).shape == (2,)
    assert jax.tree_util.tree_map(lambda leaf: leaf + 1, {"a": 1}) == {"a": 2}
    from diffusers.utils import make_image_grid
    from huggingface_hub import notebook_login

    assert callable(make_image_grid) and callable(notebook_login)
