"""Execute every chapter on each set of versions that a runtime brings, and end with a table: ``make test-matrix``.

Each set has an environment of its own in ``build/matrix``, made anew from a lock with hashes. On Colab's there is no
course at first, and a transformers without Flax: there the first chapter's setup cell installs what it does on Colab.
A Python that this machine lacks is named in the table, and fails nothing; a chapter that fails does.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.lock import COLAB_LOCK, COLAB_PYTHON, LOCK, ROOT

MATRIX = ROOT / "build" / "matrix"
# What the person who runs this has set would change what is tested.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("COLAB_", "JAX_", "KAGGLE_", "PYTHON", "TUTORIAL_"))}


@dataclass(frozen=True)
class Versions:
    """A Python and the packages on it."""

    name: str
    python: str
    lock: Path
    environment: dict[str, str] | None = None  # what the runtime sets; then the setup cell installs the course


SETS = (
    Versions("colab", COLAB_PYTHON, COLAB_LOCK, {"COLAB_RELEASE_TAG": "simulated", "TUTORIAL_SOURCE": ROOT.as_uri()}),
    Versions("newest", "3.12", LOCK),  # as on Kaggle, whose image takes the newest jax
    Versions("oldest-python", "3.11", LOCK),
)


def find_python(version: str) -> str | None:
    """The path of an interpreter of this version, or None."""
    command = [f"python{version}", "-c", "import sys; print(sys.executable)"]
    try:
        # pyenv puts every version on the path, and runs only those that are selected.
        found = subprocess.run(command, env=os.environ | {"PYENV_VERSION": version}, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def install(versions: Versions, interpreter: str) -> Path:
    """Make the set's environment anew, as a runtime starts from its image; the path of its Python."""
    folder = MATRIX / versions.name / "venv"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([interpreter, "-m", "venv", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--require-hashes", "-r", str(versions.lock)], check=True)
    if versions.environment is None:
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], check=True)
    return python


def versions_in(python: Path) -> str:
    code = (
        "import importlib.metadata as m, platform; "
        "versions = [f'{name} {m.version(name)}' for name in ('jax', 'flax', 'numpy')]; "
        "print(f'Python {platform.python_version()}', *versions, sep=', ')"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", help=f"by default all: {', '.join(versions.name for versions in SETS)}")
    wanted = parser.parse_args().sets
    unknown = set(wanted) - {versions.name for versions in SETS}
    if unknown:
        parser.error(f"there is no set {', '.join(sorted(unknown))}; there are {', '.join(v.name for v in SETS)}")
    rows, failed = [], False
    for versions in SETS:
        if wanted and versions.name not in wanted:
            continue
        if not wanted and versions.lock == LOCK and versions.python == f"{sys.version_info[0]}.{sys.version_info[1]}":
            rows.append((versions.name, f"Python {versions.python}", "", "left out: .venv is this, for `make test`"))
            continue
        interpreter = find_python(versions.python)
        if interpreter is None:
            print(f"NOT TESTED: {versions.name} needs Python {versions.python}, which is not installed here.")
            rows.append((versions.name, f"Python {versions.python}", "", "NOT TESTED: no such Python here"))
            continue
        print(
            f"{versions.name}: installing {versions.lock.relative_to(ROOT)} on Python {versions.python} ...", flush=True
        )
        try:
            python = install(versions, interpreter)
        except subprocess.CalledProcessError:
            failed = True
            rows.append((versions.name, f"Python {versions.python}", "", "failed: cannot be installed"))
            continue
        start = time.monotonic()
        command = [python, ROOT / "tools" / "run_chapters.py", "--to", MATRIX / versions.name / "chapters"]
        code = subprocess.run(command, cwd=ROOT, env=CLEAN | (versions.environment or {})).returncode
        failed |= code != 0
        rows.append((versions.name, versions_in(python), f"{time.monotonic() - start:.0f}", "failed" if code else "ok"))
    print(f"\n{'set':<16}{'versions':<56}{'seconds':>8}  chapters")
    for name, what, seconds, result in rows:
        print(f"{name:<16}{what:<56}{seconds:>8}  {result}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
