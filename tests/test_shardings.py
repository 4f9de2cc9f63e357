"""Chapter 9: the functions that it shows, its table, and the record that it reads."""

import ast
import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course.shardings import split_guidance, split_pairs
from course.tpu.collectives import (
    Collective,
    count_collectives,
    find_collectives,
    read_collectives,
)

ROOT = Path(__file__).resolve().parents[1]
NAMES = {
    "pmap",
    "replicate",
    "unreplicate",
    "shard",
    "split_keys",
    "split",
    "prepare_prompts",
    "broadcast_to",
    "lower",
}


def trees(chapter: Path) -> list[ast.Module]:
    """The code of a chapter, cell by cell, without the setup cell."""
    found = []
    for cell in nbformat.read(chapter, as_version=4).cells:
        if cell.cell_type == "code" and "setup" not in cell.metadata.get("tags", []):
            lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
            found.append(ast.parse("\n".join(lines)))
    return found


def idioms(tree: ast.AST) -> set[str]:
    """Which ways to spread work over devices the code uses.

    They are names of functions, and these with the keywords that are given to them.
    """
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        owner = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
        other = (name == "split" and not owner.endswith("random")) or (
            name == "lower" and not node.args
        )
        if name not in NAMES or other:  # texts and arrays are split and lowered, too
            continue
        found |= {name, *(f"{name}(…, {keyword.arg}=…)" for keyword in node.keywords)}
        if name == "replicate" and len(node.args) > 1:
            found.add("replicate(…, devices)")
        if name == "lower":
            found.add("pmap(…).lower" if "pmap" in owner or "lower" in owner else "lower")
    return found - {"lower"}


@pytest.fixture(scope="module")
def rows():
    """The rows of chapter 9's table: pairs of expressions."""
    for tree in trees(ROOT / "notebooks" / "09_shardings.ipynb"):
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "idioms":
                return [row.elts for row in node.body[0].value.elts]
    raise AssertionError("chapter 9 defines no idioms")


def test_the_table_has_every_idiom_of_the_chapters_before(rows):
    used = set()
    for chapter in sorted((ROOT / "notebooks").glob("0[3-7]_*.ipynb")):
        used |= set().union(*map(idioms, trees(chapter)))
    assert {
        "pmap",
        "replicate",
        "replicate(…, devices)",
        "shard",
        "split",
        "split_keys",
    } <= used
    covered = set().union(*(idioms(old) for old, _ in rows))
    assert used <= covered, f"the table lacks {used - covered}"


def test_the_table_has_what_pmap_can_do_besides(rows):
    calls = [node for old, _ in rows for node in ast.walk(old) if isinstance(node, ast.Call)]
    keywords = {keyword.arg for call in calls if idioms(call) for keyword in call.keywords}
    assert keywords >= {"axis_name", "in_axes", "donate_argnums"}


def test_no_translation_uses_pmap_and_each_shard_map_is_jitted(rows):
    for _, new in rows:
        code = ast.unparse(new)
        assert not idioms(new) & {"pmap", "replicate", "shard", "unreplicate"}, code
        assert code.count("jax.shard_map(") == code.count("jax.jit(jax.shard_map(")


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


def test_pairs_are_split_by_outputs_and_then_by_inputs(mesh):
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 6), jnp.float32)
    params = {
        "conv1": {"kernel": kernel, "bias": kernel},
        "conv2": {"kernel": kernel},
        "conv_in": {"kernel": kernel},
    }
    specs = jax.tree.map(lambda sharding: tuple(sharding.spec), split_pairs(params, mesh))
    assert specs["conv1"] == {"kernel": (None, None, None, "model"), "bias": (None,) * 4}
    assert specs["conv2"]["kernel"] == (None, None, "model", None)
    assert specs["conv_in"]["kernel"] == (None,) * 4


def test_what_does_not_divide_stays_whole(mesh):
    params = {"to_q": {"kernel": jax.ShapeDtypeStruct((4, 5), jnp.float32)}}
    assert tuple(split_pairs(params, mesh)["to_q"]["kernel"].spec) == (None, None)


def test_every_name_of_a_pair_occurs_in_the_pipeline(params):
    source = ast.parse(inspect.getsource(split_pairs))
    names = set().union(
        *(ast.literal_eval(node) for node in ast.walk(source) if isinstance(node, ast.Set))
    )
    leaves = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    layers = {path[-2].key for path in leaves if getattr(path[-1], "key", None) == "kernel"}
    assert "to_q" in names
    assert names <= layers


def test_collectives_are_counted(mesh):
    x = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("data")))
    assert count_collectives(jax.jit(lambda x: 2 * x).lower(x).compile()) == {}
    assert count_collectives(jax.jit(lambda x: x.sum()).lower(x).compile()) == {"all-reduce": 1}


def test_a_collective_tells_its_bytes_and_where_it_comes_from(mesh):
    x = jax.device_put(np.ones((8, 3), np.float32), NamedSharding(mesh, P("data")))
    (found,) = find_collectives(jax.jit(lambda x: x.sum(axis=0)).lower(x).compile())
    assert (found.kind, found.bytes) == ("all-reduce", 3 * 4)
    assert "reduce_sum" in found.origin


def test_what_an_accelerator_starts_and_goes_on_from_is_counted_once():
    """These are lines of a program for a TPU.

    The start has other arrays in its result, too, and layouts have brackets.
    """
    lines = [
        "%all-reduce = bf16[2,1024]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.64), to_apply=%add, "
        'metadata={op_name="sum"}',
        "%start = (bf16[2,8]{1,0:T(8,128)}, bf16[2,8]{1,0}, u32[]{:S(2)}) "
        "collective-permute-start(%x), channel_id=4",
        "%done = bf16[2,8]{1,0:T(8,128)(2,1)} collective-permute-done(%start), "
        'metadata={op_name="jit(apply)/split"}',
        "%pieces = (pred[4]{0}, f32[]) all-to-all(%a, %b), channel_id=1",
    ]
    assert read_collectives("\n".join(lines)) == [
        Collective("all-reduce", 4096, "sum"),
        Collective("collective-permute", 32, "jit(apply)/split"),
        Collective("all-to-all", 8, ""),
    ]


@struct.dataclass
class Output:
    sample: jax.Array


def test_each_device_asks_the_unet_about_its_own_part_of_the_batch(mesh):
    asked = []

    def apply(variables, latents, timesteps, encoder_hidden_states):
        asked.append((latents.shape, timesteps.shape, encoder_hidden_states.shape))
        return Output(variables * latents + timesteps[:, None] + encoder_hidden_states.sum(axis=1))

    inputs = (jnp.float32(3), jnp.arange(8.0).reshape(4, 2), jnp.arange(4.0), jnp.ones((4, 5, 2)))
    halved = split_guidance(SimpleNamespace(config="the UNet's", apply=apply), "model")
    mapped = jax.shard_map(
        lambda *inputs: halved.apply(*inputs).sample,
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    noise = jax.jit(mapped)(*inputs)
    assert asked == [((2, 2), (2,), (2, 5, 2))]
    assert np.array_equal(noise, apply(*inputs).sample)
    assert halved.config == "the UNet's"


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "benchmarks" / "shardings.json").read_text())


def test_the_record_halves_what_is_split(record):
    one, two, four = (record["parameters"][chips] for chips in ("1", "2", "4"))
    assert one / 2 < two < 0.6 * one
    assert one / 4 < four < 0.6 * two
    for chips, answer in record["block"].items():
        assert bool(answer["collectives"]) == (chips != "1")
        assert answer["flops"] == pytest.approx(
            record["block"]["1"]["flops"] / int(chips), rel=0.02
        )
    assert set(record["versions"]) >= {"jax", "libtpu", "diffusers"}


def test_by_guidance_the_recorded_chips_exchange_noise_alone(record):
    assert record["block by guidance"]["collectives"] == []
    assert record["block by guidance"]["flops"] == pytest.approx(
        record["block"]["1"]["flops"] / 2, rel=0.02
    )
    (gather,) = record["pipeline by guidance"]["collectives"]
    assert gather["kind"] == "all-gather"
    assert gather["bytes"] == 2 * 4 * 8 * 8 * 2  # two answers of the bundled UNet, in bfloat16
