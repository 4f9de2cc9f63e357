"""The files around the code: versions, the environment, the wheel, who may import whom, and what
GitHub, git and editors read."""

import ast
import configparser
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
import pytest
import yaml
from packaging.requirements import Requirement

from lab.site import lock, set_repo

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / line for line in listed.splitlines()]


def test_version_and_date_are_the_same_wherever_they_stand():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version = PROJECT["version"]
    assert cited["version"] == version
    changelog = (ROOT / "CHANGELOG.md").read_text()
    # Here the release takes its notes.
    assert f"\n## [{version}] - {cited['date-released']}\n" in changelog
    assert f"\n[{version}]: https://github.com/" in changelog
    assert f"/compare/v{version}...HEAD\n" in changelog


def test_the_environment_is_the_one_that_the_lock_gives():
    assert (ROOT / "environment.yml").read_text() == lock.environment_yml(), "run `make lock`"


def test_the_environment_has_what_reading_and_running_chapters_takes():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *pins, own = environment["dependencies"][-1]["pip"]
    assert own == "-e ."
    names = {Requirement(pin).name for pin in pins}
    runs = {"jax", "flax", "diffusers", "transformers", "matplotlib", "pillow"}
    assert runs | {"jupyterlab", "nbmake"} <= names


def test_the_environment_has_the_tpu_on_linux_only():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    tpu = Requirement(environment["dependencies"][-1]["pip"][0])
    assert (tpu.name, tpu.extras) == ("jax", {"tpu"})
    assert tpu.marker.evaluate({"platform_system": "Linux", "platform_machine": "x86_64"})
    assert not tpu.marker.evaluate({"platform_system": "Darwin", "platform_machine": "arm64"})


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_lock_has_every_requirement_within_its_range(python):
    versions = lock.locked_versions(python)
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(versions[requirement.name]), line


def test_the_lock_brings_libtpu_to_linux_only():
    assert "libtpu" in lock.locked_versions("3.12")
    assert "libtpu" not in lock.locked_versions("3.12", system="darwin", machine="arm64")


def test_no_file_names_the_machine_that_made_it():
    for file in tracked_files():
        if (
            file.suffix in {".gz", ".msgpack", ".png", ".npz", ".safetensors", ".webp"}
            or file.name == "test_project.py"
        ):
            continue
        text = file.read_text()
        for word in ("/root/", "/work/", "/opt/", "/home/", r"/tmp/\S+\.py"):
            # Not "…/work/…", as in the name of a figure.
            assert not re.search(rf"(?<!\w){word}", text), f"{word} in {file}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with what the course's wheel installs."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (file,) = folder.glob("*.whl")
    zipfile.ZipFile(file).extractall(folder / "site")
    return folder / "site"


def test_the_wheel_carries_the_rooms_that_chapters_import(wheel):
    rooms = {folder.name for folder in wheel.iterdir() if folder.suffix != ".dist-info"}
    assert rooms == {"helpers", "course"}
    for room in rooms:
        tracked = {file for file in tracked_files() if file.is_relative_to(ROOT / room)}
        assert {wheel / file.relative_to(ROOT) for file in tracked} <= set(wheel.rglob("*"))


def test_the_wheel_carries_the_checkpoints_and_what_was_recorded(wheel):
    for folder in ("checkpoints", "lab/records"):
        files = {
            file.relative_to(ROOT) for file in tracked_files() if file.is_relative_to(ROOT / folder)
        }
        assert files
        assert all((wheel / "helpers" / "data" / file).is_file() for file in files)
    readers = [*(ROOT / "notebooks").glob("*.ipynb"), *(ROOT / "course").rglob("*.py")]
    text = "".join(file.read_text() for file in readers)
    names = set(re.findall(r'find_data\(\\?"([^"\\]+)', text))
    for record in re.findall(r'(?:read_record|recorded_splits)\(\\?"([^"\\]+)', text):
        names.add(f"lab/records/{record}.json")
    assert {"checkpoints", "lab/records/ask/programs.json", "lab/records/clock/cpu.json"} <= names
    assert [name for name in names if not (wheel / "helpers" / "data" / name).exists()] == []


def test_without_the_clone_all_is_found_and_the_judge_needs_no_pytorch(wheel):
    code = (
        "import site, sys\n"
        "site.main()\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "sys.modules['torch'] = None\n"
        "import helpers\n"
        "from course.shapes import judge, scenes\n"
        "print(helpers.bundled_checkpoint('shapes-sd').source)\n"
        "print(len(helpers.read_record('ask/programs')) > 100)\n"
        "print(judge.__file__)"
    )
    command = [sys.executable, "-S", "-c", code, str(wheel)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    said = subprocess.run(
        command, cwd=wheel.parent, env=environment, capture_output=True, text=True, check=True
    ).stdout
    data = wheel / "helpers" / "data"
    places = [
        data / "checkpoints" / "shapes-sd",
        True,
        wheel / "course" / "shapes" / "judge.py",
    ]
    assert said.split() == [str(place) for place in places]


# Who may import whom.
ROOMS = ("helpers", "course", "lab", "tests")
MAY_IMPORT = {
    "helpers": ("helpers",),
    "course": ("course", "helpers"),
    "course/model": ("course.model",),
    "course/sd": ("course.model", "course.sd"),
    "course/flux2": ("course.model", "course.flux2"),
    "course/shapes": ("course.shapes",),
    "notebooks": ("course", "helpers"),
}
# What the newest packages do not have, and PyTorch.
MUST_NOT_NEED = {
    "helpers": ("diffusers", "flax", "torch", "transformers"),
    "course/shapes": ("torch",),
}
# All that a model needs besides Python. Of Flax it is what reads the bundled checkpoints' files,
# and no modules.
MODEL_NEEDS = ("jax", "numpy", "safetensors", "tokenizers", "flax.serialization")


def imports(code: str) -> set[str]:
    """The modules that a piece of code imports: ``a.b`` for ``from a import b``."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def code_of(room: str) -> dict[str, str]:
    """The code of a room by where it stands; that of chapters without lines for IPython."""
    if room != "notebooks":
        files = [ROOT / room] if room.endswith(".py") else (ROOT / room).rglob("*.py")
        return {str(file.relative_to(ROOT)): file.read_text() for file in files}
    found = {}
    for file in (ROOT / room).rglob("[0-9]*.ipynb"):
        cells = [
            cell.source
            for cell in nbformat.read(file, as_version=4).cells
            if cell.cell_type == "code"
        ]
        lines = [
            line
            for cell in cells
            for line in cell.splitlines()
            if not line.lstrip().startswith(("%", "!"))
        ]
        found[file.name] = "\n".join(lines)
    return found


def belongs(module: str, names: Iterable[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in names)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_only_those_below_it(room):
    for where, code in code_of(room).items():
        own = {module for module in imports(code) if belongs(module, ROOMS)}
        assert [module for module in own if not belongs(module, MAY_IMPORT[room])] == [], where


@pytest.mark.parametrize("room", MUST_NOT_NEED)
def test_what_must_run_without_a_package_does_not_import_it(room):
    for where, code in code_of(room).items():
        assert [module for module in imports(code) if belongs(module, MUST_NOT_NEED[room])] == [], (
            where
        )


@pytest.mark.parametrize("room", ["course/model", "course/sd", "course/flux2"])
def test_a_model_needs_five_packages(room):
    needs = (*MAY_IMPORT[room], *MODEL_NEEDS)
    for where, code in code_of(room).items():
        foreign = {
            module
            for module in imports(code)
            if module.split(".")[0] not in sys.stdlib_module_names
        }
        assert [module for module in foreign if not belongs(module, needs)] == [], where


# What GitHub, git, editors and containers read

WORKFLOWS = {
    file.stem: yaml.safe_load(file.read_text())
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
}
CHECKS = "./.github/workflows/checks.yml"


def needed_jobs(jobs: dict, name: str) -> set[str]:
    """The names of the jobs that a job waits for, and of those that these wait for."""
    needs = jobs[name].get("needs", [])
    names = {needs} if isinstance(needs, str) else set(needs)
    return names.union(*(needed_jobs(jobs, name) for name in names))


@pytest.mark.parametrize(("workflow", "job"), [("publish", "publish"), ("release", "release")])
def test_only_a_commit_that_passed_the_checks_is_published_and_released(workflow, job):
    jobs = WORKFLOWS[workflow]["jobs"]
    assert CHECKS in {jobs[name].get("uses") for name in needed_jobs(jobs, job)}
    # "Always" would not wait for them.
    assert "always()" not in str(jobs[job].get("if", ""))
    checks = WORKFLOWS["checks"]["jobs"]
    assert {"lint", "tests", "site", "runtimes"} <= set(checks)
    assert not any(checks[name].get("continue-on-error") for name in checks)


def test_what_is_called_asks_for_no_more_than_its_callers_give():
    """GitHub starts none of the jobs otherwise. By default a caller's job may read contents."""
    permissions = [WORKFLOWS["checks"]["permissions"]]
    permissions += [job.get("permissions", {}) for job in WORKFLOWS["checks"]["jobs"].values()]
    assert all(asked in ({}, {"contents": "read"}) for asked in permissions)
    for name in ("publish", "release"):
        assert WORKFLOWS[name]["permissions"] == {"contents": "read"}


def test_every_action_is_named_by_a_commit():
    folder = ROOT / ".github"
    named = []
    for file in [*folder.glob("workflows/*.yml"), *folder.glob("actions/*/action.yml")]:
        named += re.findall(r"uses: (\S+)", file.read_text())
    others = [name for name in named if not name.startswith("./")]
    assert others
    assert [name for name in others if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []


def test_every_file_that_states_versions_is_renewed():
    """By Dependabot, or by the workflow that writes the locks."""
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    renewed = {}
    for update in updates:
        renewed.setdefault(update["package-ecosystem"], update)
    folders = {
        f"/{file.parent.relative_to(ROOT)}"
        for file in tracked_files()
        if file.name == "package.json"
    }
    assert folders == {renewed["npm"]["directory"]}
    actions = {file.parent for file in (ROOT / ".github" / "actions").glob("*/action.yml")}
    folders = {"/", *(f"/{folder.relative_to(ROOT)}" for folder in actions)}
    assert folders == set(renewed["github-actions"]["directories"])
    assert "locks/**" in renewed["pip"]["exclude-paths"]
    commands = [step.get("run", "") for step in WORKFLOWS["locks"]["jobs"]["locks"]["steps"]]
    assert any(command.startswith("make lock ARGS='--upgrade ") for command in commands)
    rule = re.search(r"^lock:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for file in [lock.LOCK, *(ROOT / "locks").glob("*.lock")]:
        assert f"--output-file {file.relative_to(ROOT)}\n" in rule.group(1), file


def test_git_knows_which_files_are_texts():
    """A text has the same ends of lines everywhere, and a picture stays as it is."""
    listed = subprocess.run(
        ["git", "ls-files", "--eol"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for line in listed.splitlines():
        kinds, file = line.split("\t")
        held, _, attributes = kinds.split(maxsplit=2)
        expected = {"i/lf": "eol=lf", "i/none": "eol=lf", "i/-text": "attr/-text"}
        assert held in expected, f"{file} has {held}"
        assert expected[held] in attributes, f"{file} is missing in .gitattributes"


def test_editors_have_the_width_that_ruff_checks():
    editors = configparser.ConfigParser()
    editors.read_string(f"[top]\n{(ROOT / '.editorconfig').read_text()}")
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    assert editors["*.{py,pyi}"].getint("max_line_length") == ruff["line-length"]
    assert editors["*.ipynb"].getint("max_line_length") == 88


def test_the_container_has_a_python_of_its_own_and_runs_what_the_makefile_has():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    # Patches of an image are never written over; its other names are.
    assert re.fullmatch(rf"\S+:\d+\.\d+\.\d+-{lock.PYTHON}-[a-z]+", container["image"])
    makefile = (ROOT / "Makefile").read_text()
    commands = [command for name, command in container.items() if name.endswith("Command")]
    assert commands[-1].startswith("make run ")
    for command in commands:
        make, target, *settings = command.split()
        assert make == "make" and re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE)
        for setting in settings:
            name, _, file = setting.partition("=")
            assert f"\n{name} ?=" in makefile and (ROOT / file).is_file()


def hooks() -> dict[str, dict]:
    """The hooks of pre-commit by their ids."""
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    return {hook["id"]: hook for hook in repositories[0]["hooks"]}


def test_the_hooks_of_pre_commit_need_no_network():
    for hook in hooks().values():
        assert hook["language"] == "system"
        assert hook["entry"].startswith(".venv/bin/")
        assert "additional_dependencies" not in hook


def test_a_hook_takes_outputs_out_and_leaves_all_else(tmp_path):
    chapter = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))[1]
    notebook = nbformat.read(chapter, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.execution_count = 1
            cell.outputs = [nbformat.v4.new_output("stream", text="8 devices\n")]
            cell.metadata["scrolled"] = True
    copies = [tmp_path / "executed.ipynb", tmp_path / "as it is.ipynb"]
    nbformat.write(notebook, copies[0])
    shutil.copy(chapter, copies[1])
    _, *words = hooks()["clear-outputs"]["entry"].split()
    subprocess.run([sys.executable, *words, *copies], check=True, cwd=ROOT)
    for copy in copies:
        assert copy.read_bytes() == chapter.read_bytes()


@pytest.mark.parametrize("name", ["CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_people_are_told_where_to_report(name):
    text = (ROOT / name).read_text()
    repository = f"https://github.com/{set_repo.stamped_repository()}"
    assert f"({repository}/security/advisories/new)" in text
    assert not re.search(r"\[(NOTE|INSERT)", text), "there is still something to fill in"
