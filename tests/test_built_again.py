"""A chapter that runs once more gives the same, and the site that is built from it, too."""

import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

from lab.site import build_site
from lab.site.chapters import tags

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def executed_again(sets, without_network):
    """The cells of the instructor's chapter 3, executed without a network."""
    chapter = sets["instructor"] / "notebooks" / "03_replicate_shard.ipynb"
    # Below the repository's root, where pytest finds its settings.
    folder = ROOT / "build" / "again"
    folder.mkdir(parents=True, exist_ok=True)
    copy = shutil.copy(chapter, folder)
    without_network([sys.executable, "-m", "pytest", "--nbmake", "--overwrite", copy])
    return nbformat.read(copy, as_version=4).cells


def test_an_instructors_notebook_runs_without_a_network(executed_again):
    """In full, from the unpacked set."""
    assert all(cell.execution_count for cell in executed_again if cell.cell_type == "code")
    assert [cell for cell in executed_again if "solution" in tags(cell) and cell.outputs]


def without_times(html: str) -> BeautifulSoup:
    """A page without what is marked as differing from run to run."""
    soup = BeautifulSoup(html, "html.parser")
    for tag in soup.select(".tag_timing"):
        tag.decompose()
    return soup


def test_two_builds_give_the_same(site, executed_again, without_network, tmp_path):
    """The second has the outputs of a chapter that was executed once more, no network, no book."""
    executed = shutil.copytree(build_site.EXECUTED, tmp_path / "chapters")
    chapter = nbformat.read(executed / "03_replicate_shard.ipynb", as_version=4)
    for first, second in zip(chapter.cells, executed_again, strict=True):
        assert first.source == second.source
        if first.cell_type == "code":
            first.outputs = second.outputs
    nbformat.write(chapter, executed / "03_replicate_shard.ipynb")
    code = "import sys; from pathlib import Path; from lab.site.build_site import build; "
    code += "build(*map(Path, sys.argv[1:]), has_book=False)"
    without_network([sys.executable, "-c", code, str(tmp_path / "site"), str(executed)])
    again = tmp_path / "site" / "html"

    timed = set()  # pictures that differ from run to run
    pages = {}
    for folder in (site, again):
        for file in folder.rglob("*.html"):
            soup = BeautifulSoup(file.read_text(), "html.parser")
            timed |= {Path(img["src"]).name for img in soup.select(".tag_timing img")}
            pages[file] = str(without_times(file.read_text()))
    files, files_again = (
        {
            file.relative_to(folder)
            for file in folder.rglob("*")
            if file.is_file() and file.name not in timed and file.suffix not in (".epub", ".pdf")
        }
        for folder in (site, again)
    )
    assert files == files_again
    for file in sorted(files):
        if file.suffix == ".html":
            assert pages[site / file] == pages[again / file], file
        else:
            assert (site / file).read_bytes() == (again / file).read_bytes(), file
