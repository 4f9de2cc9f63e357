"""The files around the code: versions, lock, environment, licence, and what they must not contain."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tools import lock

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines()]


def test_the_environment_is_the_one_that_the_lock_gives():
    assert (ROOT / "environment.yml").read_text() == lock.environment_yml(), "run `make lock`"


def test_the_environment_is_valid_and_has_the_tpu_on_linux():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    *pins, own = environment["dependencies"][-1]["pip"]
    assert own == "-e ."
    tpu = Requirement(pins[0])
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


def test_the_lock_has_hashes_and_no_index_addresses():
    text = lock.LOCK.read_text()
    assert "://" not in text
    assert text.count("==") <= text.count("--hash=sha256:")


def test_no_file_names_the_machine_that_made_it():
    for file in tracked_files():
        if file.suffix in {".inv", ".msgpack", ".png", ".npz"} or file.name == "test_project.py":
            continue
        text = file.read_text()
        for word in ("/root/", "/work/", "/opt/", "/home/"):
            assert word not in text, f"{word} in {file}"


def test_the_wheel_carries_the_helpers_and_the_checkpoints(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"helpers/__init__.py", "helpers/bundled/shapes-sd/unet/diffusion_flax_model.msgpack"} <= names
    assert {"helpers/bundled/shapes-sd-bf16/unet/diffusion_flax_model.msgpack", "helpers/shardings.json"} <= names
    assert not any(name.startswith(("training", "tests", "tools")) for name in names)

    # Away from the clone, the package finds its checkpoints within itself.
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import helpers; "
        "print(helpers.bundled_checkpoint('shapes-sd').source)"
    )
    command = [sys.executable, "-S", "-c", f"import site; site.main(); {code}", str(tmp_path / "site")]
    source = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(source) == tmp_path / "site" / "helpers" / "bundled" / "shapes-sd"


def test_everything_that_helpers_exports_is_documented():
    import helpers

    for name in helpers.__all__:
        assert getattr(helpers, name).__doc__, name


def test_helpers_can_be_read_over_a_coffee():
    """What the chapters import; command-line tools, and what the doctor knows about the runtime, count apart."""
    tools = ("doctor", "launch", "tokens", "tpu", "versions", "worker")
    files = [file for file in (ROOT / "helpers").glob("*.py") if file.stem not in tools]
    lines = [line for file in files for line in file.read_text().splitlines() if line.strip()]
    assert len(lines) <= 700


@pytest.mark.parametrize("name", ["shapes-sd", "shapes-sd-bf16", "shapes-sdxl"])
def test_the_checkpoint_is_small_and_has_a_card(name):
    folder = ROOT / "checkpoints" / name
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    assert sum(sizes) <= 20e6
    assert max(sizes) <= 16e6
    assert "training.evaluate" in (folder / "README.md").read_text()


def test_the_licence_is_apache():
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    assert PROJECT["license"] == "Apache-2.0"
