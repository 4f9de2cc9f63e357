"""What stands in the way of the course is found, and said with what to do about it."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import flax
import jax
import pytest
from huggingface_hub import constants
from packaging.requirements import Requirement
from packaging.version import Version

from course import doctor
from helpers import packages
from tools import lock


def run_doctor(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course.doctor"]
    # Nothing answers on port 9, so the Hub is not waited for.
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9"} | environment
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


def pretend(monkeypatch, **installed: str | None):
    """Make packages look as if they were installed in other versions, or not at all."""
    truth = importlib.metadata.distributions
    versions = {name.replace("_", "-"): version for name, version in installed.items()}

    def distributions(name):
        if name not in versions:
            return truth(name=name)
        return [] if versions[name] is None else [SimpleNamespace(version=versions[name])]

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


def needed(name: str) -> Requirement:
    return next(package.requirement for package in packages.needed_packages() if package.requirement.name == name)


def test_it_finds_no_problem_here():
    result = run_doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No problem found." in result.stdout
    for said in ("diffusers", "8 device(s)", "shapes-sd:", "cannot be reached", "Memory:", "Disk:"):
        assert said in result.stdout


def test_a_broken_jax_is_one_problem_with_its_remedy(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib is version 0.1')")
    result = run_doctor(PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert result.returncode == 1
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("Problem")]
    remedy = f'{sys.executable} -m pip install "jax<'
    assert problem.startswith(f"Problem 1: JAX cannot be imported (jaxlib is version 0.1): {remedy}")


def test_a_wrong_number_of_devices_is_a_problem(monkeypatch):
    monkeypatch.setenv("TUTORIAL_DEVICES", "none")
    (problem,) = doctor.check_devices()
    assert problem.startswith("TUTORIAL_DEVICES is 'none'")


@pytest.fixture
def say_token(monkeypatch, tmp_path, capsys):
    """What the doctor says of a token that is in the environment, in a file, or nowhere."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))

    def say_token() -> str:
        assert list(doctor.check_hub()) == []
        said = capsys.readouterr().out
        assert "hf_secret" not in said
        return said

    return say_token


def test_it_says_where_a_token_is_and_never_prints_it(say_token, monkeypatch, tmp_path):
    assert "Token for the Hub: none" in say_token()
    (tmp_path / "token").write_text("hf_secret\n")
    assert f"Token for the Hub: in the file {tmp_path / 'token'}" in say_token()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert "Token for the Hub: in the environment variable HF_TOKEN" in say_token()


def test_on_colab_it_says_that_commands_see_no_secrets(say_token, monkeypatch):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "1")
    assert "to notebooks only" in say_token()


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("diffusers", "0.40.1"),
        ("transformers", "5.15.0"),
        ("huggingface-hub", "1.27.0"),
        ("flax", "0.11.2"),
        ("flax", None),
    ],
)
def test_a_package_that_cannot_run_flax_pipelines_is_a_problem_and_stops_the_chapters(monkeypatch, name, version):
    pretend(monkeypatch, **{name: version})
    (problem,) = doctor.check_packages()
    remedy = f'{sys.executable} -m pip install "{needed(name)}"'
    found = f"{name} {version} is installed" if version else f"{name} is missing"
    assert problem == f"{found}, and {name} {needed(name).specifier} is needed: {remedy}"
    with pytest.raises(ImportError) as stopped:
        packages.require_flax()
    message = str(stopped.value)
    assert message == f"Flax pipelines do not run with {name} {version or '(missing)'}: run `{remedy}`, and restart."


def test_a_newer_jax_does_not_stop_the_chapters(monkeypatch):
    pretend(monkeypatch, jax="0.99")
    packages.require_flax()
    assert len(list(doctor.check_packages())) == 1


def test_the_chapters_that_need_no_diffusers_are_named(monkeypatch, capsys):
    sentence = "The chapters from 11 on run as it is"
    pretend(monkeypatch, diffusers=None, transformers="5.23.0")
    assert len(list(doctor.check_packages())) == 2
    assert sentence in capsys.readouterr().out
    pretend(monkeypatch, flax=None)
    assert len(list(doctor.check_packages())) == 3
    assert sentence not in capsys.readouterr().out


# Measured with both packages installed: flax.jax_utils.replicate works, or it does not.
@pytest.mark.parametrize(
    ("jax_version", "flax_version", "works"),
    [
        ("0.7.2", "0.12.0", True),
        ("0.9.2", "0.12.6", True),
        ("0.10.0", "0.12.0", False),
        ("0.10.0", "0.12.6", False),
        ("0.10.0", "0.12.7", True),
        ("0.12.0.1", "0.12.6", False),
        ("0.12.0.1", "0.12.12", True),
    ],
)
def test_a_flax_that_is_too_old_for_the_jax_is_a_problem_and_stops_the_chapters(
    monkeypatch, jax_version, flax_version, works
):
    pretend(monkeypatch, jax=jax_version, flax=flax_version)
    assert [problem.partition(" is installed")[0] for problem in doctor.check_packages()] == (
        [] if works else [f"flax {flax_version}"]
    )
    if not works:
        with pytest.raises(ImportError, match=f"flax {flax_version}"):
            packages.require_flax()


def test_the_boundary_between_the_pairs_is_where_jax_and_flax_put_it():
    """JAX lost a function in 0.10, which flax called before 0.12.7."""
    assert hasattr(jax, "device_put_replicated") == (Version(jax.__version__) < Version("0.10"))
    calls_it = "device_put_replicated(" in Path(flax.jax_utils.__file__).read_text()
    assert calls_it == (Version(flax.__version__) < Version("0.12.7"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_locks_pair_works(monkeypatch, python):
    locked = lock.locked_versions(python)
    pretend(monkeypatch, jax=locked["jax"], flax=locked["flax"])
    packages.require_flax()


def test_the_needed_packages_are_those_of_the_project_file():
    names = {package.requirement.name for package in packages.needed_packages()}
    assert names >= {"jax", "flax", "diffusers"}
    assert not names & {"pytest", "jupyterlab"}


def test_a_development_version_within_the_range_fits():
    assert packages.Package(Requirement("jax<0.13"), "0.12.0.dev1").fits


def test_the_worker_says_in_one_sentence_which_packages_cannot_run_flax_pipelines(tmp_path):
    """As on a runtime with the newest transformers; its metadata come first on the path."""
    info = tmp_path / "transformers-5.15.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.15.0\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "course.hosts.worker", "--prompts", "x", "--out", "x"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 1
    (said,) = result.stderr.splitlines()
    assert said.startswith("Error: Flax pipelines do not run with transformers 5.15.0: run `")
