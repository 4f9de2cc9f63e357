"""What is installed and loaded: with hashes, and in formats that hold no code."""

import ast
import re
from importlib import metadata
from pathlib import Path

import nbformat
import pytest

from lab.site import lock

ROOT = Path(__file__).resolve().parents[1]
LOCKS = [lock.LOCK, *sorted((ROOT / "locks").glob("*.lock"))]


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_locked_requirement_has_a_version_and_a_hash(path):
    lines = [
        line
        for line in path.read_text().replace("\\\n", " ").splitlines()
        if not line.startswith("#")
    ]
    assert lines
    for line in lines:
        assert re.match(r"[a-z0-9-]+(\[[a-z0-9,-]+\])?==\S+ .*--hash=sha256:[0-9a-f]{64}", line), (
            line
        )


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_a_lock_says_what_to_install_and_not_from_where(path):
    assert "://" not in path.read_text()


def test_every_installation_of_a_lock_checks_the_hashes():
    """What goes in beside a lock is the course itself."""
    files = [
        "Makefile",
        "README.md",
        ".ci/run",
        *(ROOT / ".github").rglob("*.yml"),
        *(ROOT / "docs").rglob("*.md"),
    ]
    installs = [
        line
        for file in files
        if (ROOT / file).is_file()
        for line in (ROOT / file).read_text().splitlines()
        if re.search(r"pip\S* install\b.* (-r|--requirement) ", line)
    ]
    assert len(installs) >= 3
    assert all("--require-hashes" in line for line in installs), installs


def code_that_runs() -> dict[str, str]:
    """The code that readers run, by where it stands."""
    folders = ("helpers", "course", "lab")
    found = {
        str(file): file.read_text() for folder in folders for file in (ROOT / folder).rglob("*.py")
    }
    for chapter in (ROOT / "notebooks").glob("*.ipynb"):
        for number, cell in enumerate(nbformat.read(chapter, as_version=4).cells):
            if cell.cell_type == "code":
                lines = [
                    line
                    for line in cell.source.splitlines()
                    if not line.lstrip().startswith(("%", "!"))
                ]
                found[f"{chapter}, cell {number}"] = "\n".join(lines)
    return found


def unsafe_calls(code: str) -> list[str]:
    """The calls in a piece of code that can load and run other code."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            found += [
                name
                for name in names
                if name.split(".")[0] in {"pickle", "cloudpickle", "dill", "joblib"}
            ]
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
    # A compiled program can be saved in no other form. The chapter loads the file that it wrote,
    # and warns of others.
    (chapter,) = (ROOT / "notebooks").glob("07_*.ipynb")
    assert list(found.values()) == [["pickle"]]
    assert next(iter(found)).startswith(str(chapter))
    assert "load only files that you made yourself" in chapter.read_text()


def test_the_checkpoints_are_in_formats_that_hold_no_code():
    files = [file for file in (ROOT / "checkpoints").rglob("*") if file.is_file()]
    assert {file.suffix for file in files} <= {
        ".msgpack",
        ".safetensors",
        ".json",
        ".txt",
        ".md",
        ".png",
        ".jinja",  # the form of a chat, which transformers fills in, in a sandbox
    }
    assert any(file.suffix == ".msgpack" for file in files)


def test_the_reasons_for_which_make_audit_ignores_vulnerabilities_hold():
    """They stand in the Makefile."""
    for python in ("3.11", "3.12", "3.13"):
        assert not {"torch", "kernels"} & set(lock.locked_versions(python))
    models = Path(metadata.distribution("transformers").locate_file("transformers/models"))
    assert not list(models.glob("x_clip/*convert*"))
    code = "\n".join(code_that_runs().values())
    code = re.sub(r"\b(sd|flux2)\.generate\(", "", code)  # not that of transformers
    assert not re.search(r"import .*\bTrainer\b|LightGlue|\.generate\(|custom_generate", code)
    saving = {
        where for where, code in code_that_runs().items() if re.search(r"\.save_pretrained\(", code)
    }
    # Chapter 2 saves the pipeline of the bundled checkpoint.
    bundled = {"tokenizers.py", "02_bf16_loading.ipynb, cell 24"}
    assert {Path(where).name for where in saving} <= bundled
