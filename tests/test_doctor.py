"""What stands in the way of the course is found, and said with what to do about it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import flax
import jax
import pytest
from huggingface_hub import constants
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from course import doctor
from helpers import find_data, packages
from lab.site import lock


def run_doctor(**environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "course.doctor"]
    # Nothing answers on port 9, so the Hub is not waited for.
    settings = {"HF_ENDPOINT": "http://me:hf_secret@127.0.0.1:9"} | environment
    return subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)


def in_front(folder: Path) -> str:
    """A PYTHONPATH that begins with a folder."""
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


def test_it_finds_no_problem_here():
    result = run_doctor(HF_TOKEN="hf_secret")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No problem found." in result.stdout
    for said in ("diffusers", "8 device(s)", "shapes-sd:", "cannot be reached", "Memory:", "Disk:"):
        assert said in result.stdout
    assert "A token for the Hub: found" in result.stdout
    assert "hf_secret" not in result.stdout + result.stderr  # a token, or a password


@pytest.mark.parametrize("error", ["RuntimeError", "AttributeError"])
def test_a_broken_jax_is_one_problem_with_its_remedy(tmp_path, error):
    (tmp_path / "jax.py").write_text(f"raise {error}('jaxlib is version 0.1')")
    result = run_doctor(PYTHONPATH=in_front(tmp_path))
    assert result.returncode == 1
    (problem,) = [line for line in result.stdout.splitlines() if line.startswith("Problem")]
    remedy = f'{sys.executable} -m pip install "jax<'
    found = "Problem 1: JAX cannot be imported (jaxlib is version 0.1)"
    assert problem.startswith(f"{found}: {remedy}")


def test_a_wrong_number_of_devices_is_a_problem(monkeypatch):
    monkeypatch.setenv("TUTORIAL_DEVICES", "none")
    (problem,) = doctor.check_devices()
    assert problem.startswith("JAX does not start: TUTORIAL_DEVICES is 'none'")


def test_an_accelerator_that_jax_does_not_use_is_a_problem_with_advice(monkeypatch):
    monkeypatch.setenv("KAGGLE_KERNEL_RUN_TYPE", "Interactive")
    (problem,) = doctor.check_devices()
    assert "choose Settings > Accelerator > TPU in Kaggle's menu" in problem


def test_whatever_is_missing_or_damaged_in_checkpoints_is_a_problem(tmp_path):
    folder = shutil.copytree(find_data("checkpoints"), tmp_path / "checkpoints")
    note = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for file in ("shapes-flux2/transformer/diffusion_pytorch_model", "loras/star-for-heart"):
        (folder / f"{file}.safetensors").write_text(note)
    shutil.rmtree(folder / "shapes-sd" / "vae")
    weights = folder / "shapes-sdxl" / "unet" / "diffusion_flax_model.msgpack"
    weights.write_bytes(weights.read_bytes()[:1000])
    damaged, without_vae, cut, lora = doctor.check_checkpoints(folder)
    assert "shapes-flux2 cannot be read" in damaged and "(Git LFS)" in damaged
    assert "shapes-sd cannot be read" in without_vae and "vae" in without_vae
    assert "shapes-sdxl cannot be read" in cut
    assert "star-for-heart.safetensors only says where the file is (Git LFS)" in lora
    assert all(doctor.find_repair() in problem for problem in (damaged, without_vae, cut, lora))


def test_it_says_which_model_somebody_has_and_what_it_lacks(tmp_path, capsys):
    lacking = shutil.copytree(find_data("checkpoints") / "shapes-flux2", tmp_path / "lacking")
    (lacking / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    cut = shutil.copytree(find_data("checkpoints") / "shapes-sd", tmp_path / "cut")
    (cut / "tokenizer" / "vocab.json").write_text("{")
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    own = str(find_data("checkpoints") / "shapes-sdxl")
    names = ["shapes-flux2", own, str(lacking), str(cut), str(nothing), "x"]
    problems = list(doctor.check_models(names))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Model shapes-flux2: Flux2KleinPipeline, 0.00")
    assert lines[1].startswith(f"Model {own}: StableDiffusionXLPipeline, 0.00")
    assert len(lines) == 2
    sentences = ["lacking", "vocab.json is damaged", "model_index.json is missing"]
    sentences.append("x is no folder, no Hub id")
    for problem, sentence in zip(problems, sentences, strict=True):
        assert sentence in problem


def test_a_repair_fits_to_how_the_course_came_here(tmp_path):
    assert doctor.find_repair(tmp_path).startswith(f"{packages.PIP} --force-reinstall --no-deps")
    (tmp_path / "pyproject.toml").touch()
    assert doctor.find_repair(tmp_path) == "download the folder of the course again"
    (tmp_path / ".git").mkdir()
    assert doctor.find_repair(tmp_path) == "git checkout -- checkpoints"


def test_a_cache_that_cannot_be_written_is_a_problem(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "hub"))
    (problem,) = doctor.check_memory_and_disk()
    assert problem.endswith(
        "hub cannot be written (Not a directory): set HF_HOME to a folder that can be"
    )


def test_too_little_room_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_FREE", 2**60)
    memory, disk = doctor.check_memory_and_disk()
    assert memory == "Less than 2 GiB of memory is free: shut down other kernels"
    assert disk.startswith("Less than 2 GiB of disk is free for ")


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
def test_a_package_that_cannot_run_flax_is_a_problem_and_stops_pipelines(pretend, name, version):
    pretend(**{name: version})
    (problem,) = doctor.check_packages()
    assert problem.startswith(f"{name} is {version or 'missing'}, and {name}")
    remedy = f'{sys.executable} -m pip install "{name}'
    assert remedy in problem
    with pytest.raises(ImportError) as stopped:
        packages.require_flax()
    found = f"Flax pipelines do not run with {name} {version or '(missing)'}"
    assert str(stopped.value).startswith(f"{found}: run `{remedy}")


def test_a_newer_jax_does_not_stop_the_pipelines(pretend):
    pretend(jax="0.99")
    packages.require_flax()
    assert len(list(doctor.check_packages())) == 1


def test_the_chapters_that_need_no_diffusers_are_named(pretend, capsys):
    sentence = "The chapters from 9 on run as it is"
    pretend(diffusers=None, transformers="5.23.0")
    assert len(list(doctor.check_packages())) == 2
    assert sentence in capsys.readouterr().out
    pretend(diffusers=None, flax=None)
    assert len(list(doctor.check_packages())) == 2
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
def test_a_flax_that_is_too_old_for_the_jax_is_a_problem(pretend, jax_version, flax_version, works):
    pretend(jax=jax_version, flax=flax_version)
    problems = list(doctor.check_packages())
    if works:
        assert problems == []
    else:
        (problem,) = problems
        assert problem.startswith(f"flax is {flax_version}, and flax")


def test_the_boundary_between_the_pairs_is_where_jax_and_flax_put_it():
    """JAX lost a function in 0.10, which flax called before 0.12.7."""
    assert hasattr(jax, "device_put_replicated") == (Version(jax.__version__) < Version("0.10"))
    calls_it = "device_put_replicated(" in Path(flax.jax_utils.__file__).read_text()
    assert calls_it == (Version(flax.__version__) < Version("0.12.7"))


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_locks_pair_works(pretend, python):
    locked = lock.locked_versions(python)
    pretend(jax=locked["jax"], flax=locked["flax"])
    packages.require_flax()


def test_the_needed_packages_are_those_of_the_project_file():
    names = {package.name for package in packages.needed_packages()}
    assert names >= {"jax", "flax", "diffusers"}
    assert not names & {"pytest", "jupyterlab"}


def test_a_development_version_within_the_range_fits():
    assert packages.Package("jax", SpecifierSet("<0.13"), "0.12.0.dev1").fits
