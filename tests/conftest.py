"""What the tests share. JAX gets its simulated devices here, before any test starts it."""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import diffusers
import jax
import jax.numpy as jnp
import nbformat
import pytest
import transformers
from diffusers import FlaxDiffusionPipeline
from playwright.sync_api import sync_playwright

import helpers
from stable_diffusion.samplers import SAMPLERS, Sampler
from tools import matrix, offline, workshop

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# What the person who runs the tests has set would change what they test.
for variable in list(os.environ):
    if variable.startswith(("COLAB_", "HF_", "JAX_", "KAGGLE_", "TUTORIAL_", "XLA_")):
        del os.environ[variable]
# XLA's programs for a CPU compile in half of the time, and then run more slowly. The chapters do without.
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
helpers.simulate_devices(8)
# What one test compiles, others need not. The chapters do without: they show what compiling costs.
CACHE = tempfile.TemporaryDirectory(prefix="programs-")
jax.config.update("jax_compilation_cache_dir", CACHE.name)
os.environ["JAX_COMPILATION_CACHE_DIR"] = CACHE.name  # for processes that tests start
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()


def pytest_addoption(parser):
    parser.addoption("--matrix", action="store_true", help="execute the chapters on all runtimes but this one")
    parser.addoption("--site", action="store_true", help="run the tests of the site and of JupyterLab, and no others")


def pytest_collection_modifyitems(config, items):
    """What looks at executed chapters comes last, for they run beside others. Only --site runs tests of the site."""
    chosen, others = [], []
    for item in items:
        of_site = bool({"site", "lab", "executed_again"} & set(item.fixturenames))
        (chosen if of_site == config.getoption("site") else others).append(item)
    items[:] = sorted(chosen, key=lambda item: "executed" in item.fixturenames)
    config.hook.pytest_deselected(items=others)


@pytest.fixture(scope="session", autouse=True)
def execute(request):
    """A function that gives the execution of a runtime's chapters. Those here begin before the first test."""
    wanted, started = {}, {}
    for item in request.session.items:
        if "executed" in item.fixturenames:
            runtime, chapter = item.callspec.params["where_and_what"]
            wanted.setdefault(runtime.name, {})[chapter] = None

    def execute(runtime):
        if runtime.name not in started:
            started[runtime.name] = matrix.Execution(runtime, list(wanted[runtime.name]))
        return started[runtime.name]

    if matrix.HERE.name in wanted:
        execute(matrix.HERE)
        if matrix.TESTS_CORES:
            for thread in os.listdir("/proc/self/task"):  # XLA has threads already, if collecting has started JAX
                os.sched_setaffinity(int(thread), matrix.TESTS_CORES)
    yield execute
    for execution in started.values():
        execution.stop()


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
def any_sampler():
    """A context manager in which there is a sampler "any": which of those named it is, is an input of a program."""

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
    subprocess.run([sys.executable, "-m", "tools.build_site"], cwd=ROOT, check=True, env=matrix.without_tests_own())
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
        # Chromium's sandbox refuses root, which is who runs in a container.
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if root else [])
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
def without_network():
    """A function that runs a command without a network; where the system has none to take away, tests are skipped."""
    if reason := offline.why_not():
        pytest.skip(reason)

    def run(command, check=True, **options):
        outer = [sys.executable, "-m", "tools.offline", *command]
        options = {"env": matrix.without_tests_own()} | options
        result = subprocess.run(outer, capture_output=True, cwd=ROOT, **options)
        assert result.returncode == 0 or not check, result.stdout.decode()[-3000:] + result.stderr.decode()[-3000:]
        return result

    return run


@pytest.fixture(scope="session")
def sets():
    """The folders of both sets for a workshop, unpacked."""
    subprocess.run([sys.executable, "-m", "tools.workshop"], cwd=ROOT, check=True, capture_output=True)
    for name in ("student", "instructor"):
        zipfile.ZipFile(workshop.BUILD / f"{name}.zip").extractall(workshop.BUILD)
    return {name: workshop.BUILD / name for name in ("student", "instructor")}


@pytest.fixture(scope="session")
def executed_again(sets, without_network, tmp_path_factory):
    """The cells of the instructor's chapter 3, from the unpacked set, executed without a network."""
    folder = tmp_path_factory.mktemp("again")
    chapter = sets["instructor"] / "notebooks" / "03_replicate_shard.ipynb"
    without_network([sys.executable, "-m", "tools.run_chapters", chapter, "--to", folder])
    return nbformat.read(folder / chapter.name, as_version=4).cells
