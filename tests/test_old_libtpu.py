"""A libtpu that is too old for the jax beside it, as on Kaggle: JAX itself crashes there.

It needs an environment of its own, with jax 0.10.2, libtpu 0.0.17, packaging, psutil, pytest and
tabulate, in which no other test can run:

    python -m pytest --noconftest tests/test_old_libtpu.py
"""

import importlib.metadata
import os
import signal
import subprocess
import sys

import jax
import pytest
from packaging.version import Version

from course.tpu.chips import needed_libtpu

COMPILE = """
import os
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
import jax
from jax.experimental import topologies
options = {"chips_per_host_bounds": (1, 1, 1)}
device = topologies.get_topology_desc("v5e:1x1", "tpu", **options).devices[0]
with jax.default_device(device):
    jax.jit(lambda x: x @ x).lower(jax.ShapeDtypeStruct((256, 256), "float32")).compile()
"""


@pytest.fixture(scope="module")
def libtpu() -> str:
    """The version of a libtpu that is too old."""
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("libtpu is not installed")
    needed = needed_libtpu()
    if needed is None or Version(installed) >= needed:
        pytest.skip(f"libtpu {installed} fits jax {jax.__version__}")
    return installed


def run(*arguments: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True
    )


@pytest.mark.usefixtures("libtpu")
def test_jax_itself_crashes():
    assert run("-c", COMPILE).returncode == -signal.SIGSEGV


def test_the_course_refuses_by_name_and_version(libtpu):
    ended = run("-m", "course.tpu", "jax.numpy:sin", "--shapes", "f32[8]")
    assert ended.returncode == 1
    needed = f"libtpu {libtpu} is too old for JAX {jax.__version__}, which needs {needed_libtpu()}"
    assert ended.stderr.startswith(needed)
    assert f"run `pip install 'jax[tpu]=={jax.__version__}'`" in ended.stderr
    assert ended.stderr.count("\n") == 1
