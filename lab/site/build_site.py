"""Build the site: ``make docs``.

The pages of ``docs/``, the model cards and the chapters are laid out in ``build/site/source/en`` as
they lie in the repository, and Sphinx reads them there (``docs/conf.py``). The chapters get the
outputs of their copies in ``build/notebooks``, which ``make run`` or the tests have executed; only
those that nobody has executed, or that changed since, are executed now. A network is needed the
first time, for the page that draws.

Sphinx then writes the same pages as a book, which the page on the chapters links to: as an EPUB,
and, where there is a Chromium, in one page that is printed as a PDF.

The Chinese pages are a second project, in ``build/site/source/zh-CN``. A cell of theirs has the
outputs of the English chapter's cell, as long as both have the same code.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

from course.tpu import records
from lab.site import browser_demo, heads, printing, quiz
from lab.site.chapters import CHAPTERS, EXECUTED, find_problem, tags
from lab.site.lock import PYTHONS, locked_versions, named_packages
from lab.site.parts import part_of_page
from lab.site.set_repo import PLACEHOLDER, site_address, stamped_repository
from lab.site.translations import LANGUAGE, place_of, translate_table

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "build" / "site"
NOTEBOOKS = {"en": ROOT / "notebooks", LANGUAGE: ROOT / "notebooks" / LANGUAGE}
KINDS_OF_FILES = ROOT / "docs" / "which-files.toml"
FLOW = ROOT / "docs" / "flow"  # the widgets of chapters 15 and 17
READMES = {"en": ROOT / "README.md", LANGUAGE: ROOT / f"README.{LANGUAGE}.md"}
# What stands on folded cells, by their tags, of which the last one counts.
SHOW = {"en": "Show {}", LANGUAGE: "展开{}"}
HIDE = {"en": "Hide {}", LANGUAGE: "收起{}"}
FOLDED = {
    "en": {
        "hide-input": "the code",
        "setup": "the setup",
        "predict": "the answer",
        "solution": "the solution",
    },
    LANGUAGE: {
        "hide-input": "代码",
        "setup": "准备代码",
        "predict": "结果",
        "solution": "答案",
    },
}
BOOK = "stable-diffusion-in-jax"  # by the pages of each language; docs/conf.py calls it so
BOOK_LINK = {
    "en": ("To read without a network, take the whole course as a book: {}.", " or "),
    LANGUAGE: ("想离线阅读，可以把整套课程下载成一本电子书：{}。", " 或 "),
}


class Widget(NamedTuple):
    """What the reader of a chapter moves on its page, and where it stands there."""

    behind: str  # the id of a cell
    title: dict[str, str]
    template: Path


# Of each chapter.
WIDGETS = {
    "04_jit_pipeline": [
        Widget(
            "04-guidance-text",
            {"en": "Steps and guidance with sliders", LANGUAGE: "用滑块看步数和引导系数"},
            browser_demo.PAGE / "recorded.html",
        )
    ],
    "15_from_noise": [
        Widget(
            "15-euler-text",
            {"en": "Time, steps and shift with sliders", LANGUAGE: "用滑块看时间、步数和 shift"},
            FLOW / "line.html",
        ),
        Widget(
            "15-mlp-loss-text",
            {"en": "In two dimensions, on your points", LANGUAGE: "二维：学你自己画的点"},
            FLOW / "plane.html",
        ),
    ],
    "17_few_steps": [
        Widget(
            "17-reflow",
            {
                "en": "Pairs by chance and by path, with sliders",
                LANGUAGE: "用滑块比较随机配对和按路径配对",
            },
            FLOW / "straight.html",
        )
    ],
}


def find_stale(chapters: list[Path], executed: Path) -> list[Path]:
    """The chapters without a full executed copy that is newer than all that it follows from."""
    shared = [ROOT / "requirements.lock"]
    shared += (ROOT / "lab" / "records").rglob("*.json")  # which chapters 8 and 9 show
    for room in ("helpers", "course"):
        shared += (ROOT / room).rglob("*.py")
    stale = []
    for chapter in chapters:
        copy = executed / chapter.name
        newer = browser_demo.is_newer([copy], [chapter, *shared])
        if not newer or find_problem(nbformat.read(copy, as_version=4)):
            stale.append(chapter)
    return stale


def lay_out(language: str, source: Path, executed: Path) -> None:
    """Write everything that Sphinx reads of the pages in one language to a folder."""
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    for name in ("CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"):  # which pages include
        shutil.copy(ROOT / name, source)
    # A Chinese page includes it from two folders further up, as in the repository.
    shutil.copy(ROOT / f"CONTRIBUTING.{LANGUAGE}.md", source.parent)
    for room in ("docs", "checkpoints"):
        for file in (ROOT / room).rglob("*"):
            of_language, place = place_of(file)
            target = source / place
            if file.suffix == ".md" and of_language == language:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(fill_in(file.read_text(), language, executed))
            elif file.suffix in (".png", ".webp", ".gif", ".svg"):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, target)
    (source / "notebooks").mkdir()
    for chapter in NOTEBOOKS[language].glob("[0-9]*.ipynb"):
        notebook = with_outputs(chapter, executed / chapter.name)
        label_folded_cells(notebook, language)
        ask_before_answers(notebook, language)
        for widget in WIDGETS.get(chapter.stem, []):
            place = [cell.id for cell in notebook.cells].index(widget.behind)
            part = part_for(widget.template, language, depth=1)
            text = f"### {widget.title[language]}\n\n{part}"
            cell = nbformat.v4.new_markdown_cell(text, id=f"{widget.behind}-widget")
            notebook.cells.insert(place + 1, cell)
        nbformat.write(notebook, source / "notebooks" / chapter.name)


def with_outputs(chapter: Path, executed: Path):
    """A chapter, with the outputs that its cells had in an executed copy of the English one."""
    ran, _ = CoalesceStreamsPreprocessor().preprocess(nbformat.read(executed, as_version=4), {})
    outputs = {}
    for cell in ran.cells:
        if cell.cell_type == "code":
            outputs[cell.id, cell.source] = [without_places(output) for output in cell.outputs]
    notebook = nbformat.read(chapter, as_version=4)
    notebook.metadata["language_info"] = ran.metadata["language_info"]
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = outputs.get((cell.id, cell.source), [])
    return notebook


def without_places(output):
    """An output without what says on which machine, and in which process, it was made."""
    if "image/png" in output.get("data", {}):
        return output
    text = json.dumps(output)
    text = text.replace(f"{sys.prefix}/", ".venv/").replace(f"{ROOT}/", "")
    text = re.sub(r"ipykernel_\d+", "ipykernel", text)
    text = re.sub(r" at 0x[0-9a-f]{6,}", "", text)
    return nbformat.from_dict(json.loads(text))


def label_folded_cells(notebook, language: str) -> None:
    """Let each folded cell say what is in it, and fold the answers to predictions."""
    for cell in quiz.predictions(notebook):
        cell.metadata.tags.append("hide-cell")
    for cell in notebook.cells:
        for tag, name in FOLDED[language].items():
            if tag in tags(cell):
                cell.metadata.setdefault("mystnb", {}).update(
                    code_prompt_show=SHOW[language].format(name),
                    code_prompt_hide=HIDE[language].format(name),
                )


def ask_before_answers(notebook, language: str) -> None:
    """Put a form before each cell that answers a prediction, if it has been executed."""
    for cell in quiz.predictions(notebook):
        if cell.outputs:
            text = raw_html(quiz.form_of(cell, language))
            form = nbformat.v4.new_markdown_cell(text, id=f"{cell.id}-quiz")
            notebook.cells.insert(notebook.cells.index(cell), form)


def fill_in(text: str, language: str, executed: Path) -> str:
    """A page's text with what is generated in the place of its marks."""

    def in_language(name: str, text: str) -> str:
        return text if language == "en" else translate_table(name, text)

    generated = {
        "chapters": lambda: chapters_table(language),
        "versions": lambda: in_language("versions", versions_table()),
        "times": lambda: in_language("times", times_table(executed)),
        "files": lambda: files_tables(language),
        "draw": lambda: part_for(browser_demo.PAGE / "form.html", language, depth=0),
        "progress": lambda: progress_table(language),
        "book": lambda: book_link(language),
        "tpu-report": lambda: in_language("tpu-report", tpu_report()),
        "kernels": lambda: in_language("kernels", records.table_of_kernels()),
        "steps": lambda: in_language("steps", records.table_of_steps()),
        "options": lambda: in_language("options", records.table_of_options()),
    }
    return re.sub(r"<!-- generated: ([a-z-]+) -->", lambda mark: generated[mark.group(1)](), text)


def files_tables(language: str) -> str:
    """The kinds of files that can be used, and those that cannot: a table for each group."""
    texts = {}
    if language != "en":
        texts = tomllib.loads((ROOT / "docs" / language / "which-files.toml").read_text())

    def translate(text: str) -> str:
        if language == "en":
            return text
        if text not in texts:
            raise KeyError(f"docs/{language}/which-files.toml has no translation of {text!r}.")
        return texts[text]

    lines = []
    for group in tomllib.loads(KINDS_OF_FILES.read_text())["groups"]:
        columns = " | ".join(translate(title) for title in ("file", "here", "how"))
        lines += [f"## {translate(group['title'])}", "", f"| {columns} |", "| --- | --- | --- |"]
        for kind in group["kinds"].values():
            here = translate("reads")
            if "refused" in kind:
                here = translate("refused: “… {} …”").format(kind["refused"])
            lines.append(f"| {translate(kind['file'])} | {here} | {translate(kind['how'])} |")
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def raw_html(html: str) -> str:
    """HTML for a page in Markdown."""
    return f"```{{raw}} html\n{html}\n```"


def part_for(template: Path, language: str, depth: int) -> str:
    """What moves, by its template, for a page so many folders below the first of its language."""
    pages = "../" * depth
    root = pages if language == "en" else f"../{pages}"
    return raw_html(part_of_page(template, language, browser_demo.VALUES, pages, root))


def progress_table(language: str) -> str:
    """The chapters with how many predictions each has, for a page in docs/."""
    chapters = []
    for file in sorted(NOTEBOOKS[language].glob("[0-9]*.ipynb")):
        chapters.append((file.stem, nbformat.read(file, as_version=4)))
    return raw_html(quiz.progress(chapters, language))


def book_link(language: str) -> str:
    """A sentence with a link to the book, for a page in docs/."""
    sentence, between = BOOK_LINK[language]
    kinds = ["epub", "pdf"] if printing.CHROMIUM else ["epub"]
    links = [f'<a href="../{BOOK}.{kind}" download>{kind.upper()}</a>' for kind in kinds]
    return raw_html(f"<p>{sentence.format(between.join(links))}</p>")


def chapters_table(language: str) -> str:
    """The README's table of chapters, for a page in docs/; without badges."""
    text = READMES[language].read_text()
    tables = re.findall(r"^(?:\|.*\n)+", text, flags=re.MULTILINE)
    table = max(tables, key=lambda table: table.count("](notebooks/"))
    up = "../" if language == "en" else "../../"
    table = re.sub(r"\]\((?![a-z]+:)", f"]({up}", table)
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    columns = [number for number, cell in enumerate(rows[-1]) if "![" not in cell]
    lines = []
    for row in rows:
        lines.append(f"|{'|'.join(row[number] for number in columns)}|")
    return "\n".join(lines)


def versions_table() -> str:
    """The locked versions of the packages that pyproject.toml names, for each supported Python."""
    locked = [locked_versions(python) for python in PYTHONS]
    lines = [
        f"| package | {' | '.join(f'Python {python}' for python in PYTHONS)} |",
        f"| --- |{' --- |' * len(PYTHONS)}",
    ]
    for name in named_packages():
        versions = [packages[name] for packages in locked]
        lines.append(f"| {name} | {' | '.join(versions)} |")
    return "\n".join(lines)


def times_table(executed: Path) -> str:
    """What the execution of the chapters took, marked so that two builds may differ in it."""
    lines = ["```{container} timing", "| chapter | Python | seconds |", "| --- | --- | --- |"]
    for chapter in CHAPTERS:
        notebook = nbformat.read(executed / chapter.name, as_version=4)
        seconds = sum(cell_seconds(cell) for cell in notebook.cells)
        python = notebook.metadata["language_info"]["version"]
        link = f"[{chapter.stem}](../notebooks/{chapter.name})"
        lines.append(f"| {link} | {python} | {seconds:.0f} |")
    return "\n".join([*lines, "```"])


def cell_seconds(cell) -> float:
    """How long a cell ran, by what its kernel reported; 0 if it was not executed."""
    times = cell.metadata.get("execution")
    if not times:
        return 0.0
    begin = datetime.fromisoformat(times["iopub.execute_input"])
    end = datetime.fromisoformat(times["shell.execute_reply"])
    return (end - begin).total_seconds()


def tpu_report() -> str:
    """What the TPU compiler said, and published times beside the least times: tables."""
    answers = records.recorded_answers(attention=None)
    return f"{records.table_of(answers)}\n\n{records.table_of_published()}"


def build(to: Path = SITE, executed: Path = EXECUTED, has_book: bool = True) -> Path:
    """Build the site from executed chapters; gives the folder with the pages.

    Without a book, the pages are the same.

    Raises
    ------
    RuntimeError
        If Sphinx finds anything to complain about.
    """
    for language in NOTEBOOKS:
        lay_out(language, to / "source" / language, executed)
    html = run_sphinx(to)
    for language, folder in NOTEBOOKS.items():
        for chapter in folder.glob("[0-9]*.ipynb"):  # to be downloaded
            shutil.copy(chapter, html[language] / "notebooks")
    for sentence in browser_demo.make(html["en"] / "draw"):
        print(sentence)
    shutil.copytree(FLOW, html["en"] / "flow", ignore=shutil.ignore_patterns("*.html", "*.json"))
    shutil.copytree(html[LANGUAGE], html["en"] / LANGUAGE)
    if has_book:
        write_book(to, html)
    repository = stamped_repository()
    if repository != PLACEHOLDER:  # a sitemap has whole addresses
        text = heads.sitemap(html["en"], site_address(repository))
        (html["en"] / "sitemap.xml").write_text(text)
    return html["en"]


def write_book(to: Path, html: dict[str, Path]) -> None:
    """Write the pages of both languages as an EPUB and a PDF each, into their folders."""
    for language in html:  # still pictures of what moves, which the book shows
        for picture in [*(html["en"] / "draw").glob("*.webp"), *FLOW.glob("*.webp")]:
            target = to / "source" / language / picture.parent.name
            target.mkdir(exist_ok=True)
            shutil.copy(picture, target)
    targets = {"en": html["en"], LANGUAGE: html["en"] / LANGUAGE}
    for language, folder in run_sphinx(to, "epub").items():
        shutil.copy(folder / f"{BOOK}.epub", targets[language])
    if not printing.CHROMIUM:
        print("There is no Chromium here, so the course is not printed as a PDF.")
        return
    folders = run_sphinx(to, "singlehtml")
    pages = [folder / "index.html" for folder in folders.values()]
    pdfs = [targets[language] / f"{BOOK}.pdf" for language in folders]
    with ThreadPoolExecutor() as both:
        list(both.map(printing.print_page, pages, pdfs))


def run_sphinx(to: Path, builder: str = "html") -> dict[str, Path]:
    """Build the pages of both languages at the same time; gives a folder for each.

    Neither is built within the other, because MyST-NB leaves a folder beside its pages. The
    builders "epub" and "singlehtml" make a book of what "html" has read.
    """
    folders = {"en": to / builder, LANGUAGE: to / LANGUAGE / builder}
    processes = []
    for language, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)
        command = [sys.executable, "-m", "sphinx", "-b", builder, "-W", "--keep-going", "--quiet"]
        command += ["--fresh-env"] if builder == "html" else []
        command += ["-c", "docs", "-d", to / "doctrees" / language]
        command += [to / "source" / language, folder]
        settings = {"COURSE_LANGUAGE": language, "COURSE_BUILDER": builder, "PYTHONHASHSEED": "0"}
        processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | settings))
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError(
            "Sphinx complains above: the site is built only where it has nothing to complain about."
        )
    return folders


def main() -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    stale = find_stale(CHAPTERS, EXECUTED)
    if stale:
        print(f"{len(stale)} of {len(CHAPTERS)} chapters have to be executed first.", flush=True)
        EXECUTED.mkdir(parents=True, exist_ok=True)
        copies = [shutil.copy(chapter, EXECUTED) for chapter in stale]
        command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--verbose", *copies]
        if subprocess.run(command, cwd=ROOT).returncode != 0:
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
