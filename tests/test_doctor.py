"""What stands in the way of the course is found, and said with what to do about it."""

import importlib.metadata
import os
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from helpers import doctor, versions


def run_doctor(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "helpers.doctor"]
    # Nothing answers on port 9, so the Hub is not waited for.
    settings = {"HF_ENDPOINT": "http://127.0.0.1:9"} | environment
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


def pretend(monkeypatch, **installed: str | None):
    """Make packages look as if they were installed in other versions, or not at all."""
    truth = importlib.metadata.version

    def version(name):
        if name not in installed:
            return truth(name)
        if installed[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_it_finds_no_problem_here():
    result = run_doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No problem found." in result.stdout
    for said in ("diffusers", "8 device(s)", "shapes-sd:", "cannot be reached", "Memory:", "Disk:"):
        assert said in result.stdout


def test_it_says_where_a_token_is_and_never_prints_it(tmp_path):
    result = run_doctor(HF_TOKEN="hf_secret")
    assert "Token for the Hub: in the environment variable HF_TOKEN" in result.stdout
    (tmp_path / "token").write_text("hf_secret\n")
    from_file = run_doctor(HF_TOKEN_PATH=str(tmp_path / "token"))
    assert f"Token for the Hub: in the file {tmp_path / 'token'}" in from_file.stdout
    assert "hf_secret" not in result.stdout + result.stderr + from_file.stdout + from_file.stderr


def test_it_says_that_there_is_no_token(tmp_path):
    nowhere = str(tmp_path / "token")
    assert "Token for the Hub: none" in run_doctor(HF_TOKEN_PATH=nowhere).stdout
    assert "to notebooks only" in run_doctor(HF_TOKEN_PATH=nowhere, COLAB_RELEASE_TAG="1").stdout


def test_a_wrong_number_of_devices_is_a_problem():
    result = run_doctor(TUTORIAL_DEVICES="none")
    assert result.returncode == 1
    assert "Problem 1: TUTORIAL_DEVICES is 'none'" in result.stdout


def test_a_broken_jax_is_one_problem_with_its_remedy(tmp_path):
    (tmp_path / "jax.py").write_text("raise RuntimeError('jaxlib is version 0.1')")
    result = run_doctor(PYTHONPATH=str(tmp_path))
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("Problem")]
    remedy = f'{sys.executable} -m pip install "jax<'
    assert problem.startswith(f"Problem 1: JAX cannot be imported (jaxlib is version 0.1): {remedy}")


@pytest.mark.parametrize(
    ("installed", "found"),
    [
        (
            {"diffusers": "0.40.1"},
            f'0.40.1 is installed, and diffusers ==0.39.* is needed: {sys.executable} -m pip install "diffusers==0.39',
        ),
        ({"transformers": "5.15.0"}, "transformers 5.15.0 is installed"),
        ({"flax": None}, "flax is missing, and flax <0.13,>=0.11.2 is needed"),
    ],
)
def test_each_wrong_package_is_a_problem_with_its_remedy(monkeypatch, installed, found):
    pretend(monkeypatch, **installed)
    (problem,) = doctor.check_packages()
    assert found in problem


@pytest.mark.parametrize(
    "installed", [{"diffusers": "0.40.1"}, {"transformers": "5.0.0"}, {"huggingface-hub": "1.27.0"}]
)
def test_versions_without_flax_stop_the_import_in_one_sentence(monkeypatch, installed):
    pretend(monkeypatch, **installed)
    ((name, version),) = installed.items()
    with pytest.raises(ImportError, match="restart the kernel") as stopped:
        versions.require_flax()
    message = str(stopped.value)
    assert f"{name} {version}" in message
    assert "\n" not in message
    assert message.count("pip install") == 1


def test_a_newer_jax_does_not_stop_the_import(monkeypatch):
    pretend(monkeypatch, jax="0.99")
    versions.require_flax()


def test_the_needed_packages_are_those_of_the_project_file():
    assert {package.requirement.name for package in versions.needed_packages()} >= {"jax", "flax", "diffusers"}
    assert not any(package.requirement.name in ("pytest", "jupyterlab") for package in versions.needed_packages())


def test_a_development_version_within_the_range_fits():
    assert versions.Package(Requirement("jax<0.13"), "0.12.0.dev1").fits
