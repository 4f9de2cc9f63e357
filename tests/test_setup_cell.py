"""The setup cell, what helpers.start says when packages do not fit, make set-repo, publishing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import nbformat
import pytest

import helpers
from helpers import startup
from lab.site import set_repo
from lab.site.chapters import CHAPTERS, tags

(CELL,) = (
    cell.source for cell in nbformat.read(CHAPTERS[0], as_version=4).cells if "setup" in tags(cell)
)
# As make set-repo writes it.
STAMPED = set_repo.replace_name(CELL, set_repo.stamped_repository(), "me/course")[0]
# Starts an IPython shell, as a kernel has one.
SHELL = """
import sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
"""
RUN_CELL = f"shell.run_cell({STAMPED!r}).raise_error()\n"
# As if the course were not installed until pip has run, which only says what it is asked for.
NOT_INSTALLED = """
sys.modules["helpers"] = None
def install(command):
    print(command)
    del sys.modules["helpers"]
shell.system = install
"""


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )


def test_if_the_course_is_installed_it_starts_devices_and_installs_nothing():
    after = "import jax; print(jax.device_count(), 'devices')"
    result = run_python(SHELL + "shell.system = None\n" + RUN_CELL + after)
    assert (result.stdout, result.stderr) == ("8 devices\n", "")
    result = run_python(SHELL + RUN_CELL + after, TUTORIAL_DEVICES="3")
    assert result.stdout == "3 devices\n"


def test_a_missing_course_is_installed_beside_the_jax_that_is_there():
    after = "import jax; print(jax.device_count(), 'devices')"
    result = run_python(SHELL + NOT_INSTALLED + RUN_CELL + after)
    command, _, devices = result.stdout.splitlines()
    asked = f'-m pip install --quiet jax=={jax.__version__} "git+https://github.com/me/course"'
    assert command.endswith(asked)
    assert devices == "8 devices"


def test_from_the_placeholder_nothing_is_installed():
    cell = set_repo.replace_name(STAMPED, "me/course", set_repo.PLACEHOLDER)[0]
    result = run_python(SHELL + NOT_INSTALLED + f"shell.run_cell({cell!r})")
    assert "pip install --quiet" not in result.stdout
    *_, last = result.stdout.strip().splitlines()
    assert "This copy of the course does not say where it is published" in last
    assert "source" in last and "Never run `pip install helpers`" in last


def test_diffusers_and_transformers_say_nothing_while_a_pipeline_is_loaded():
    code = """
import helpers; helpers.start()
from diffusers import FlaxStableDiffusionPipeline
source = helpers.bundled_checkpoint("shapes-sd").source
options = {"safety_checker": None, "feature_extractor": None}
FlaxStableDiffusionPipeline.from_pretrained(source, **options)
"""
    result = run_python(code)
    assert (result.stdout, result.stderr) == ("", "")


# What helpers.start says


def test_where_everything_fits_it_says_nothing(capsys):
    helpers.start()
    assert capsys.readouterr() == ("", "")


def test_it_asks_for_a_restart_if_the_kernel_loaded_what_pip_replaced(monkeypatch, pretend):
    pretend(transformers="4.57.6")
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="5.15.0"))
    with pytest.raises(RuntimeError, match=r"Restart the kernel .* has loaded transformers 5\.15"):
        helpers.start()


@pytest.mark.parametrize(
    ("name", "version"), [("jax", "0.6.2"), ("jax", None), ("flax", "0.11.2"), ("numpy", None)]
)
def test_what_no_chapter_can_run_with_stops_it(pretend, name, version):
    pretend(**{name: version})
    with pytest.raises(ImportError) as stopped:
        startup.check_installed_versions()
    found = f"The course does not run with {name} {version or '(missing)'}: run `"
    assert str(stopped.value).startswith(f'{found}{sys.executable} -m pip install "{name}')


def test_a_flax_that_is_too_old_for_the_jax_stops_it(pretend):
    pretend(jax="0.10.2", flax="0.12.6")
    with pytest.raises(ImportError, match=r"does not run with flax 0\.12\.6: run .*>=0\.12\.7"):
        startup.check_installed_versions()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("diffusers", "0.40.1"),
        ("diffusers", None),
        ("transformers", "5.15.0"),
        ("transformers", None),
        ("huggingface_hub", "1.27.0"),
    ],
)
def test_without_flax_pipelines_it_says_which_chapters_do_not_run(pretend, capsys, name, version):
    pretend(**{name: version})
    startup.check_installed_versions()
    (said,) = capsys.readouterr().out.splitlines()
    found = f"{name.replace('_', '-')} {version or '(missing)'}"
    assert said.startswith(
        f"Chapters 0 and 2 to 8 do not run with {found}: for these chapters, run `"
    )


def test_a_jax_that_is_newer_than_what_was_tested_does_not_stop_it(pretend, capsys):
    pretend(jax="0.99")
    startup.check_installed_versions()
    assert "The course was not tested with jax 0.99: if a chapter fails" in capsys.readouterr().out


# make set-repo


@pytest.fixture
def clone(tmp_path):
    """A repository with all texts of this one."""
    for file in set_repo.read_tracked():
        copy = tmp_path / file.relative_to(set_repo.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


OWN = os.environ | {"PYTHONPATH": ""}  # with which a copy runs its own modules


def contents(folder: Path) -> dict[Path, bytes]:
    files = [file for file in folder.rglob("*") if file.is_file() and ".git" not in file.parts]
    return {file.relative_to(folder): file.read_bytes() for file in files if file.suffix != ".pyc"}


def run_set_repo(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lab.site.set_repo", *arguments]
    return subprocess.run(command, cwd=folder, env=OWN, capture_output=True, text=True)


def test_a_name_is_written_everywhere_and_can_be_taken_out(clone):
    # In parts, or this file would name them before they are written.
    one, other = "/".join(("somebody", "course")), "/".join(("e", "course-2"))
    before = contents(clone)
    assert run_set_repo(clone, one).returncode == 0
    first = contents(clone)
    places = {str(path) for path, text in first.items() if one.encode() in text}
    assert {"README.md", "pyproject.toml", "environment.yml", "CITATION.cff"} < places
    assert {f"notebooks/{path.name}" for path in CHAPTERS} < places
    assert not any(set_repo.stamped_repository().encode() in text for text in first.values())
    run_set_repo(clone, one)
    assert contents(clone) == first, "once more does no harm"
    run_set_repo(clone, other)
    assert contents(clone) == {
        path: text.replace(one.encode(), other.encode()) for path, text in first.items()
    }
    for command in (["ruff", "check", "--no-cache", "."], ["lab.site.translations", "--check"]):
        ran = subprocess.run(
            [sys.executable, "-m", *command], cwd=clone, env=OWN, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stdout
    run_set_repo(clone, set_repo.stamped_repository())
    assert contents(clone) == before


def test_the_name_of_a_repository_that_texts_link_to_is_refused(clone):
    before = contents(clone)
    result = run_set_repo(clone, "jax-ml/jax")
    assert result.returncode == 2
    assert "already name jax-ml/jax" in result.stderr
    assert contents(clone) == before


def test_a_name_that_is_no_repository_changes_nothing(clone):
    before = contents(clone)
    result = run_set_repo(clone, "https://github.com/somebody/a-course")
    assert result.returncode == 2
    assert 'give it as "owner/name"' in result.stderr
    assert contents(clone) == before


def test_a_copy_without_git_is_told_to_be_a_clone(clone):
    before = contents(clone)
    shutil.rmtree(clone / ".git")
    result = run_set_repo(clone, "/".join(("somebody", "course")))
    assert result.returncode == 1
    assert result.stderr.startswith("Git does not say which files of ")
    assert result.stderr.count("\n") == 1 and "clone the course by Git" in result.stderr
    assert contents(clone) == before


def test_a_check_changes_nothing_and_fails_where_another_repository_is_named(clone):
    name = "/".join(("A", "course"))
    before = contents(clone)
    result = run_set_repo(clone, "--check", name)
    assert result.returncode == 1
    assert f"run `make set-repo REPO={name}`" in result.stderr
    assert contents(clone) == before
    run_set_repo(clone, name)
    for same in (name, name.lower()):
        assert run_set_repo(clone, "--check", same).returncode == 0


@pytest.mark.parametrize(
    ("stamped", "github_says", "status", "said", "noted"),
    [
        (True, "workflow", 0, "", "pages=on\n"),
        (False, "workflow", 1, "::error::The course says that it lives in", ""),
        (False, "gh: Not Found (HTTP 404)", 0, "::notice::The site is not", "pages=off\n"),
        (True, "legacy", 1, "::error::The site is not", ""),
        (True, "gh: Server Error (HTTP 500)", 1, "::error::GitHub does not say", ""),
    ],
)
def test_a_site_is_published_where_pages_is_on_and_the_course_names_the_repository(
    clone, stamped, github_says, status, said, noted
):
    name = "/".join(("a", "course"))
    if stamped:
        run_set_repo(clone, name)
    gh = clone / "bin" / "gh"  # in the place of GitHub's own
    gh.parent.mkdir()
    gh.write_text(f"#!/bin/sh\necho '{github_says}'\nexit {int(github_says.startswith('gh:'))}\n")
    gh.chmod(0o755)
    path = os.pathsep.join([str(gh.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    output = clone / "output"
    output.touch()
    environment = {"GITHUB_REPOSITORY": name, "GITHUB_OUTPUT": str(output), "PATH": path}
    result = subprocess.run(
        [clone / ".ci" / "may-publish"], env=OWN | environment, capture_output=True, text=True
    )
    assert result.returncode == status, result.stderr
    assert result.stdout.startswith(said)
    assert bool(result.stdout) == bool(said)
    assert output.read_text() == noted


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("readme", ["README.md", "README.zh-CN.md"])
def test_the_readmes_badges_open_every_chapter_in_colab_and_on_kaggle(readme, path):
    text = (set_repo.ROOT / readme).read_text()
    name = path.name
    if "zh-CN" in readme and (set_repo.ROOT / "notebooks" / "zh-CN" / name).exists():
        name = f"zh-CN/{name}"
    links = dict(set_repo.launch_links(set_repo.stamped_repository(), name))
    for place in ("Colab", "Kaggle"):
        assert f"](docs/_static/{place.lower()}.svg)]({links[place]})" in text
