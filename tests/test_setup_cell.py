"""The setup cell: what it does if the course is installed, if it is not, and on Colab and Kaggle. Who writes it."""

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tools import publish

CHAPTERS = sorted((publish.ROOT / "notebooks").rglob("[0-9]*.ipynb"))
CELL = publish.SETUP_CELL.read_text()
# Written in two parts, so that a name does not take its place here.
PLACEHOLDER = "/".join(("OWNER", "COURSE"))
UNPUBLISHED = CELL.replace(publish.stamped_repository(), PLACEHOLDER)
PUBLISHED = CELL.replace(publish.stamped_repository(), "someone/course")


def run_cell(python: str, source: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COLAB_", "KAGGLE_", "TUTORIAL_"))}
    command = [python, "-c", source]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python without the course, in which pip only writes down what it is asked for."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    (packages / "pip.py").write_text("import sys\nsys.exit('asked for ' + ' '.join(sys.argv[1:]))\n")
    for name, version in (("jax", "0.7.2"), ("numpy", "2.1.3"), ("transformers", "5.15.0")):
        (packages / f"{name}.py").touch()
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = str(folder / "bin" / "python")
    return lambda source, **environment: run_cell(python, source, PYTHONPATH="", **environment)


def test_if_the_course_is_installed_it_says_nothing_and_only_the_licence_is_warned_of():
    code = (
        f"import subprocess, sys; subprocess.run = None\n{CELL}\n"
        "import jax; print(jax.device_count(), 'devices'); print('---', file=sys.stderr)\n"
        "from diffusers import FlaxStableDiffusionPipeline; from helpers import bundled_checkpoint\n"
        "source = bundled_checkpoint('shapes-sd').source\n"
        "FlaxStableDiffusionPipeline.from_pretrained(source, safety_checker=None, feature_extractor=None)"
    )
    result = run_cell(sys.executable, code)
    assert result.stdout == "8 devices\n", result.stderr
    of_the_cell, of_the_pipeline = result.stderr.split("---\n")
    assert of_the_cell == ""
    assert of_the_pipeline.count("You have disabled the safety checker") == 1
    assert "deprecated" not in of_the_pipeline


def test_on_a_machine_without_the_course_it_says_what_to_do_in_one_sentence(bare_python):
    error = bare_python(CELL).stderr.splitlines()[-1]
    assert error.startswith("ImportError: No module named 'helpers': run `make lab` or")
    assert "install helpers" not in error


@pytest.mark.parametrize("runtime", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_a_copy_that_does_not_know_its_address_says_what_to_set(bare_python, runtime):
    error = bare_python(UNPUBLISHED, **{runtime: "1"}).stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: This copy does not know where the course lives: set TUTORIAL_SOURCE")


def test_on_colab_it_keeps_jax_and_numpy_and_shows_what_pip_says_only_if_it_fails(bare_python):
    result = bare_python(PUBLISHED, COLAB_RELEASE_TAG="1")
    assert result.stdout == "Installing the course ...\n"
    *_, pip, _, reason = result.stderr.splitlines()
    address = "git+https://github.com/someone/course"
    assert pip.endswith(f"asked for install --upgrade flax {address} jax==0.7.2 numpy==2.1.3")
    assert reason == f"pip cannot install {address} with jax==0.7.2, numpy==2.1.3. Is the internet switched on?"


def test_another_source_can_be_named(bare_python):
    said = bare_python(UNPUBLISHED, KAGGLE_KERNEL_RUN_TYPE="1", TUTORIAL_SOURCE="/kaggle/input/course.whl").stderr
    assert "asked for install --upgrade flax /kaggle/input/course.whl jax==0.7.2" in said


def test_it_asks_for_a_restart_if_other_versions_are_loaded(bare_python):
    pretend = (
        "import subprocess, sys, types\n"
        "sys.modules['transformers'] = types.ModuleType('transformers')\n"
        "subprocess.run = lambda *_, **__: types.SimpleNamespace(returncode=0)\n"
    )
    error = bare_python(pretend + PUBLISHED, KAGGLE_KERNEL_RUN_TYPE="1").stderr
    assert "Restart the kernel: it has loaded a different transformers." in error


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_every_chapter_has_it_folded_with_a_title(path):
    text = path.read_text()
    assert publish.with_setup_cell(text, CELL) == text, "run `make publish`"
    (first,) = [cell for cell in json.loads(text)["cells"] if "setup" in cell["metadata"].get("tags", [])]
    assert first["source"][0] == "# @title Setup: run this first\n"
    assert len(first["source"]) <= 25
    for cell in json.loads(text)["cells"]:
        if {"setup", "solution"} & set(cell["metadata"].get("tags", [])):
            assert cell["metadata"]["cellView"] == "form", "Colab"
            assert cell["metadata"]["jupyter"] == {"source_hidden": True}, "JupyterLab and Kaggle"
            assert {"hide-input", "hide-cell"} & set(cell["metadata"]["tags"]), "the site"


# make publish


@pytest.fixture
def clone(tmp_path):
    """A repository with the files that name the course's own, and the tools."""
    name = publish.stamped_repository().encode()
    tracked = subprocess.run(["git", "ls-files"], cwd=publish.ROOT, check=True, capture_output=True, text=True).stdout
    files = [Path(line) for line in tracked.splitlines()]
    for file in files:
        if file.parts[0] == "tools" or name in (publish.ROOT / file).read_bytes():
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(publish.ROOT / file, tmp_path / file)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts]
    return {file.relative_to(folder): file.read_bytes() for file in files if file.suffix != ".pyc"}


def run_publish(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.publish", *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True)


def test_a_name_is_written_everywhere_and_can_be_taken_out(clone):
    before = contents(clone)
    assert run_publish(clone, "somebody/course").returncode == 0
    first = contents(clone)
    places = {str(path) for path, text in first.items() if b"somebody/course" in text}
    assert {"README.md", "pyproject.toml", "environment.yml", "CITATION.cff", "tools/setup_cell.py"} < places
    assert {f"notebooks/{path.name}" for path in CHAPTERS} < places
    assert not any(publish.stamped_repository().encode() in text for text in first.values())
    run_publish(clone, "somebody/course-2")  # in which the name before is contained
    assert contents(clone) == {
        path: text.replace(b"somebody/course", b"somebody/course-2") for path, text in first.items()
    }
    run_publish(clone, publish.stamped_repository())
    assert contents(clone) == before


def test_a_name_that_is_no_repository_changes_nothing(clone):
    before = contents(clone)
    result = run_publish(clone, "https://github.com/somebody/course")
    assert result.returncode == 2
    assert 'give it as "owner/name"' in result.stderr
    assert contents(clone) == before


def test_the_readme_links_to_every_chapter():
    readme = (publish.ROOT / "README.md").read_text()
    for path in CHAPTERS:
        for place, address in publish.launch_links(publish.stamped_repository(), path.name):
            assert f"[{place}]({address})" in readme
