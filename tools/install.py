"""Install the lock and the course into the environment of the Python that runs this, as ``.venv/bin/python`` does.

uv takes a tenth of pip's time. It comes out of the lock as well, through pip, which every new environment has.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
PIP = [sys.executable, "-m", "pip"]
# What pip's configuration calls them, and what uv does.
OPTIONS = {
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "trusted-host": "--allow-insecure-host",
}


def uv_settings(listed: str) -> tuple[list[str], dict[str, str]]:
    """The options and the environment that let uv look where pip does, out of what ``pip config list`` prints."""
    found = re.findall(r"^(global|install|:env:)\.(\S+?)=(.*)$", listed, flags=re.MULTILINE)
    # The environment counts more than what is set for ``pip install``, and this more than what is for all commands.
    found.sort(key=lambda line: ("global", "install", ":env:").index(line[0]))
    settings = {key: ast.literal_eval(value) for _, key, value in found}
    options = ["--index-strategy", "unsafe-best-match"]  # all places are equal, as for pip: hashes say what is right
    for key, option in OPTIONS.items():
        options += [word for value in settings.get(key, "").split() for word in (option, value)]
    return options, {"SSL_CERT_FILE": settings["cert"]} if "cert" in settings else {}


def install(python: str | Path, lock: Path) -> None:
    """Install a lock into an environment, and check its hashes.

    Raises
    ------
    subprocess.CalledProcessError
        If neither uv nor pip can do it; each says why.
    """
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    options, environment = uv_settings(listed)
    hashes = ["--require-hashes", "-r", str(lock)]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", str(python), *options, *hashes]
    if subprocess.run(uv, env=os.environ | environment).returncode:
        print("uv says above why it cannot install these packages. pip tries it now.", flush=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *hashes], check=True)


def add_course(python: str | Path) -> None:
    """Install the course itself, in editable form, into an environment that has the lock's packages."""
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    subprocess.run([str(python), "-m", "pip", "install", *options], check=True)


def main() -> None:
    # A requirement goes on over all lines that end in a backslash.
    uv = re.search(r"^uv==(.*\\\n)*.*\n", LOCK.read_text(), flags=re.MULTILINE).group()
    requirement = Path(sys.prefix, "uv.txt")
    requirement.write_text(uv)
    subprocess.run([*PIP, "install", "--quiet", "--require-hashes", "-r", str(requirement)], check=True)
    install(sys.executable, LOCK)
    add_course(sys.executable)


if __name__ == "__main__":
    main()
