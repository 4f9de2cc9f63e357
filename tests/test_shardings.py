"""Chapter 9: what its functions do with any parameters, its table, and the record that it reads."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"pmap", "replicate", "unreplicate", "shard", "split_keys", "split", "prepare_prompts", "broadcast_to", "lower"}


def trees(chapter: Path) -> list[ast.Module]:
    """The code of a chapter, cell by cell, without the setup cell."""
    cells = [cell for cell in nbformat.read(chapter, as_version=4).cells if cell.cell_type == "code"]
    return [ast.parse(cell.source) for cell in cells if "setup" not in cell.metadata.get("tags", [])]


def definition(name: str, known: dict):
    """A function of the chapter, with what it uses."""
    for tree in trees(ROOT / "notebooks" / "09_shardings.ipynb"):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == name:
                exec(compile(ast.Module([node], []), name, "exec"), known)
                return known[name], node
    raise AssertionError(f"chapter 9 defines no {name}")


def idioms(tree: ast.AST) -> set[str]:
    """Which ways to spread work over devices the code uses: names of functions, with the keywords given to them."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        other = (name == "split" and not owner.endswith("random")) or (name == "lower" and not node.args)
        if name not in NAMES or other:  # texts and arrays are split and lowered, too
            continue
        found |= {name, *(f"{name}(…, {keyword.arg}=…)" for keyword in node.keywords)}
        if name == "replicate" and len(node.args) > 1:
            found.add("replicate(…, devices)")
        if name == "lower":
            found.add("pmap(…).lower" if "pmap" in owner or "lower" in owner else "lower")
    return found - {"lower"}


def test_the_table_has_every_idiom_of_the_chapters_before():
    used = set()
    for chapter in sorted((ROOT / "notebooks").glob("0[3-7]_*.ipynb")):
        used |= set().union(*map(idioms, trees(chapter)))
    assert {"pmap", "replicate", "replicate(…, devices)", "shard", "unreplicate", "split", "split_keys"} <= used
    _, node = definition("idioms", {})
    rows = node.body[0].value.elts
    assert len(rows) >= 10
    covered = set().union(*(idioms(row.elts[0]) for row in rows))
    assert used <= covered, f"the table lacks {used - covered}"
    for row in rows:
        assert not idioms(row.elts[1]) & {"pmap", "replicate", "shard", "unreplicate"}, ast.unparse(row)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@pytest.fixture(scope="module")
def split_pairs():
    return definition("split_pairs", {"jax": jax, "NamedSharding": NamedSharding, "P": P})[0]


def test_pairs_are_split_by_outputs_and_then_by_inputs(split_pairs, mesh):
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 6), jnp.float32)
    params = {"conv1": {"kernel": kernel, "bias": kernel}, "conv2": {"kernel": kernel}, "conv_in": {"kernel": kernel}}
    specs = jax.tree.map(lambda sharding: tuple(sharding.spec), split_pairs(params, mesh))
    assert specs["conv1"] == {"kernel": (None, None, None, "model"), "bias": (None,) * 4}
    assert specs["conv2"]["kernel"] == (None, None, "model", None)
    assert specs["conv_in"]["kernel"] == (None,) * 4


def test_what_does_not_divide_stays_whole(split_pairs, mesh):
    params = {"to_q": {"kernel": jax.ShapeDtypeStruct((4, 5), jnp.float32)}}
    assert tuple(split_pairs(params, mesh)["to_q"]["kernel"].spec) == (None, None)


def test_every_name_of_a_pair_occurs_in_the_pipeline(params):
    _, node = definition("split_pairs", {"jax": jax, "NamedSharding": NamedSharding, "P": P})
    names = set().union(*(ast.literal_eval(n) for n in ast.walk(node) if isinstance(n, ast.Set)))
    leaves = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    layers = {path[-2].key for path in leaves if getattr(path[-1], "key", None) == "kernel"}
    assert names <= layers


def test_collectives_are_counted(mesh):
    count, _ = definition("count_collectives", {"re": re, "Counter": Counter})
    split = NamedSharding(mesh, P("data"))
    x = jax.device_put(np.ones((8, 3), np.float32), split)
    assert count(jax.jit(lambda x: 2 * x).lower(x).compile()) == {}
    assert count(jax.jit(lambda x: x.sum()).lower(x).compile()) == {"all-reduce": 1}


def test_the_record_halves_what_is_split():
    record = json.loads((ROOT / "benchmarks" / "shardings.json").read_text())
    one, two, four = (record["parameters"][chips] for chips in ("1", "2", "4"))
    assert one / 2 < two < 0.6 * one
    assert one / 4 < four < 0.6 * two
    for chips, answer in record["block"].items():
        assert bool(answer["collectives"]) == (chips != "1")
        assert answer["flops"] == pytest.approx(record["block"]["1"]["flops"] / int(chips), rel=0.02)
    assert set(record["versions"]) >= {"jax", "libtpu", "diffusers"}
