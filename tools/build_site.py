"""Build the site: ``make docs``.

The pages are laid out in ``build/site/source`` as they lie in the repository, so that the links between them are the
same here and there: the pages of ``docs/``, the model cards, and the chapters as ``make run`` or the tests have
executed them already. Only chapters that nobody has executed, or that changed since, are executed now. A network is
needed the first time, for the page that draws.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import nbformat

from course.tpu import reports
from tools import draw
from tools.lock import PYTHONS, locked_versions, named_packages
from tools.run_chapters import CHAPTERS, EXECUTED

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
GIB = 2**30
FOLDED = {"setup", "solution"}
MOVABLE = "04_jit_pipeline"  # the chapter whose page shows recorded images with sliders


def find_stale(chapters: list[Path], executed: Path) -> list[Path]:
    """The chapters of which the folder has no executed copy that is newer than all that it follows from."""
    recorded = (ROOT / "benchmarks").rglob("*.json")  # which chapters 8 and 9 show
    rooms = ("helpers", "stable_diffusion", "course", "training")
    code = [file for room in rooms for file in (ROOT / room).rglob("*.py")]
    shared = [ROOT / "requirements.lock", *code, *recorded]
    return [chapter for chapter in chapters if not _is_fresh(executed / chapter.name, [chapter, *shared])]


def _is_fresh(copy: Path, sources: list[Path]) -> bool:
    if not draw.is_newer([copy], sources):
        return False
    cells = nbformat.read(copy, as_version=4).cells
    return all(cell.execution_count for cell in cells if cell.cell_type == "code")  # none where it stopped halfway


def lay_out(source: Path, executed: Path) -> None:
    """Write everything that Sphinx reads to a folder."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source / "docs")
    shutil.move(source / "docs" / "conf.py", source / "conf.py")
    for folder in ("_static", "_templates", "inventories"):
        shutil.move(source / "docs" / folder, source / folder)
    shutil.copy(ROOT / "CITATION.cff", source / "CITATION.cff")
    # Before the chapters: a link would bring along a single page, and its folder would be in the way.
    for card in (ROOT / "checkpoints").glob("*/README.md"):
        shutil.copytree(card.parent, source / card.parent.relative_to(ROOT), ignore=_all_but_page_and_pictures)
    (source / "notebooks").mkdir()
    for chapter in CHAPTERS:
        copy_chapter(executed / chapter.name, source / "notebooks" / chapter.name)
    pages = [path.relative_to(source) for path in source.rglob("*.md")]
    for page in pages:
        text = fill_in((source / page).read_text(), executed)
        (source / page).write_text(relink(text, page, source))
    # The landing page is the first that a server gives.
    front = (source / "docs" / "index.md").read_text()
    (source / "docs" / "index.md").unlink()
    (source / "index.md").write_text(relink(front, Path("docs/index.md"), source, moved_to=Path("index.md")))


def _all_but_page_and_pictures(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if Path(name).suffix not in (".md", ".png")}


def copy_chapter(executed: Path, target: Path) -> None:
    """Copy an executed chapter, without what the site shows elsewhere or not at all."""
    notebook = nbformat.read(executed, as_version=4)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times of day; the page on versions adds them up
        if cell.cell_type == "code":
            cell.outputs = [without_places(output) for output in cell.outputs]
            if what := FOLDED & set(cell.metadata.get("tags", [])):
                prompts = {
                    f"code_prompt_{does}": f"{does.capitalize()} the {what.copy().pop()}" for does in ("show", "hide")
                }
                cell.metadata["mystnb"] = cell.metadata.get("mystnb", {}) | prompts
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, Path("notebooks") / target.name, target.parents[1])
            if target.stem == MOVABLE and cell.source.startswith("## What you learned"):
                text = raw_html(draw.recorded_html("../"), "../")
                cell.source = f"## Steps and guidance with sliders\n\n{text}\n\n{cell.source}"
    notebook.metadata.pop("peak_memory", None)
    nbformat.write(notebook, target)


def without_places(output):
    """An output without what says on which machine, and in which process, it was made."""
    if "image/png" in output.get("data", {}):
        return output
    text = json.dumps(output)
    for place, name in ((f"{sys.prefix}/", ".venv/"), (f"{ROOT}/", "")):
        text = text.replace(place, name)
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", re.sub(r"ipykernel_\d+", "ipykernel", text))
    return nbformat.from_dict(json.loads(text))


def relink(text: str, page: Path, source: Path, moved_to: Path | None = None) -> str:
    """A page's text, with links that lead to the same pages on the site.

    The README's place there is taken by the landing page; other files of the repository that a page links to go along,
    to be downloaded.
    """

    def lead(match: re.Match) -> str:
        target, anchor = match.group(2), match.group(3) or ""
        path = Path(os.path.normpath(page.parent / target))
        if path in (Path("README.md"), Path("docs/index.md")):
            path = Path("index.md")
        elif not (source / path).exists():
            if not (ROOT / path).is_file():
                return match.group(0)  # Sphinx complains, and names the line
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / path)
        return f"{match.group(1)}({os.path.relpath(path, (moved_to or page).parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    # What stands between the marks of a code block is no link.
    parts[::2] = [re.sub(r"(\])\(([^)\s:#]+)(#[^)\s]*)?\)", lead, part) for part in parts[::2]]
    return "".join(parts)


def fill_in(text: str, executed: Path) -> str:
    """A page's text with what is generated in the place of its marks."""
    generated = {
        "chapters": chapters_table,
        "versions": versions_table,
        "times": lambda: times_table(executed),
        "draw": lambda: raw_html((draw.PAGE / "form.html").read_text().replace("RECORDED", draw.recorded_html("")), ""),
        "tpu-report": tpu_report,
    }
    return re.sub(r"<!-- generated: ([a-z-]+) -->", lambda mark: generated[mark.group(1)](), text)


def raw_html(text: str, root: str) -> str:
    """HTML for a page in Markdown, from which ``root`` leads to the site's first folder."""
    return f"```{{raw}} html\n{text.replace('ROOT/', root)}\n```"


def chapters_table() -> str:
    """The README's table of chapters."""
    text = (ROOT / "README.md").read_text()
    table = re.search(r"^## The chapters\n\n(\|.*?\n)\n", text, flags=re.DOTALL | re.MULTILINE).group(1)
    return table.replace("](notebooks/", "](../notebooks/")


def versions_table() -> str:
    """The locked versions of the packages that pyproject.toml names, for each supported Python."""
    locked = {python: locked_versions(python) for python in PYTHONS}
    rows = [
        f"| package | {' | '.join(f'Python {python}' for python in PYTHONS)} |",
        "| --- |" + " --- |" * len(PYTHONS),
    ]
    rows += [f"| {name} | {' | '.join(locked[python][name] for python in PYTHONS)} |" for name in named_packages()]
    return "\n".join(rows)


def times_table(executed: Path) -> str:
    """What the execution of the chapters took, marked so that two builds may differ in it."""
    rows = ["```{container} timing", "| chapter | Python | seconds | memory |", "| --- | --- | --- | --- |"]
    for chapter in CHAPTERS:
        notebook = nbformat.read(executed / chapter.name, as_version=4)
        seconds = sum(cell_seconds(cell) for cell in notebook.cells)
        memory = f"{notebook.metadata['peak_memory'] / GIB:.2f} GiB" if "peak_memory" in notebook.metadata else ""
        python = notebook.metadata["language_info"]["version"]
        rows.append(f"| [{chapter.stem}](../notebooks/{chapter.name}) | {python} | {seconds:.0f} | {memory} |")
    return "\n".join([*rows, "```"])


def cell_seconds(cell) -> float:
    """How long a cell ran, by what its kernel reported; 0 where it did not."""
    times = cell.metadata.get("execution", {})
    begin, end = times.get("iopub.execute_input"), times.get("shell.execute_reply")
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0


def tpu_report() -> str:
    """What the TPU compiler said, as a table, with the published times beside its bounds and estimates."""
    recorded = reports.recorded_reports()
    rows = ["| published | an image took | bound | estimate |", "| --- | ---: | ---: | ---: |"]
    for published, times in reports.published_times(recorded):
        figures = f"{published.seconds:.2f} s | {times.bound:.2f} s | {times.estimate:.2f} s"
        rows.append(f"| [{published.system}]({published.source}) | {figures} |")
    return "\n".join([reports.table_of(recorded), "", *rows])


def build(to: Path = SITE, executed: Path = EXECUTED) -> Path:
    """Build the site from executed chapters; returns the folder with the pages.

    Raises
    ------
    RuntimeError
        If Sphinx finds anything to complain about.
    """
    lay_out(to / "source", executed)
    downloads = to / "downloads" / "notebooks"
    downloads.mkdir(parents=True, exist_ok=True)
    for chapter in CHAPTERS:
        shutil.copy(chapter, downloads)
    for sentence in draw.make(to / "downloads" / "draw"):
        print(sentence)
    shutil.rmtree(to / "html", ignore_errors=True)
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--fresh-env", "--quiet", "-b", "html"]
    command += ["-d", str(to / "doctrees"), str(to / "source"), str(to / "html")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TUTORIAL_", "COLAB_", "KAGGLE_"))}
    environment |= {"COURSE_ROOT": str(ROOT), "PYTHONHASHSEED": "0"}
    if subprocess.run(command, env=environment).returncode:
        raise RuntimeError("Sphinx complains above: the site is built only where it has nothing to complain about.")
    return to / "html"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if stale := find_stale(CHAPTERS, EXECUTED):
        print(f"{len(stale)} of {len(CHAPTERS)} chapters have to be executed first.", flush=True)
        if subprocess.run([sys.executable, "-m", "tools.run_chapters", *stale], cwd=ROOT).returncode:
            print("A chapter failed, so there is no site.", file=sys.stderr)
            return 1
    try:
        pages = build()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"The site: {os.path.relpath(pages / 'index.html')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
