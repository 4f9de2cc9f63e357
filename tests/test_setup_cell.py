"""The setup cell: what it does where the course is installed, where it is not, and on Colab and Kaggle."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tools import publish


def run_cell(python: str, source: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("COLAB_", "KAGGLE_", "TUTORIAL_", "PYTHONPATH"))}
    command = [python, "-c", source]
    return subprocess.run(command, env=clean | environment, capture_output=True, text=True, cwd="/")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python without the course, in which pip only writes down what it is asked for."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    (packages / "pip.py").write_text(
        "import sys, pathlib\n"
        "constraints = pathlib.Path(sys.argv[sys.argv.index('--constraint') + 1]).read_text()\n"
        "print('asked for', sys.argv[-1], 'with', constraints.split())\n"
        "sys.exit(1)\n"
    )
    for name, version in (("jax", "0.7.2"), ("numpy", "2.1.3"), ("transformers", "5.15.0")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return str(folder / "bin" / "python")


def test_where_the_course_is_installed_it_installs_nothing():
    source = publish.setup_cell("") + "\nimport jax; print(jax.device_count(), 'devices')"
    for _ in range(2):
        result = run_cell(sys.executable, "import subprocess; subprocess.run = None\n" + source)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "8 devices\n"


def test_on_a_machine_without_the_course_it_says_what_to_do(bare_python):
    error = run_cell(bare_python, publish.setup_cell("")).stderr.splitlines()[-2:]
    assert error[0] == "ImportError: No module named 'helpers'"
    assert "make lab" in error[1] and "stranger" in error[1]


@pytest.mark.parametrize("runtime", ["COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"])
def test_unstamped_on_a_foreign_runtime_it_says_what_to_set(bare_python, runtime):
    error = run_cell(bare_python, publish.setup_cell(""), **{runtime: "1"}).stderr.splitlines()[-1]
    assert error.startswith("RuntimeError: This copy of the course does not know where it lives: set REPOSITORY")


def test_on_colab_it_keeps_jax_and_numpy_and_installs_from_the_repository(bare_python):
    result = run_cell(bare_python, publish.setup_cell("someone/course"), COLAB_RELEASE_TAG="1")
    asked = "asked for stable-diffusion-jax-course @ git+https://github.com/someone/course with "
    assert result.stdout.startswith(asked)
    assert sorted(json.loads(result.stdout.removeprefix(asked).replace("'", '"'))) == ["jax==0.7.2", "numpy==2.1.3"]
    reason = result.stderr.splitlines()[-1]
    assert "is the internet switched on" in reason
    assert "what it keeps of this runtime (jax 0.7.2, numpy 2.1.3)?" in reason


def test_a_wheel_is_named_by_its_path(bare_python, tmp_path):
    wheel = tmp_path / "course.whl"
    wheel.touch()
    result = run_cell(bare_python, publish.setup_cell(""), COLAB_RELEASE_TAG="1", TUTORIAL_SOURCE=str(wheel))
    assert result.stdout.startswith(f"asked for stable-diffusion-jax-course @ {wheel.as_uri()} with ")


def test_it_asks_for_a_restart_where_another_version_was_imported(bare_python):
    pretend = (
        "import subprocess, sys, types\n"
        "sys.modules['transformers'] = types.ModuleType('transformers')\n"
        "subprocess.run = lambda *_: types.SimpleNamespace(returncode=0)\n"
    )
    result = run_cell(bare_python, pretend + publish.setup_cell("someone/course"), KAGGLE_KERNEL_RUN_TYPE="1")
    assert "Now restart the kernel: another transformers had been imported already." in result.stderr


@pytest.mark.parametrize("path", publish.places(), ids=lambda path: path.name)
def test_every_place_carries_the_same_stamp(path):
    stamp = publish.places()[path]
    assert stamp(path.read_text(), publish.stamped_repository()) == path.read_text(), "run `make publish`"


def test_stamping_leaves_no_place_out_and_can_be_undone(tmp_path):
    before = {path.relative_to(publish.ROOT): path.read_text() for path in publish.places()}
    unstamped = {
        path.relative_to(publish.ROOT): stamp(path.read_text(), "") for path, stamp in publish.places().items()
    }
    for folder in ("tools", "notebooks", "docs"):
        shutil.copytree(publish.ROOT / folder, tmp_path / folder)
    for path, text in before.items():
        (tmp_path / path).write_text(text)

    def run(*arguments: str) -> dict[Path, str]:
        subprocess.run([sys.executable, "tools/publish.py", *arguments], cwd=tmp_path, check=True, capture_output=True)
        return {path: (tmp_path / path).read_text() for path in before}

    first = run("somebody/course")
    named = {path for path, text in first.items() if "somebody/course" in text}
    assert set(before) - named <= {path for path in before if path.parts[0] == "docs"}, "a page may have no address"
    assert {Path("README.md"), Path("environment.yml"), Path("pyproject.toml")} < named
    assert not any("github.com/owner/name" in text for text in first.values())
    assert tomllib.loads(first[Path("pyproject.toml")])["project"]["urls"] == {
        "Repository": "https://github.com/somebody/course"
    }
    colab = "colab.research.google.com/github/somebody/course/blob/main/notebooks/"
    assert first[Path("README.md")].count(colab) == len(publish.CHAPTERS)

    second = run("another/name")
    assert not any("somebody/course" in text for text in second.values())
    assert run() == second
    assert run("--none") == unstamped


def test_a_name_that_is_no_repository_changes_nothing(tmp_path):
    command = [sys.executable, str(publish.ROOT / "tools" / "publish.py"), "https://github.com/somebody/course"]
    before = [path.read_text() for path in publish.places()]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert 'give it as "owner/name"' in result.stderr
    assert [path.read_text() for path in publish.places()] == before
