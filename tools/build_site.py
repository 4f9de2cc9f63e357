"""Build the site: ``make docs``.

The pages are laid out in ``build/site/source`` as they lie in the repository, so that the links between them are the
same here and there: the pages of ``docs/``, the model cards, and the chapters as ``make run`` or the tests have
executed them already. Only chapters that nobody has executed, or that changed since, are executed now. A network is
needed the first time, for the page that draws.

The Chinese pages are a second project, in ``build/site/source-zh-CN`` and ``build/site/html/zh-CN``. Its chapters have
the outputs of the English ones, cell by cell.
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
from tools import draw, translations
from tools.lock import PYTHONS, locked_versions, named_packages
from tools.run_chapters import CHAPTERS, EXECUTED
from tools.translations import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
GIB = 2**30
PLACE = "https://site.invalid/"  # stands for the site's first folder; conf.py puts in what leads there
SETTINGS = ("conf.py", "_static", "_templates", "inventories")  # what the pages of both languages have alike
FOLDED = {"setup", "solution"}
PROMPTS = {
    "en": {"show": "Show", "hide": "Hide", "setup": " the setup", "solution": " the solution"},
    LANGUAGE: {"show": "展开", "hide": "收起", "setup": "准备代码", "solution": "答案"},
}
SLIDERS = {"en": "Steps and guidance with sliders", LANGUAGE: "用滑块看步数和引导系数"}
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
    """Write everything that Sphinx reads of the English pages to a folder."""
    shutil.rmtree(source, ignore_errors=True)
    shutil.copytree(ROOT / "docs", source / "docs", ignore=shutil.ignore_patterns(LANGUAGE, *SETTINGS))
    copy_settings(source)
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
        # The landing page is the first that a server gives.
        (source / place_of(page)[1]).write_text(relink(text, page, source))
    (source / "docs" / "index.md").unlink()


def lay_out_translation(source: Path, english: Path, executed: Path) -> None:
    """Write everything that Sphinx reads of the Chinese pages to a folder; the English ones are laid out already."""
    shutil.rmtree(source, ignore_errors=True)
    copy_settings(source)
    shutil.copytree(english / "checkpoints", source / "checkpoints", ignore=shutil.ignore_patterns("*.md"))
    pages = [(page, *translations.rebuild(original, page)) for original, page in translations.pairs()]
    for page, text, _ in pages:  # all are there before links are followed
        target = source / place_of(page.relative_to(ROOT))[1]
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    for page, text, _ in pages:
        page = page.relative_to(ROOT)
        target = source / place_of(page)[1]
        if page.suffix == ".ipynb":
            copy_chapter(executed / page.name, target, nbformat.reads(text, as_version=4))
        elif page.parent.parts:  # the README has no place of its own
            target.write_text(relink(fill_in(text, executed, LANGUAGE), page, source))


def copy_settings(source: Path) -> None:
    """Copy what both languages have alike."""
    source.mkdir(exist_ok=True)
    for name in SETTINGS:
        copy = shutil.copytree if (ROOT / "docs" / name).is_dir() else shutil.copy
        copy(ROOT / "docs" / name, source / name)


def place_of(path: Path) -> tuple[str, Path]:
    """The language of a file of the repository, and where that language's pages have it."""
    language = LANGUAGE if LANGUAGE in str(path) else "en"
    path = Path(*(part for part in path.parts if part != LANGUAGE))
    front = path.parent in (Path(), Path("docs")) and path.name in ("README.md", f"README.{LANGUAGE}.md", "index.md")
    return language, Path("index.md") if front else path


def _all_but_page_and_pictures(folder: str, names: list[str]) -> set[str]:
    return {name for name in names if Path(name).suffix not in (".md", ".png")}


def copy_chapter(executed: Path, target: Path, translation=None) -> None:
    """Copy an executed chapter, without what the site shows elsewhere or not at all; or its translation, a notebook."""
    notebook, language = nbformat.read(executed, as_version=4), LANGUAGE if translation else "en"
    page = Path("notebooks", LANGUAGE if translation else "", executed.name)
    translated = {cell.id: cell for cell in translation.cells} if translation else {}
    for cell in notebook.cells:
        before_end = cell.source.startswith("## What you learned") and target.stem == MOVABLE
        if translation:
            cell.source, cell.metadata = translated[cell.id].source, translated[cell.id].metadata
        cell.metadata.pop("execution", None)  # times of day; the page on versions adds them up
        if cell.cell_type == "code":
            cell.outputs = [without_places(output) for output in cell.outputs]
            if what := FOLDED & set(cell.metadata.get("tags", [])):
                words = PROMPTS[language]
                prompts = {f"code_prompt_{does}": words[does] + words[what.copy().pop()] for does in ("show", "hide")}
                cell.metadata["mystnb"] = cell.metadata.get("mystnb", {}) | prompts
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, page, target.parents[1])
            if before_end:
                text = raw_html(draw.recorded_html(language), 1, language)
                cell.source = f"## {SLIDERS[language]}\n\n{text}\n\n{cell.source}"
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


def relink(text: str, page: Path, source: Path) -> str:
    """The text of a page of the repository, with links that lead to the same pages on the site.

    The README's place there is taken by the landing page; other files of the repository that a page links to go along,
    to be downloaded. What Sphinx cannot follow, because it is in the other language's project or a heading by its
    English name, becomes an address for conf.py to put in.
    """
    language, here = place_of(page)

    def lead(match: re.Match) -> str:
        anchor = match.group(3) or ""
        path = Path(os.path.normpath(page.parent / match.group(2)))
        there, target = place_of(path)
        shown = path.suffix in (".md", ".ipynb") and (ROOT / path).is_file() and path.parts[0] not in ("benchmarks",)
        if shown and (there != language or (anchor and language == LANGUAGE)):
            return f"]({PLACE}{there}/{target.with_suffix('.html')}{anchor})".replace(f"{PLACE}en/", PLACE)
        if target != Path("index.md") and not (source / target).exists():
            if not (ROOT / path).is_file():
                return match.group(0)  # Sphinx complains, and names the line
            (source / target).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, source / target)
        return f"]({os.path.relpath(target, here.parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.DOTALL | re.MULTILINE)
    # What stands between the marks of a code block is no link.
    parts[::2] = [re.sub(r"(\])\(([^)\s:#]+)(#[^)\s]*)?\)", lead, part) for part in parts[::2]]
    return "".join(parts)


def fill_in(text: str, executed: Path, language: str = "en") -> str:
    """A page's text with what is generated in the place of its marks."""
    generated = {
        "chapters": lambda: chapters_table(language),
        "versions": versions_table,
        "times": lambda: times_table(executed),
        "draw": lambda: raw_html(draw.form_html(language), 0, language),
        "tpu-report": tpu_report,
    }
    return re.sub(r"<!-- generated: ([a-z-]+) -->", lambda mark: generated[mark.group(1)](), text)


def raw_html(text: str, depth: int, language: str) -> str:
    """HTML for a page in Markdown, so many folders below the first of its language."""
    pages = "../" * depth
    text = text.replace("PAGES/", pages).replace("ROOT/", pages if language == "en" else f"../{pages}")
    return f"```{{raw}} html\n{text}\n```"


def chapters_table(language: str = "en") -> str:
    """The README's table of chapters, for a page in docs/."""
    text = (ROOT / ("README.md" if language == "en" else f"README.{language}.md")).read_text()
    tables = re.findall(r"^(?:\|.*\n)+", text, flags=re.MULTILINE)
    table = next(table for table in tables if table.count("](notebooks/") >= len(translations.REQUIRED))
    return table.replace("](notebooks/", "](../notebooks/" if language == "en" else "](../../notebooks/")


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
    sources = {"en": to / "source", LANGUAGE: to / f"source-{LANGUAGE}"}
    lay_out(sources["en"], executed)
    lay_out_translation(sources[LANGUAGE], sources["en"], executed)
    for chapter in (*CHAPTERS, *(ROOT / "notebooks" / LANGUAGE).glob("[0-9]*.ipynb")):
        language, page = place_of(chapter.relative_to(ROOT))
        copy = to / "downloads" / ("" if language == "en" else language) / page
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(chapter, copy)
    for sentence in draw.make(to / "downloads" / "draw"):
        print(sentence)
    # Beside its pages MyST-NB leaves a folder, so none of the two is built within the other.
    made = {"en": to / "html", LANGUAGE: to / LANGUAGE / "html"}
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TUTORIAL_", "COLAB_", "KAGGLE_"))}
    environment |= {"COURSE_ROOT": str(ROOT), "COURSE_PLACE": PLACE, "PYTHONHASHSEED": "0"}
    builds = []
    for language, source in sources.items():
        shutil.rmtree(made[language], ignore_errors=True)
        command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "--fresh-env", "--quiet", "-b", "html"]
        command += ["-d", str(to / f"doctrees-{language}"), str(source), str(made[language])]
        builds.append(subprocess.Popen(command, env=environment | {"COURSE_LANGUAGE": language}))
    statuses = [build.wait() for build in builds]
    if any(statuses):
        raise RuntimeError("Sphinx complains above: the site is built only where it has nothing to complain about.")
    shutil.copytree(made[LANGUAGE], made["en"] / LANGUAGE, dirs_exist_ok=True)
    return made["en"]


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
