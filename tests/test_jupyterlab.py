"""JupyterLab as people see it, in Chromium: a chapter that runs from its menu."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import jax
import jax.numpy as jnp
import nbformat
import psutil
import pytest
from diffusers import FlaxStableDiffusionPipeline
from playwright.sync_api import expect

import helpers

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def like_the_hub(tmp_path_factory):
    """The bundled weights as the Hub has Stable Diffusion 1.4: bfloat16, and the PNDM scheduler."""
    folder = tmp_path_factory.mktemp("hub") / "like-the-hub"
    small = helpers.bundled_checkpoint("shapes-sd")
    pipeline, params = FlaxStableDiffusionPipeline.from_pretrained(small.source, **small.options)
    del params["scheduler"]
    pipeline.save_pretrained(folder, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    name = "FlaxPNDMScheduler"
    changes = {
        "model_index.json": {"scheduler": ["diffusers", name]},
        "scheduler/scheduler_config.json": {"_class_name": name, "skip_prk_steps": True},
    }
    for file, change in changes.items():
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | change))
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory, like_the_hub, readers_environment):
    """A JupyterLab on copies of the chapters, which load weights as the Hub has them."""
    assert "$(BIN)/jupyter lab notebooks" in (ROOT / "Makefile").read_text()
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks", ignore=shutil.ignore_patterns(".*"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jupyter",
        "lab",
        "notebooks",
        "--no-browser",
        "--allow-root",
        f"--port={port}",
    ]
    command += ["--IdentityProvider.token=", "--LabApp.news_url=None"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    environment = {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "RUNTIME")}
    environment |= {
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
        "TUTORIAL_CHECKPOINT": str(like_the_hub),
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=readers_environment | environment,
            stdout=log,
            stderr=log,
        )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                urlopen(f"{address}/api", timeout=10).read()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < deadline, (
                    folder / "log"
                ).read_text()
                time.sleep(0.5)
        yield SimpleNamespace(
            address=address, process=psutil.Process(process.pid), notebooks=folder / "notebooks"
        )
    finally:
        process.terminate()  # it ends its kernels, too
        process.wait()


def test_jupyterlab_leaves_the_chapters_their_share_of_binders_memory(lab):
    for page in ("lab", "api/contents", "lab/api/settings"):
        urlopen(f"{lab.address}/{page}", timeout=60).read()
    processes = [lab.process, *lab.process.children(recursive=True)]
    assert 0 < sum(process.memory_info().rss for process in processes) < 256 * 2**20


def test_in_jupyterlab_run_all_draws_with_weights_as_the_hub_has_them(
    lab, like_the_hub, browser, screenshots
):
    """The chapter with the pipeline's own call and a loop of its own."""
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto(f"{lab.address}/lab/tree/04_jit_pipeline.ipynb?reset")
    expect(page.locator(".jp-Notebook")).to_be_visible(timeout=120_000)
    # Before the kernel is there, the menu would start nothing.
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=120_000)
    assert page.locator(".jp-RenderedImage img").count() == 0, "no outputs are committed"
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
    grid = page.locator(".jp-RenderedImage img").first
    expect(grid).to_be_attached(timeout=1_500_000)
    grid.scroll_into_view_if_needed()
    width, height = grid.evaluate(
        "image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])"
    )
    assert width > 500 and height > 300, "eight pictures, in two rows"
    page.screenshot(path=screenshots / "jupyterlab-chapter-4.png")
    deadline = time.monotonic() + 1500  # on a busy machine it takes several minutes
    while True:
        page.keyboard.press("Control+s")
        notebook = nbformat.read(lab.notebooks / "04_jit_pipeline.ipynb", as_version=4)
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert [o for cell in code for o in cell.outputs if o.output_type == "error"] == []
        if all(cell.execution_count for cell in code):
            break
        assert time.monotonic() < deadline, "a cell does not come to its end"
        page.wait_for_timeout(2000)
    page.close()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert f"using {like_the_hub}" in printed
    drawn = [
        cell
        for cell in code
        if any("image/png" in output.get("data", {}) for output in cell.outputs)
    ]
    assert drawn == [cell for cell in code if "image" in cell.metadata.get("mystnb", {})]
