"""What is installed and loaded: with hashes, in formats that hold no code, with no unexplained vulnerability."""

import ast
import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
import yaml

from tools import install, lock

ROOT = Path(__file__).resolve().parents[1]
LOCKS = [lock.LOCK, *sorted((ROOT / "locks").glob("*.lock"))]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_locked_requirement_has_a_version_and_a_hash(path):
    lines = [line for line in path.read_text().replace("\\\n", " ").splitlines() if not line.startswith("#")]
    assert len(lines) > 30
    for line in lines:
        assert re.match(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line), line


def test_every_installation_of_a_lock_checks_the_hashes():
    """Where a lock is installed, pip is told to; what goes in beside it is the course itself, and PyTorch to train."""
    files = ["Makefile", "README.md", ".ci/run", *(ROOT / ".github").rglob("*.yml"), *(ROOT / "docs").rglob("*.md")]
    installs = [
        line
        for file in files
        if (ROOT / file).is_file()
        for line in (ROOT / file).read_text().splitlines()
        if re.search(r"pip\S* install\b.* (-r|--requirement) ", line)
    ]
    assert len(installs) >= 3
    assert all("--require-hashes" in line for line in installs), installs


def test_uv_checks_the_hashes_and_so_does_pip_in_its_place(monkeypatch):
    commands = []

    def fail(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, returncode=1, stdout="")

    monkeypatch.setattr(subprocess, "run", fail)
    install.install("python", lock.LOCK)
    _, uv, pip = commands
    assert "uv" in uv and "uv" not in pip
    assert all({"--require-hashes", "-r", str(lock.LOCK)} <= set(command) for command in (uv, pip))


def test_uv_looks_for_packages_where_pip_does():
    options, environment = install.uv_settings(
        ":env:.index-url='https://c'\nglobal.extra-index-url='https://a\\nhttps://b'\n"
        "global.index-url='https://d'\nglobal.cert='file.pem'\ninstall.trusted-host='a'\n"
    )
    assert environment == {"SSL_CERT_FILE": "file.pem"}
    indexes = ["--default-index", "https://c", "--index", "https://a", "--index", "https://b"]
    assert options[2:] == [*indexes, "--allow-insecure-host", "a"]


def code_that_runs() -> dict[str, str]:
    """The code that readers run, by where it stands."""
    folders = ("helpers", "course", "stable_diffusion", "training")
    found = {str(file): file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py")}
    for chapter in (ROOT / "notebooks").glob("*.ipynb"):
        for number, cell in enumerate(nbformat.read(chapter, as_version=4).cells):
            if cell.cell_type == "code":
                lines = [line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!"))]
                found[f"{chapter}, cell {number}"] = "\n".join(lines)
    return found


def unsafe_calls(code: str) -> list[str]:
    """The calls in a piece of code that can load and run other code."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [name for name in names if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "joblib"}]
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load" and given.get("weights_only") != "True":
            found.append(name)
        for option in ("from_pt", "trust_remote_code", "allow_pickle", "custom_pipeline"):
            if given.get(option, "False") != "False":
                found.append(f"{name}({option}={given[option]})")
    return found


def test_no_code_loads_a_format_that_can_run_code():
    pieces = code_that_runs()
    assert len(pieces) > 50
    found = {where: calls for where, code in pieces.items() if (calls := unsafe_calls(code))}
    # A compiled program can be saved in no other form. The chapter loads the file that it wrote, and warns of others.
    (chapter,) = (ROOT / "notebooks").glob("07_*.ipynb")
    assert list(found.values()) == [["pickle"]]
    assert next(iter(found)).startswith(str(chapter))
    assert "load only files that you made yourself" in chapter.read_text()


def test_the_checkpoints_are_in_formats_that_hold_no_code():
    files = [file for file in (ROOT / "checkpoints").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {".msgpack", ".safetensors", ".json", ".txt", ".md", ".png"}
    assert any(file.suffix == ".msgpack" for file in files)


@pytest.fixture
def service(serve):
    """A service that knows a vulnerability of transformers, which is explained, and one of pillow, which is not."""
    known = {"transformers": ("PYSEC-2026-2289", "CVE-2026-4372"), "pillow": ("PYSEC-1999-1", "CVE-1999-1")}
    asked = []

    class Service(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def do_POST(self):
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name = query["package"]["name"]
            asked.append(name)
            answer = {}
            if name in known:
                identity, alias = known[name]
                package = {"name": name, "ecosystem": "PyPI"}
                events = {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99"}]}
                answer = {"vulns": [{"id": identity, "aliases": [alias], "summary": "bad"}]}
                answer["vulns"][0]["affected"] = [{"package": package, "ranges": [events]}]
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with serve(Service) as address:
        yield f"{address}/v1/query", asked


def run_audit(address: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tools.audit", "--osv-url", address]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_the_audit_asks_about_the_lock_and_names_what_nothing_explains(service):
    address, asked = service
    result = run_audit(address)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert {"jax", "transformers"} <= set(asked) <= set(lock.locked_versions(python))
    assert result.returncode == 1
    assert "pillow" in result.stdout and "transformers" not in result.stdout, result.stdout + result.stderr
    assert "ignored 1" in result.stderr


def test_a_service_that_does_not_answer_is_no_clean_bill():
    assert run_audit("http://127.0.0.1:9").returncode == 1


def test_the_reasons_in_the_list_hold():
    for python in ("3.11", "3.12", "3.13"):
        assert not {"torch", "kernels"} & set(lock.locked_versions(python))
    models = Path(metadata.distribution("transformers").locate_file("transformers/models"))
    assert not list(models.glob("x_clip/*convert*"))
    code = "\n".join(code_that_runs().values())
    code = re.sub(r"\b(sd|stable_diffusion)\.generate\(", "", code)  # not that of transformers
    assert not re.search(r"import .*\bTrainer\b|LightGlue|\.generate\(|custom_generate", code)
    saving = {where for where, code in code_that_runs().items() if re.search(r"\.save_pretrained\(", code)}
    assert {Path(where).parent.name for where in saving} <= {"training"}


def test_the_workflow_audits_every_week():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "checks.yml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert any("make audit" in step for step in steps)
