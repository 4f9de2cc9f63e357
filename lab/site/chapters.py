"""Which chapters there are, and a page with what they drew: the last step of ``make run``.

pytest's plugin nbmake executes copies of the chapters in ``build/notebooks`` and leaves them there
with their outputs: for this page, for the site, and for the tests.
"""

import html
import os
from pathlib import Path

import nbformat
import psutil

ROOT = Path(__file__).resolve().parents[2]
CHAPTERS = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
EXECUTED = ROOT / "build" / "notebooks"
HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Pictures of this course</title>
<style>
:root { color-scheme: light dark }
body { font-family: system-ui; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { max-width: 100% }
.problem { color: #d33 }
</style>
<h1>Stable Diffusion in JAX: what the chapters drew</h1>
"""


# The files by which Linux offers TPU chips and NVIDIA's GPUs. JAX takes ten seconds to say.
ACCELERATORS = ("accel[0-9]*", "vfio/[0-9]*", "nvidia[0-9]*")


def count_workers() -> int:
    """Return how many chapters to execute at a time: two on a CPU with room for them, or one.

    An accelerator serves one program at a time, and a chapter takes up to 2 GB of memory.
    """
    has_accelerator = any(list(Path("/dev").glob(name)) for name in ACCELERATORS)
    has_room = psutil.cpu_count() > 1 and psutil.virtual_memory().available > 4e9
    return 2 if has_room and not has_accelerator else 1


def tags(cell) -> set[str]:
    """Return the tags of a cell, which say what it is: "setup", "solution" and others."""
    return set(cell.metadata.get("tags", []))


def find_problem(notebook) -> str | None:
    """Why an executed chapter did not run to its end, in a line; None if it did."""
    for number, cell in enumerate(notebook.cells, start=1):
        if cell.cell_type != "code":
            continue
        for output in cell.outputs:
            if output.output_type == "error":
                return f"Cell {number} failed: {output.ename}: {output.evalue}".splitlines()[0]
        if cell.execution_count is None:
            return f"Cell {number} was not executed."
    return None


def list_pictures(notebook) -> list[str]:
    """The pictures of an executed chapter, as HTML."""
    pictures = []
    for cell in notebook.cells:
        text = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        for output in cell.get("outputs", []):
            data = output.get("data", {}).get("image/png")
            if data:
                source = f"data:image/png;base64,{''.join(data.split())}"
                pictures.append(f'<p><img alt="{html.escape(text)}" src="{source}"></p>')
    return pictures


def write_page(folder: Path) -> Path:
    """Write ``index.html``, complete in itself, with what the chapters in a folder drew."""
    parts = [HEAD]
    for chapter in sorted(folder.glob("*.ipynb")):
        notebook = nbformat.read(chapter, as_version=4)
        parts.append(f'<h2><a href="{chapter.name}">{chapter.stem}</a></h2>')
        problem = find_problem(notebook)
        if problem:
            parts.append(f'<p class="problem">{html.escape(problem)}</p>')
        parts += list_pictures(notebook)
    page = folder / "index.html"
    page.write_text("\n".join(parts) + "\n", encoding="utf-8")
    return page


def main() -> None:
    page = write_page(EXECUTED)
    print(f"Pictures of the chapters: {page.as_uri()} ({os.path.relpath(page)})")


if __name__ == "__main__":
    main()
