"""Execute chapters by nbmake, keep them executed in a folder, and show what they draw on one page.

The page grows with each chapter. A failing chapter does not stop the next. The exit status is the number of chapters
that failed.
"""

import argparse
import html
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbmake.nb_run import NotebookRun

from tools.memory import KernelMemory

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
EXECUTED = ROOT / "build" / "chapters"
KERNEL = "course"
STYLE = ":root{color-scheme:light dark}body{font-family:system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
STYLE += "img{max-width:100%}.problem{color:#d33}"


@dataclass(frozen=True)
class Result:
    """How one chapter went."""

    name: str
    seconds: float
    memory: int  # bytes that its kernel took at the peak
    problem: str | None

    def __str__(self) -> str:
        outcome = f"FAILED in {self.problem}" if self.problem else "ok"
        return f"{self.seconds:4.0f} s  {self.memory / 2**30:.2f} GiB  {outcome}"


@contextmanager
def kernel_of(python: Path) -> Iterator[None]:
    """Let Jupyter know a kernel that runs a certain Python."""
    command = [str(python), "-m", "ipykernel_launcher", "--log-level=ERROR", "-f", "{connection_file}"]
    with tempfile.TemporaryDirectory() as folder:
        spec = Path(folder, "kernels", KERNEL, "kernel.json")
        spec.parent.mkdir(parents=True)
        spec.write_text(json.dumps({"argv": command, "display_name": KERNEL, "language": "python"}))
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, (folder, os.environ.get("JUPYTER_PATH"))))
        yield


def execute(chapter: Path, timeout: int | None = None) -> Result:
    """Run a notebook where it is, and write it with its outputs, or with those up to the error that stopped it.

    Its metadata say how many bytes of memory its kernel took at the peak.
    """
    start = time.monotonic()
    notebook, problem = nbformat.read(chapter, as_version=4), None
    with KernelMemory() as memory:
        try:
            result = NotebookRun(chapter, timeout, kernel=KERNEL).execute()
            notebook, problem = result.nb, first_error(result.nb) or (result.error and result.error.summary)
        except Exception as error:  # a kernel that died
            problem = f"{type(error).__name__}: {error}"
    notebook.metadata["peak_memory"] = memory.peak
    merge_prints(notebook)
    nbformat.write(notebook, chapter)
    return Result(chapter.stem, time.monotonic() - start, memory.peak, problem)


def merge_prints(notebook) -> None:
    """Make one output of what a cell prints in a row: where a kernel cuts it depends on how fast the cell is.

    Sphinx' extension merges such outputs as well, but begins a new line with each, be it in the middle of one.
    """
    for cell in notebook.cells:
        merged = []
        for output in cell.get("outputs", []):
            if merged and merged[-1].output_type == "stream" and merged[-1].name == output.get("name"):
                merged[-1].text += output.text
            else:
                merged.append(output)
        if merged:
            cell.outputs = merged


def first_error(notebook) -> str | None:
    for number, cell in enumerate(notebook.cells, start=1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"cell {number}: {output.ename}: {output.evalue}".splitlines()[0]
    return None


@contextmanager
def ticking(line: str) -> Iterator[None]:
    """Print the beginning of a line; on a terminal, with the seconds that pass while the block runs."""
    print(line, end=" ", flush=True)
    start, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(1):
            print(f"\r{line} {time.monotonic() - start:4.0f} s", end="", flush=True)
        print(f"\r{line}", end=" ")

    clock = threading.Thread(target=tick if sys.stdout.isatty() else done.wait, daemon=True)
    clock.start()
    try:
        yield
    finally:
        done.set()
        clock.join()


def write_page(folder: Path, waiting: list[str]) -> None:
    """Write one HTML page, complete in itself, with the pictures of the chapters in a folder.

    Those that have yet to run are named without any; while there are such, the page loads itself again.
    """
    refresh = "<meta http-equiv='refresh' content='10'>" if waiting else ""
    parts = [
        f"<!doctype html><html lang='en'><meta charset='utf-8'>{refresh}<title>Pictures of this course</title>"
        f"<meta name='viewport' content='width=device-width'><style>{STYLE}</style>"
        "<h1>Stable Diffusion in JAX: what the chapters drew</h1>"
    ]
    for name in sorted({*waiting, *(file.stem for file in folder.glob("*.ipynb"))}):
        parts.append(f"<h2><a href='{name}.ipynb'>{name}</a></h2>")
        if name in waiting:
            parts.append("<p>It is still to run.</p>")
            continue
        notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
        if problem := first_error(notebook):
            parts.append(f"<p class='problem'>{html.escape(problem)}</p>")
        for cell in notebook.cells:
            alt = html.escape(cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""), quote=True)
            for output in cell.get("outputs", []):
                if data := output.get("data", {}).get("image/png"):
                    parts.append(f"<p><img alt='{alt}' src='data:image/png;base64,{html.escape(data)}'></p>")
    (folder / "index.html").write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chapters", nargs="*", type=Path, help="notebooks; by default all in notebooks/")
    parser.add_argument("--to", type=Path, default=EXECUTED, help="folder for the results")
    parser.add_argument("--python", type=Path, default=sys.executable, help="by which Python; by default this one")
    # A real model on a real device may compile for minutes, so there is no limit by default.
    parser.add_argument("--timeout", type=int, help="seconds that a cell may take")
    parser.add_argument("--no-page", dest="page", action="store_false", help="for two runs that share a folder")
    arguments = parser.parse_args()
    chapters = arguments.chapters or CHAPTERS
    missing = [str(chapter) for chapter in chapters if not chapter.is_file()]
    if missing:
        parser.error(f"no such notebook: {', '.join(missing)}")
    folder = arguments.to.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    # Else the order of a set of words, which some outputs show, would be a different one each time.
    os.environ.setdefault("PYTHONHASHSEED", "0")

    waiting, page = [chapter.stem for chapter in chapters], folder / "index.html"
    where = f"{page.as_uri()} ({os.path.relpath(page)})"
    if arguments.page:
        write_page(folder, waiting)
        print(f"Pictures, as soon as there are some: {where}", flush=True)
    failed, width = 0, max(map(len, waiting))
    with kernel_of(arguments.python):
        for number, chapter in enumerate(chapters, start=1):
            with ticking(f"[{number}/{len(chapters)}] {chapter.stem:<{width}}"):
                result = execute(Path(shutil.copy(chapter, folder)), arguments.timeout)
            print(result, flush=True)
            failed += result.problem is not None
            waiting.remove(result.name)
            if arguments.page:
                write_page(folder, waiting)
    ran = f"{len(chapters) - failed} of {len(chapters)} chapters ran to the end."
    print(f"{ran} Pictures: {where}" if arguments.page else ran)
    return failed


if __name__ == "__main__":
    sys.exit(main())
