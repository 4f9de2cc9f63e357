"""Write the inventories by which the site refers to JAX's, Flax's, NumPy's and Python's documentation.

Sphinx would download them, and the site is to be built without a network. So ``docs/inventories`` keeps small ones with
the objects that this site refers to. They are not the projects' own files: names and kinds are checked against the
installed packages, and where their pages stand follows the pattern of each project's site, looked up in November 2026.
A reference to an object that is missing here fails the build: add its name below, and run this file.
"""

import argparse
import importlib
import inspect
import zlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "inventories"
# For each project, the address of an object's page, and the objects.
PROJECTS = {
    "jax": (
        "_autosummary/{name}.html#$",
        "jax.Array jax.block_until_ready jax.devices jax.distributed.initialize jax.jit jax.pmap jax.random.key "
        "jax.random.split",
    ),
    "jax.sharding": ("jax.sharding.html#$", "jax.sharding.Mesh jax.sharding.NamedSharding"),
    "flax": ("api_reference/flax.jax_utils.html#$", "flax.jax_utils.replicate"),
    "flax.training": ("api_reference/flax.training.html#$", "flax.training.common_utils.shard"),
    "numpy": ("reference/generated/{name}.html#$", "numpy.dtype numpy.ndarray"),
    "python": (
        "library/{module}.html#$",
        "bool float int list str tuple dict ImportError RuntimeError TypeError UserWarning ValueError "
        "collections.abc.Callable collections.abc.Iterator collections.abc.Sequence",
    ),
}


def find(name: str):
    """The object of this name, a builtin if it has no dot."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module or "builtins"), last)


def kind(thing) -> str:
    """What Sphinx calls such an object."""
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    return "function"


def entry(name: str, page: str) -> str:
    """A line of an inventory: name, kind, priority, address, title."""
    thing = find(name)
    module = name.rpartition(".")[0]
    if not module:
        module = (
            "exceptions" if kind(thing) == "exception" else "functions" if thing in (bool, float, int) else "stdtypes"
        )
    return f"{name} py:{kind(thing)} 1 {page.format(name=name, module=module)} -\n"


def inventory(project: str) -> bytes:
    """The contents of an inventory in Sphinx's format."""
    pages = [(page, names) for key, (page, names) in PROJECTS.items() if key.split(".")[0] == project]
    lines = sorted(entry(name, page) for page, names in pages for name in names.split())
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    return head.encode() + zlib.compress("".join(lines).encode(), 9)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for project in sorted({key.split(".")[0] for key in PROJECTS}):
        (FOLDER / f"{project}.inv").write_bytes(inventory(project))
        print(f"Wrote {project}.inv.")


if __name__ == "__main__":
    main()
