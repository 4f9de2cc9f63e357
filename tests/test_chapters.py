"""The chapters: how they are written, and that they run on 8 devices, on 1 and on 3."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools.memory import BINDER, SERVER, KernelMemory

ROOT = Path(__file__).resolve().parents[1]
CHAPTERS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# What a chapter must print at the start of a line, with a number behind it.
MEASURED = {"07_sdxl_aot": ("cold compile", "warm cache", "loaded executable", "first call", "steady call")}
TAGS = {"setup", "exercise", "solution", "timing", "raises-exception", "hide-cell", "hide-input"}


def read(chapter: Path):
    return nbformat.read(chapter, as_version=4)


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def each_chapter(function):
    return pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda chapter: chapter.stem)(function)


def execute(chapter: Path, folder: Path, **environment: str):
    """Run a chapter by nbmake, in a kernel of its own; returns the executed notebook, which stays in the folder.

    Its metadata say how many bytes of memory the kernel took at the peak.
    """
    folder.mkdir(parents=True, exist_ok=True)
    copy = Path(shutil.copy(chapter, folder))
    command = [sys.executable, "-m", "pytest", "--nbmake", "--overwrite", "--nbmake-timeout=600", "-q", str(copy)]
    command += ["-p", "no:cacheprovider", f"--rootdir={folder}", "-c", os.devnull]
    environment |= {"PYTHONHASHSEED": "0"}  # as `make run` does, so that sets of words have an order
    with KernelMemory() as memory:
        result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
    executed = read(copy)
    executed.metadata["peak_memory"] = memory.peak
    nbformat.write(executed, copy)
    return executed


@pytest.mark.parametrize("devices", [8, 1, 3])
@each_chapter
def test_it_runs(chapter, devices):
    # The site shows what `make run` leaves in the first folder, so the chapters need not run once more for it.
    folder = ROOT / "build" / ("chapters" if devices == 8 else f"tests/{devices}-devices")
    executed = execute(chapter, folder, TUTORIAL_DEVICES=str(devices))
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        raised = any(output.output_type == "error" for output in cell.outputs)
        assert raised == ("raises-exception" in tags(cell)), cell.source
        shows_picture = any("image/png" in output.get("data", {}) for output in cell.outputs)
        assert shows_picture == bool(alt(cell)), f"picture and alt text do not go together: {cell.source}"
        text = "".join(output.get("text", "") for output in cell.outputs)
        assert len(text.splitlines()) < 30, f"a wall of log lines: {cell.source}"
    printed = "".join(output.get("text", "") for cell in executed.cells for output in cell.get("outputs", []))
    for row in MEASURED.get(chapter.stem, ()):
        assert re.search(rf"^{row} +\d", printed, flags=re.MULTILINE), f"no row {row!r} in the table"
    peak = executed.metadata["peak_memory"]
    assert 0 < peak < BINDER - SERVER, f"{peak / 2**30:.2f} GiB of memory are too many for Binder"


@pytest.fixture(scope="module")
def like_the_hub(tmp_path_factory):
    """The bundled weights in the form that Stable Diffusion 1.4 has on the Hub: bfloat16, and the PNDM scheduler."""
    source = ROOT / "checkpoints" / "shapes-sd-bf16"
    folder = shutil.copytree(source, tmp_path_factory.mktemp("hub") / "like-the-hub-bf16")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "FlaxPNDMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text()) | {"_class_name": "FlaxPNDMScheduler", "skip_prk_steps": True}
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["04_jit_pipeline", "05_manual_pmap"])
def test_it_runs_on_bfloat16_weights_with_another_scheduler(name, like_the_hub, tmp_path):
    executed = execute(ROOT / "notebooks" / f"{name}.ipynb", tmp_path, TUTORIAL_CHECKPOINT=str(like_the_hub))
    assert "like-the-hub" in "".join(o.get("text", "") for cell in executed.cells for o in cell.get("outputs", []))


def alt(cell) -> str:
    return cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")


@each_chapter
def test_it_is_committed_without_outputs(chapter):
    for cell in read(chapter).cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_setup_cell_is_the_same_everywhere():
    cells = [[cell.source for cell in read(chapter).cells if "setup" in tags(cell)] for chapter in CHAPTERS]
    assert all(len(found) == 1 for found in cells)
    assert len({found[0] for found in cells}) == 1


@each_chapter
def test_it_has_the_form_of_a_chapter(chapter):
    cells = read(chapter).cells
    assert 15 <= len(cells) <= 45
    opening, ending = cells[0].source, cells[-1].source
    assert re.match(rf"# {int(chapter.stem[:2])}\. ", opening)
    assert "In this chapter you will" in opening
    assert "You need" in opening
    assert re.search(r"On\s+a\s+CPU", opening)
    assert any("## What you learned" in cell.source for cell in cells)
    assert ending.startswith("Next")
    assert all(tags(cell) <= TAGS for cell in cells)
    (setup,) = (cell for cell in cells if "setup" in tags(cell))
    assert setup.metadata["jupyter"]["source_hidden"], "it is no part of the lesson"
    assert all(len(cell.source.splitlines()) <= 40 for cell in cells if cell is not setup), "a cell fits on a screen"


@each_chapter
def test_each_exercise_has_a_folded_solution(chapter):
    code = [cell for cell in read(chapter).cells if cell.cell_type == "code"]
    exercises = [k for k, cell in enumerate(code) if "exercise" in tags(cell)]
    assert 2 <= len(exercises) <= 3
    for k in exercises:
        assert {"solution", "hide-cell"} <= tags(code[k + 1])
        assert code[k + 1].metadata.get("jupyter", {}).get("source_hidden")


@each_chapter
def test_it_never_counts_on_a_number_of_devices(chapter):
    """Prose may tell what others promised or published, but not what the reader has."""
    for cell in read(chapter).cells:
        if cell.cell_type == "markdown":
            assert not re.search(r"\b(8|eight) (simulated )?devices\b(?! the guides)", cell.source) or re.search(
                "guides|Kaggle|on 8 devices, on 3", cell.source
            ), cell.source


@each_chapter
def test_its_links_to_other_chapters_lead_somewhere(chapter):
    for cell in read(chapter).cells:
        for target in re.findall(r"\]\(([^)#]+\.ipynb)", cell.source):
            assert (chapter.parent / target).exists(), target


@each_chapter
def test_no_assertion_depends_on_a_clock(chapter):
    for cell in read(chapter).cells:
        if "timing" in tags(cell):
            assert "assert" not in cell.source
