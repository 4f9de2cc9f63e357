"""Write the inventories by which the site refers to JAX, Flax, NumPy and Python.

Sphinx would download them, but the site is built without a network. So ``docs/inventories`` keeps
small ones with the objects that this site refers to. Names and kinds come from the installed
packages; the addresses follow the pattern of each project's site, looked up in November 2026. A
reference to an object that is missing here fails the build: add its name below, and run this file.
"""

import argparse
import importlib
import inspect
import zlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "inventories"
# For each project: patterns of its pages' addresses, and the objects whose pages follow each.
PROJECTS = {
    "jax": {
        "_autosummary/{name}.html#$": (
            "jax.Array",
            "jax.block_until_ready",
            "jax.devices",
            "jax.distributed.initialize",
            "jax.jit",
            "jax.pmap",
            "jax.random.key",
            "jax.random.split",
        ),
        "jax.sharding.html#$": ("jax.sharding.Mesh", "jax.sharding.NamedSharding"),
    },
    "flax": {
        "api_reference/flax.jax_utils.html#$": ("flax.jax_utils.replicate",),
        "api_reference/flax.training.html#$": ("flax.training.common_utils.shard",),
    },
    "numpy": {"reference/generated/{name}.html#$": ("numpy.dtype", "numpy.ndarray")},
    "python": {
        "library/functions.html#$": ("bool", "float", "int"),
        "library/stdtypes.html#$": ("dict", "list", "str", "tuple"),
        "library/exceptions.html#$": (
            "ImportError",
            "RuntimeError",
            "TypeError",
            "UserWarning",
            "ValueError",
        ),
        "library/collections.abc.html#$": (
            "collections.abc.Callable",
            "collections.abc.Iterator",
            "collections.abc.Sequence",
        ),
    },
}


def kind(name: str) -> str:
    """What Sphinx calls the object of this name, a builtin if it has no dot."""
    module, _, last = name.rpartition(".")
    thing = getattr(importlib.import_module(module or "builtins"), last)
    if not inspect.isclass(thing):
        return "function"
    if issubclass(thing, BaseException):
        return "exception"
    return "class"


def inventory(project: str) -> bytes:
    """The contents of an inventory in Sphinx's format."""
    lines = []  # name, kind, priority, address, title
    for page, names in PROJECTS[project].items():
        for name in names:
            lines.append(f"{name} py:{kind(name)} 1 {page.format(name=name)} -\n")
    head = f"# Sphinx inventory version 2\n# Project: {project}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    return head.encode() + zlib.compress("".join(sorted(lines)).encode(), 9)


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    for project in PROJECTS:
        (FOLDER / f"{project}.inv").write_bytes(inventory(project))
        print(f"Wrote {project}.inv.")


if __name__ == "__main__":
    main()
