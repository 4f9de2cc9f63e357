"""What the tests share. JAX gets its simulated devices here, before any test starts it."""

import functools
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import pytest
import transformers
from diffusers import FlaxDiffusionPipeline
from playwright.sync_api import sync_playwright

import helpers
from course import flux2, sd
from course.sd.samplers import SAMPLERS, Sampler
from helpers import packages
from lab.site import workshop
from lab.site.printing import CHROMIUM, NO_SANDBOX
from tests.makers import small

ROOT = Path(__file__).resolve().parents[1]
collect_ignore = ["makers"]  # they need PyTorch
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit all of this
    # What the person who runs the tests has set would change what they test.
    for variable in list(os.environ):
        if variable.startswith(("COLAB_", "HF_", "JAX_", "KAGGLE_", "TUTORIAL_", "XLA_")):
            del os.environ[variable]
    # XLA's programs for a CPU compile in half of the time, and then run more slowly. So only the
    # chapters, which pytest executes in a session of their own, run what readers run.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    # What one worker compiles, the others and the processes that tests start need not.
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["PROGRAMS_OF_RUN"]
helpers.simulate_devices(8)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()
# Among those of the site, what takes long.
LONG = ("test_built_again.py", "test_jupyterlab.py", "test_site_browser.py")


def pytest_addoption(parser):
    parser.addoption(
        "--site",
        action="store_true",
        help="run the tests of the site and of JupyterLab, and no others",
    )


def outside_of_tests():
    """The environment without those variables that make tests compile less."""
    set_here = ("JAX_COMPILATION_CACHE_DIR", "XLA_FLAGS")
    return {name: value for name, value in os.environ.items() if name not in set_here}


def pytest_sessionstart(session):
    """Build the site, before the workers start that look at it.

    It has the chapters as an earlier test or `make run` executed them.
    """
    options = session.config.option
    if options.site and not options.collectonly and "PYTEST_XDIST_WORKER" not in os.environ:
        command = [sys.executable, "-m", "lab.site.build_site"]
        subprocess.run(command, cwd=ROOT, check=True, env=outside_of_tests())


def pytest_collection_modifyitems(config, items):
    """Only --site runs tests of the site."""
    chosen, others = [], []
    for item in items:
        of_site = bool({"site", "lab", "executed_again"} & set(item.fixturenames))
        (chosen if of_site == config.getoption("site") else others).append(item)
    # It begins first, so that two workers end at about the same time.
    items[:] = sorted(chosen, key=lambda item: item.path.name not in LONG)
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session")
def readers_environment():
    return outside_of_tests()


@pytest.fixture(scope="session")
def checkpoint():
    return helpers.bundled_checkpoint("shapes-sd")


@pytest.fixture(scope="session")
def load():
    """A function that loads a checkpoint's pipeline and its parameters, in float32."""
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
def models():
    """Both bundled models of Stable Diffusion: parameters, configuration, tokenizer."""
    names = ("shapes-sd", "shapes-sdxl")
    return {name: sd.load(helpers.bundled_checkpoint(name).source) for name in names}


@pytest.fixture(scope="session")
def folder(models, tmp_path_factory):
    """A folder in diffusers' format with the bundled checkpoint of Stable Diffusion 1."""
    folder = tmp_path_factory.mktemp("saved")
    sd.save(models["shapes-sd"][0], helpers.bundled_checkpoint("shapes-sd").source, folder)
    return folder


@pytest.fixture(scope="session")
def small_sd():
    """Made-up parameters for ``small.SD``."""
    return small.sd_parameters()


@pytest.fixture(scope="session")
def flux2_folder(tmp_path_factory):
    """A folder in diffusers' format with a small FLUX.2."""
    return small.write_flux2(tmp_path_factory.mktemp("flux2"))


@pytest.fixture(scope="session")
def small_flux2(flux2_folder):
    """Its parameters, in float32, configuration and tokenizer."""
    return flux2.load(flux2_folder, jnp.float32)


@pytest.fixture(scope="session")
def any_sampler():
    """A context manager in which there is a sampler "any".

    Which of the named samplers it is, is an input of the program: so one program tests them all.
    """

    @contextmanager
    def any_sampler(which, names):
        kinds = [SAMPLERS[name] for name in names]

        def point(*inputs):
            return jax.lax.switch(which, [lambda kind=kind: kind.point(*inputs) for kind in kinds])

        def step(*inputs):
            *inputs, memories = inputs

            def take(n):
                x, memory = kinds[n].step(*inputs, memories[n])
                return x, (*memories[:n], memory, *memories[n + 1 :])

            return jax.lax.switch(which, [functools.partial(take, n) for n in range(len(kinds))])

        def memory(x):
            return tuple(kind.memory(x) for kind in kinds)

        more = [kind.more_calls for kind in kinds]
        more = jnp.array(more)[which] if any(more) else 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(SAMPLERS, "any", Sampler(point, step, memory, more))
            yield

    return any_sampler


@pytest.fixture(scope="session")
def serve():
    """A context manager in which a handler's class answers, at the address that it gives."""

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
    """The site's pages, as they were built when the tests began."""
    return ROOT / "build" / "site" / "html"


@pytest.fixture(scope="session")
def address(site, serve):
    class Files(SimpleHTTPRequestHandler):
        def __init__(self, *arguments):
            super().__init__(*arguments, directory=site)

    with serve(Files) as address:
        yield address


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("There is no Chromium here: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=NO_SANDBOX)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def screenshots():
    """A folder for people to look into."""
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def open_page(browser, address):
    """A function that opens a page of the site, in a context of its own."""
    contexts = []

    def open_page(name, dark=False, **options):
        contexts.append(browser.new_context(color_scheme="dark" if dark else "light", **options))
        page = contexts[-1].new_page()
        page.goto(f"{address}/{name}.html")
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def without_network(readers_environment):
    """A function that runs a command without a network.

    Where the system cannot take it away, tests are skipped.
    """
    outer = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if shutil.which("unshare") is None or subprocess.run([*outer, "true"]).returncode:
        pytest.skip("This system cannot take the network away.")

    def run(command, check=True, **options):
        options = {"env": readers_environment} | options
        result = subprocess.run([*outer, *command], capture_output=True, cwd=ROOT, **options)
        assert result.returncode == 0 or not check, (
            result.stdout.decode()[-3000:] + result.stderr.decode()[-3000:]
        )
        return result

    return run


@pytest.fixture(scope="session")
def sets():
    """The folders of both sets for a workshop, unpacked."""
    subprocess.run(
        [sys.executable, "-m", "lab.site.workshop"], cwd=ROOT, check=True, capture_output=True
    )
    for name in ("student", "instructor"):
        zipfile.ZipFile(workshop.BUILD / f"{name}.zip").extractall(workshop.BUILD)
    return {name: workshop.BUILD / name for name in ("student", "instructor")}


@pytest.fixture
def pretend(monkeypatch):
    """A function that makes packages look as if other versions of them were installed, or none."""
    truth = packages.installed_version

    def pretend(**versions: str | None) -> None:
        versions = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(
            packages,
            "installed_version",
            lambda name: versions[name] if name in versions else truth(name),
        )

    return pretend
