"""The setup cell: what it does where the course is installed, where it is not, and on Colab and Kaggle."""

import json
import os
import subprocess
import sys
import venv

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
    assert "is the internet switched on" in result.stderr.splitlines()[-1]


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


def test_every_chapter_and_the_readme_carry_the_same_stamp():
    repository = publish.stamped_repository()
    for chapter in publish.CHAPTERS:
        text = chapter.read_text()
        assert publish.stamp_chapter(text, repository) == text, "run `make publish`"
    assert publish.stamp_readme(publish.README.read_text(), repository) == publish.README.read_text()


def test_stamping_can_be_undone():
    chapter, readme = publish.CHAPTERS[0].read_text(), publish.README.read_text()
    stamped = publish.stamp_chapter(chapter, "someone/course")
    assert 'REPOSITORY = \\"someone/course\\"' in stamped
    assert publish.stamp_chapter(stamped, publish.stamped_repository()) == chapter
    with_links = publish.stamp_readme(readme, "someone/course")
    assert with_links.count("colab.research.google.com/github/someone/course/blob/main/notebooks/") == len(
        publish.CHAPTERS
    )
    assert publish.stamp_readme(with_links, publish.stamped_repository()) == readme
