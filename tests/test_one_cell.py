"""The cell on docs/one-cell.md: it is short, asks for the course's versions, and draws what its prompt says."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from diffusers.pipelines.stable_diffusion import safety_checker_flax
from PIL import Image
from transformers import CLIPConfig

from training import fidelity

ROOT = Path(__file__).resolve().parents[1]
DEVICES = 2
REPAIR = ("import jax.numpy", "from diffusers.pipelines", "unit = ", "safety_checker_flax.")
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_VISION |= {"image_size": 224, "patch_size": 56}


@pytest.fixture(scope="module")
def blocks():
    """The cell, and the lines that take the bundled checkpoint."""
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "one-cell.md").read_text(), re.DOTALL | re.MULTILINE)
    cell, lines = found
    return cell, lines


def test_it_is_about_twenty_lines_that_need_no_helpers(blocks):
    cell, _ = blocks
    assert len([line for line in cell.splitlines() if line]) <= 22
    assert "helpers" not in cell
    assert "safety_checker=None" not in cell, "with Stable Diffusion's own weights the checker stays in"


def test_it_asks_pip_for_the_versions_that_the_course_asks_for(blocks):
    first, *rest = blocks[0].splitlines()
    assert first.startswith("%pip install ")
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    asked = re.findall(r'"([^"]+)"', first)
    assert {re.match(r"[a-z-]+", requirement).group() for requirement in asked} >= {"diffusers", "transformers", "flax"}
    assert set(asked) <= set(stated)
    assert not any(line.startswith(("%", "!")) for line in rest)


def test_it_repairs_the_safety_checker(blocks, monkeypatch):
    """With an untrained checker of the same architecture; diffusers' own function calls JAX in a way that is gone."""
    config = CLIPConfig(vision_config=SMALL_VISION, projection_dim=8)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 224, 224))
    with monkeypatch.context() as patch:
        patch.setattr(safety_checker_flax, "jax_cosine_distance", None)
        exec("\n".join(line for line in blocks[0].splitlines() if line.startswith(REPAIR)), {})
        checker = safety_checker_flax.FlaxStableDiffusionSafetyChecker(config)
        params = checker.params | {"concept_embeds_weights": np.full(17, -1.1, np.float32)}  # no cosine is below
        assert np.asarray(checker(pixels)).tolist() == [False, False]
        assert np.asarray(checker(pixels, params)).tolist() == [True, True]


def test_it_draws_on_every_device_what_the_prompt_says(blocks, tmp_path):
    """As it stands on the page, with the bundled checkpoint's lines in the place of those that begin alike."""
    cell, lines = blocks
    code = cell.split("\n", 1)[1]
    for line in lines.splitlines():
        name = line.split(" = ")[0]
        code, replaced = re.subn(rf"^{re.escape(name)} = .*$", line, code, flags=re.MULTILINE)
        assert replaced == 1, f"one line begins with {name}"
    *before, last = code.strip().splitlines()
    grid = tmp_path / "grid.png"
    code = "\n".join([*before, f"({last}).save({str(grid)!r})"])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(DEVICES)}
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.startswith(f"{DEVICES} device(s) of kind cpu")
    pixels = np.asarray(Image.open(grid).convert("RGB"))
    images = np.split(pixels, DEVICES, axis=1)
    for scene in map(fidelity.read, images):
        assert isinstance(scene, fidelity.scenes.Scene), scene
        assert (scene.color, scene.shape, scene.background) == ("red", "heart", "white")
    assert not np.array_equal(*images)


def test_people_find_it():
    for page in ("README.md", "docs/index.md", "docs/chapters.md"):
        assert "one-cell" in (ROOT / page).read_text(), page
