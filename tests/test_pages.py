"""The pages in Markdown: their links lead somewhere, and each platform's page says what it must."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / line
    for line in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
]
PLATFORMS = sorted((ROOT / "docs" / "platforms").glob("*.md"))


def each(pages: list[Path]):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


def links(text: str) -> list[str]:
    """The targets of a page's links and pictures."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\]\(([^)\s]+)\)", prose)


def anchors(text: str) -> set[str]:
    """The names by which a page's headings can be linked to, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    named = re.findall(r"^\(([\w-]+)\)=$", text, flags=re.MULTILINE)  # in Chinese pages, by the English name
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(named)


def test_links_are_found():
    assert links("[a](b.md#c), ![d](e.png)\n```\n[no](no.md)\n```\n") == ["b.md#c", "e.png"]
    assert anchors("# What you get\n## `pmap` by hand\n") == {"what-you-get", "pmap-by-hand"}
    assert len(PAGES) > 8


@each(PAGES)
def test_relative_links_lead_somewhere(page):
    for link in links(page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


@each([page for page in PLATFORMS if page.stem != "index"])
def test_a_platforms_page_has_its_parts_and_the_date_of_what_it_says(page):
    text = page.read_text()
    for part in ("What you get", "From nothing to chapter 1", "What differs", "What was tested"):
        assert f"\n## {part}\n" in text
    gives = text.split("\n## ")[1]
    assert re.search(r"Looked up on \d+ [A-Z][a-z]+ 20\d\d\.", gives)
    assert gives.count("](https://") >= 2, "a source for what it says"


def test_the_overview_and_the_readme_link_to_every_platform():
    names = {page.name for page in PLATFORMS} - {"index.md"}
    assert len(names) == 5
    assert names <= set(links((ROOT / "docs" / "platforms" / "index.md").read_text()))
    assert {f"docs/platforms/{name}" for name in names} <= set(links((ROOT / "README.md").read_text()))


def test_what_the_pages_tell_to_type_is_there():
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*)\b", page.read_text(), flags=re.MULTILINE):
            assert f"\n{target}:" in makefile, f"make {target} in {page}"
