"""simulate_devices, device_report and require_accelerator."""

import os
import subprocess
import sys

import jax
import pytest

import helpers
from helpers import devices


@pytest.mark.parametrize(
    ("asked", "environment", "count"), [(3, {}, 3), (8, {"TUTORIAL_DEVICES": "1"}, 1)]
)
def test_the_cpu_becomes_as_many_devices_as_asked_for_without_a_word(asked, environment, count):
    """The environment overrides the program, and libtpu stays quiet where there is no TPU."""
    code = f"import helpers, jax; helpers.simulate_devices({asked}); print(jax.device_count())"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == (f"{count}\n", "")


@pytest.mark.parametrize("wanted", [0, -1, 2.5, "many", None])
def test_what_is_not_a_number_of_devices_is_refused(wanted):
    with pytest.raises(ValueError, match=f"n is {wanted!r}"):
        helpers.simulate_devices(wanted)


@pytest.mark.parametrize("number", ["eight", "100000"])
def test_a_wrong_environment_variable_is_named(monkeypatch, number):
    monkeypatch.setenv("TUTORIAL_DEVICES", number)
    with pytest.raises(ValueError, match=f"TUTORIAL_DEVICES is '{number}', .* from 1 to 1024"):
        helpers.simulate_devices()


def test_asking_again_for_the_same_number_is_harmless():
    helpers.simulate_devices(jax.device_count())


def test_asking_for_a_different_number_after_jax_started_says_to_restart():
    with pytest.raises(
        RuntimeError, match=r"started with 8 CPU device\(s\) and cannot change to 5: restart"
    ):
        helpers.simulate_devices(5)


def test_the_report_names_platform_kind_number_and_memory():
    report = helpers.device_report()
    assert "8 device(s) of platform 'cpu'" in report
    assert "GiB" in report
    assert "This is a CPU run" in report


class FakeDevice:
    platform = "tpu"
    device_kind = "TPU v5 lite"

    def memory_stats(self):
        return {"bytes_limit": 16 * 2**30}


def test_the_report_of_an_accelerator_has_the_memory_of_each_device(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [FakeDevice()] * 4)
    report = helpers.device_report()
    assert (
        "4 device(s) of platform 'tpu', kind 'TPU v5 lite', with 16.0 GiB of memory on each"
        in report
    )
    assert "CPU run" not in report


@pytest.mark.parametrize(
    ("variable", "advice"),
    [("COLAB_RELEASE_TAG", "Change runtime type"), ("KAGGLE_KERNEL_RUN_TYPE", "Kaggle's menu")],
)
def test_without_an_accelerator_the_advice_fits_the_runtime(monkeypatch, variable, advice):
    monkeypatch.setenv(variable, "x")
    with pytest.raises(RuntimeError, match=advice):
        helpers.require_accelerator()


def test_a_tpu_that_jax_cannot_use_gets_its_own_advice(monkeypatch):
    monkeypatch.setattr(devices, "has_tpu_chips", lambda: True)
    with pytest.raises(RuntimeError, match=r"TPU VM.*lsof"):
        helpers.require_accelerator()


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_an_accelerator_is_enough(monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    helpers.require_accelerator()
