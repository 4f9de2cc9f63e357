"""What the tests share. JAX gets its simulated devices here, before any test starts it."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path

import diffusers
import jax.numpy as jnp
import pytest
import transformers
from diffusers import FlaxDiffusionPipeline

import helpers
from tools import offline

ROOT = Path(__file__).resolve().parents[1]
# What the person who runs the tests has set would change what they test.
for variable in ("TUTORIAL_DEVICES", "TUTORIAL_CHECKPOINT", "JAX_PLATFORMS", "HF_ENDPOINT", "HF_TOKEN"):
    os.environ.pop(variable, None)
helpers.simulate_devices(8)
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def checkpoint():
    return helpers.bundled_checkpoint("shapes-sd")


@pytest.fixture(scope="session")
def load():
    """A function that loads a checkpoint's pipeline, of either architecture, and its parameters, in float32."""
    settings = {"dtype": jnp.float32, "safety_checker": None, "feature_extractor": None}
    return lambda checkpoint: FlaxDiffusionPipeline.from_pretrained(checkpoint.source, **settings)


@pytest.fixture(scope="session")
def loaded(load, checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="session")
def pipeline(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def params(loaded):
    return loaded[1]


@pytest.fixture(scope="session")
def serve():
    """A context manager in which a handler's class answers on this machine, at the address that it gives."""

    @contextmanager
    def serve(handler):
        quiet = type(handler.__name__, (handler,), {"log_message": lambda *_: None})
        server = ThreadingHTTPServer(("127.0.0.1", 0), quiet)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()

    return serve


@pytest.fixture(scope="session")
def site():
    """The site's pages, built from the chapters as an earlier test or `make run` executed them."""
    subprocess.run([sys.executable, ROOT / "tools" / "build_site.py"], check=True)
    return ROOT / "build" / "site" / "html"


@pytest.fixture(scope="session")
def without_network():
    """A function that runs a command without a network; where the system has none to take away, tests are skipped."""
    if reason := offline.why_not():
        pytest.skip(reason)

    def run(command, check=True, **options):
        outer = [sys.executable, ROOT / "tools" / "offline.py", *command]
        result = subprocess.run(outer, capture_output=True, cwd=ROOT, **options)
        assert result.returncode == 0 or not check, result.stdout.decode()[-3000:] + result.stderr.decode()[-3000:]
        return result

    return run


@pytest.fixture(scope="session")
def executed_offline(without_network, tmp_path_factory):
    """A folder of chapters that were executed once more, without a network."""
    folder = tmp_path_factory.mktemp("offline")
    chapters = [ROOT / "notebooks" / f"{name}.ipynb" for name in ("02_bf16_loading", "04_jit_pipeline")]
    without_network([sys.executable, "tools/run_chapters.py", *chapters, "--to", folder])
    return folder
