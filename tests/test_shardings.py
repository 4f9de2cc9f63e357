"""Chapter 9: rules and shardings, its page on `pmap`, collectives, and the record that it reads."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import sd
from course.sd.pipeline import draw_noise
from course.tpu.hlo import count_collectives
from course.tpu.records import recorded_splits
from helpers import create_key, prepare_prompts, split_keys

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
def page():
    return (ROOT / "docs" / "from-pmap.md").read_text()


@pytest.fixture(scope="module")
def rows(page):
    """The rows of the page's table: pairs of expressions."""
    found = re.findall(r"^\| `(.+)` \| `(.+)` \|$", page, flags=re.MULTILINE)
    return [tuple(ast.parse(code, mode="eval").body for code in row) for row in found]


def largest_difference(old, new) -> float:
    """Between arrays, or trees of them; the old may have copies of the new."""
    differences = []
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jax.dtypes.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.float64(a), np.float64(b)
        differences.append(np.abs(a.reshape(-1, *b.shape) - b).max())
    return max(differences)


def test_both_sides_of_every_row_give_the_same(page, rows, pipeline, params):
    names = {"pipeline": pipeline, "params": params, "jax": jax, "jnp": jnp, "np": np}
    names |= {"AxisType": AxisType, "Mesh": Mesh, "NamedSharding": NamedSharding, "P": P}
    names |= {"replicate": replicate, "unreplicate": unreplicate, "shard": shard}
    names |= {"create_key": create_key, "prepare_prompts": prepare_prompts}
    names |= {"split_keys": split_keys}
    exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)[1], names)
    assert len(rows) >= 20
    for row in rows:
        old, new = (eval(ast.unparse(side), names) for side in row)
        assert largest_difference(old, new) == 0, ast.unparse(row[0])


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


@pytest.fixture(scope="module")
def model(checkpoint):
    return sd.load(checkpoint.source, jnp.float32)


@pytest.fixture(scope="module")
def step(model):
    """A step of denoising for images that lie anywhere."""
    _, config, _ = model

    def step(params, ids, noise, empty):
        condition = sd.encode_condition(params, config, ids, empty, height=64, width=64)
        return sd.denoise_step(params, config, noise, jnp.float32(500), condition, 5.0)

    return jax.jit(step)


@pytest.fixture(scope="module")
def inputs(model):
    """Token ids, noise, and the ids of the empty prompt, for eight images."""
    _, _, tokenize = model
    ids = tokenize(["a small red heart on a white background", "a large blue star"] * 4)
    return ids, draw_noise(jax.random.split(jax.random.key(0), 8), (8, 8, 8, 4)), tokenize([""])


@pytest.fixture(scope="module")
def on_one_device(step, model, inputs):
    return np.asarray(step(model[0], *inputs))


# Axes of the mesh, rules, where the noise lies, and what must be exchanged.
WAYS = {
    "data": ({"data": 8}, sd.DATA_PARALLEL, P("data"), set()),
    "tensor": ({"data": 4, "model": 2}, sd.TENSOR_PARALLEL, P("data"), {"all-reduce"}),
    "fully sharded": ({"data": 8}, sd.FULLY_SHARDED, P("data"), {"all-gather"}),
    "sequence": (
        {"rows": 4},
        sd.DATA_PARALLEL,
        P(None, "rows"),
        {"all-gather", "collective-permute"},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_work_is_split_the_model_predicts_the_same(
    way, step, model, inputs, on_one_device
):
    params, config, _ = model
    sizes, rules, spec, exchanged = WAYS[way]
    chips = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = Mesh(np.array(chips).reshape(*sizes.values()), tuple(sizes))
    placed = jax.device_put(params, sd.shardings(config, mesh, rules))
    ids, noise, empty = inputs
    ids = jax.device_put(ids, NamedSharding(mesh, P(spec[0])))
    noise = jax.device_put(noise, NamedSharding(mesh, spec))
    empty = jax.device_put(empty, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        compiled = step.lower(placed, ids, noise, empty).compile()
        found = np.asarray(compiled(placed, ids, noise, empty))
    assert np.abs(found - on_one_device).max() < 1e-3
    assert exchanged <= set(count_collectives(compiled))
    if not exchanged:
        assert count_collectives(compiled) == {}


def test_an_axis_of_the_mesh_splits_the_last_axis_that_a_rule_gives_it(model):
    _, config, _ = model
    mesh = Mesh(np.array(jax.devices()), ("data",))
    placed = sd.shardings(config, mesh, sd.FULLY_SHARDED)["unet"]
    layer = "mid_block.attentions.0.transformer_blocks.*"
    assert tuple(placed[f"{layer}.attn1.to_q.weight"].spec) == (None, None, "data")
    assert tuple(placed[f"{layer}.attn1.to_out.0.weight"].spec) == (None, None, "data")


def test_images_stay_where_they_are_only_if_a_mesh_is_set(model, step, inputs):
    params, config, _ = model
    mesh = Mesh(np.array(jax.devices()), ("data",))
    placed = jax.device_put(params, sd.shardings(config, mesh, sd.FULLY_SHARDED))
    ids, noise, empty = inputs
    ids, noise = jax.device_put((ids, noise), NamedSharding(mesh, P("data")))
    arguments = (placed, ids, noise, jax.device_put(empty, NamedSharding(mesh, P())))
    free = count_collectives(step.lower(*arguments).compile())
    with jax.set_mesh(mesh):
        pinned = count_collectives(step.lower(*arguments).compile())
    assert pinned["all-gather"] > free["all-gather"]
    assert pinned.get("all-reduce", 0) < free["all-reduce"]


@pytest.mark.parametrize("sampler", sd.SAMPLERS)
def test_shard_map_knows_what_varies_with_every_sampler(model, inputs, sampler):
    params, config, _ = model
    ids, noise, empty = inputs

    def draw(params, ids, noise):
        return sd.generate(params, config, ids, None, empty, 2, latents=noise, sampler=sampler)

    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P("data"), P("data"))
    mapped = jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=P("data"))
    assert jax.eval_shape(mapped, params, ids, noise).shape == (8, 64, 64, 3)


@pytest.fixture(scope="module")
def splits():
    return recorded_splits("ask/shardings")


def test_every_way_is_recorded(splits):
    assert splits.keys() == WAYS.keys()
    whole = splits["data"].parameters
    assert splits["sequence"].parameters == whole
    assert whole / 8 < splits["fully sharded"].parameters < whole / 7.9
    assert whole / 2 < splits["tensor"].parameters < 0.75 * whole


def test_the_recorded_chips_share_the_work_of_their_images(splits):
    def flops_of_an_image(name):
        split = splits[name]
        chips = np.prod(list(split.mesh.values()))
        return split.report.schedule.flops * chips / split.images

    alone = flops_of_an_image("data")
    assert flops_of_an_image("fully sharded") == pytest.approx(alone, rel=0.05)
    # Rows at the edge of a chip's share are needed by its neighbour, too.
    assert alone < flops_of_an_image("sequence") < 1.1 * alone
    # Only transformers are split by heads: both chips compute every convolution.
    assert alone < flops_of_an_image("tensor") < 1.4 * alone


def test_recorded_weights_move_while_chips_calculate(splits):
    assert splits["data"].exchanges == ()
    schedule = splits["fully sharded"].report.schedule
    assert schedule.beside_exchange > 0.9 * schedule.flops
    assert splits["fully sharded"].asynchronous > 0.8
