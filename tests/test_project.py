"""The files around the code: versions, the environment, the wheel, and who may import whom."""

import ast
import os
import re
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

from lab.site import lock

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / line for line in listed.splitlines()]


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
