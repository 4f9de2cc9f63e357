"""Execute the chapters in order, keep them executed in a folder, and show their pictures on one page.

A failing chapter does not stop the next. The exit status is the number of chapters that failed.
"""

import argparse
import base64
import html
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tools.memory import KernelMemory


@dataclass
class Result:
    """How one chapter went."""

    name: str
    seconds: float
    memory: int  # bytes that its kernel took at the peak
    problem: str | None = None
    pictures: list[tuple[str, str]] = field(default_factory=list)  # PNG in base64, and its alt text


def execute(source: Path, target: Path) -> Result:
    """Run a notebook with a progress bar over its cells, and write it with its outputs, whole or not."""
    notebook = nbformat.read(source, as_version=4)
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    start = time.monotonic()
    problem = None
    with KernelMemory() as memory, tqdm(total=cells, desc=source.stem, unit="cell", leave=False) as bar:
        client = NotebookClient(
            notebook,
            timeout=None,  # a real model on a real device may compile for minutes
            startup_timeout=300,
            resources={"metadata": {"path": source.parent}},
            extra_arguments=["--log-level=ERROR"],  # its warnings would break the progress bar
            on_cell_executed=lambda **_: bar.update(),
        )
        try:
            client.execute()
        except CellExecutionError as error:
            number = next(k for k, cell in enumerate(notebook.cells) if _failed(cell))
            problem = f"cell {number + 1}: {error.ename}: {error.evalue}"
        except Exception as error:  # a kernel that died
            problem = f"{type(error).__name__}: {error}"
    nbformat.write(notebook, target)
    return Result(source.stem, time.monotonic() - start, memory.peak, problem, _pictures(notebook))


def _failed(cell) -> bool:
    expected = "raises-exception" in cell.metadata.get("tags", [])
    return not expected and any(output.output_type == "error" for output in cell.get("outputs", []))


def _pictures(notebook) -> list[tuple[str, str]]:
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                found.append(
                    (
                        output.data["image/png"].replace("\n", ""),
                        cell.metadata.get("mystnb", {}).get("image", {}).get("alt", ""),
                    )
                )
    return found


def write_page(results: list[Result], target: Path) -> None:
    """Write one HTML page, complete in itself, with every chapter's pictures."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Stable Diffusion in JAX: pictures</title>",
        "<meta name='viewport' content='width=device-width'><style>:root{color-scheme:light dark}"
        "body{font-family:system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}img{max-width:100%}"
        ".problem{color:#d33}</style><h1>Stable Diffusion in JAX: the pictures of this run</h1>",
    ]
    for result in results:
        parts.append(f"<h2><a href='{result.name}.ipynb'>{result.name}</a></h2>")
        if result.problem:
            parts.append(f"<p class='problem'>{html.escape(result.problem)}</p>")
        for data, alt in result.pictures:
            # What an embedded picture needs as text is base64 already; this only makes sure of it.
            base64.b64decode(data, validate=True)
            parts.append(f"<p><img alt='{html.escape(alt, quote=True)}' src='data:image/png;base64,{data}'></p>")
    target.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", type=Path, help="notebooks; by default all in notebooks/")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "chapters", help="folder for the results")
    arguments = parser.parse_args()
    chapters = arguments.chapters or sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    missing = [str(chapter) for chapter in chapters if not chapter.is_file()]
    if missing:
        parser.error(f"no such notebook: {', '.join(missing)}")
    arguments.to.mkdir(parents=True, exist_ok=True)

    results = []
    for number, chapter in enumerate(chapters, start=1):
        print(f"[{number}/{len(chapters)}] {chapter.stem}", flush=True)
        results.append(execute(chapter, arguments.to / chapter.name))
        # Chapter by chapter, so that what was done is there even if the run is cut off.
        write_page(results, arguments.to / "index.html")
        if results[-1].problem:
            print(f"    failed in {results[-1].problem}", file=sys.stderr, flush=True)

    width = max(len(result.name) for result in results)
    print(f"\n{'chapter':<{width}}  seconds  memory    result")
    for result in results:
        outcome = f"failed in {result.problem}" if result.problem else "ok"
        print(f"{result.name:<{width}}  {result.seconds:7.1f}  {result.memory / 2**30:.2f} GiB  {outcome}")
    page = arguments.to / "index.html"
    print(f"\nPictures: {os.path.relpath(page)}")
    return sum(result.problem is not None for result in results)


if __name__ == "__main__":
    sys.exit(main())
