"""What the chapters showed when they were executed, which ``make test`` does before these tests.

That they ran to the end, nbmake says itself. Chapters that nobody has executed here are skipped.
"""

import re
import sys

import nbformat
import pytest

from lab.site import quiz
from lab.site.chapters import CHAPTERS, EXECUTED, find_problem

# What mybinder.org gives a session, less what JupyterLab takes, in bytes.
BINDER = 2 * 2**30 - 256 * 2**20
# What a chapter must print at the start of a line, as regular expressions.
PRINTED = {
    "02_bf16_loading": [
        r"asked for bfloat16, stored in \{'float32'\}$",
        r"asked for float32 and stored in \{'bfloat16'\}$",
        r"stored in \{'bfloat16'\} and ",
        r"100% of the values are not a number$",
        r"the text encoder of the bfloat16 pipeline returns float32$",
        r"256 \+ 1 = 256$",
    ],
    "03_replicate_shard": [
        r"the first two are equal: True$",
        r"prompts \(8, 2, 77\)$",  # on simulated devices, in a process of its own
    ],
    "04_jit_pipeline": [
        *(
            rf"{call}: 0 program\(s\) compiled$"
            for call in ("the same again", "another prompt", "other keys", "another guidance scale")
        ),
        r"fewer steps: [1-9]\d* program\(s\) compiled$",
        r"largest difference: 0\.[0-4]\d+ of 255$",
    ],
    "05_manual_pmap": [
        r"largest difference: 0\.0$",
        r"6 programs if both are static$",
        r"2 programs if the scale is an input$",
        r"0 programs compiled$",
    ],
    "07_sdxl_aot": [
        r"largest difference from jit=True: 0\.0$",
        r"the same images: True$",
        r"\.common\.alphas_cumprod gives NaN$",
    ],
    "09_shardings": [
        r"Collectives: none$",
        r"4 image\(s\), at most 0\.[0-4]\d* of 255 from the first ones$",  # tensor parallelism
        r"8 image\(s\), at most 0\.[0-4]\d* of 255 from the first ones$",  # fully sharded
        r"1 image\(s\), at most 0\.[0-4]\d* of 255 from the first ones$",  # sequence parallelism
        r"fused \{'collective-permute': \d+\}$",
        r"apart nothing$",
        r"equal to the bit: True$",
        r"Meant to fail\. ShardingTypeError: Contracting dimensions are sharded",
    ],
    "10_many_hosts": [
        r"\[[01]\] I am process [01] of 2\.$",
        r"\[0\] np\.asarray: RuntimeError Fetching value for `jax\.Array` that spans",
        r"\[0\] sum 22 - is a copy here\? True$",
        r"exit statuses \[-?\d+, -9\]$",
        r"48 images, and the first 24 are those of one actor\.$",
        r"48 prompts, of which 45 are drawn already$",
        r"3 images drawn$",
    ],
    "11_the_model": [
        r"by_scan, 10 layer\(s\): \d+ lines",
        *(
            rf"{call}: 0 program\(s\) compiled$"
            for call in (
                "the same again",
                "another prompt",
                "another guidance scale",
                "fewer steps",
                "something not to draw",
            )
        ),
        r"largest difference: 0\.0\d\d of 255$",
        r"largest difference of the first: 0\.0\d\d of 255$",
        r"Meant to fail\. ValueError: The parameter conv_in\.weight of unet is missing",
    ],
    "15_from_noise": [
        r"paths: +0 up, +[1-9]\d* down",
        r"collectives: \{'all-reduce': \d+\}$",  # on several devices
        r"all devices (\d\.\d{3})\d, one device \1\d$",
        r"4[0-8] of 48 are right in every attribute$",
        *(rf"data from {name}: True$" for name in ("epsilon", "v", "velocity")),
    ],
    "16_todays_model": [
        r"packed again: True$",
        r"largest difference of a velocity: 0\.0000\d+$",
        r"largest difference from flux2\.generate: 0\.[0-4]\d* of 255$",
        r"data by the partitioner: does not fit$",
        r"by \d device\(s\): at most 0\.[0-4]\d* of 255 from the images of one$",
        r"It fits: it takes 11\.\d+ GiB",  # Z-Image-Turbo, a step
    ],
    "17_few_steps": [
        r"pairs of noise and image: 192$",
        r"the teacher, in 16 runs: 4[5-8] of 48$",
        r"second run at 0\.50: [34]\d of 48$",
    ],
}


@pytest.fixture(params=CHAPTERS, ids=lambda chapter: chapter.stem)
def executed(request):
    """An executed chapter."""
    return read_executed(request.param.name)


def read_executed(name: str):
    file = EXECUTED / name
    notebook = nbformat.read(file, as_version=4) if file.exists() else None
    if notebook is None or find_problem(notebook):
        pytest.skip(f"{name} has not been executed to its end: `make run` does that.")
    return notebook


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed_by(cell) -> str:
    return "".join(output.get("text", "") for output in cell.outputs)


def test_pictures_and_texts_in_their_place_go_together(executed):
    for cell in code_cells(executed):
        shows_picture = any("image/png" in output.get("data", {}) for output in cell.outputs)
        has_text = bool(cell.metadata.get("mystnb", {}).get("image", {}).get("alt"))
        assert shows_picture == has_text, cell.source


def test_what_predictions_ask_for_is_shown(executed):
    for cell in quiz.predictions(executed):
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        for question in cell.metadata.get("quiz", []):
            quiz.find_shown(question, f"{quiz.text_of_outputs(cell)}\n{alt}")


def test_no_cell_prints_a_wall_of_lines(executed):
    for cell in code_cells(executed):
        assert len(printed_by(cell).splitlines()) < 30, cell.source


@pytest.mark.parametrize("name", PRINTED)
def test_what_a_chapter_is_about_is_printed(name):
    printed = "".join(map(printed_by, code_cells(read_executed(f"{name}.ipynb"))))
    for line in PRINTED[name]:
        assert re.search(rf"^{line}", printed, flags=re.MULTILINE), f"no line {line!r}"


@pytest.mark.skipif(sys.platform != "linux", reason="It is counted on Linux only.")
def test_no_process_takes_more_memory_than_binder_has(executed):
    assert 0 < executed.metadata["peak_memory_so_far"] < BINDER
