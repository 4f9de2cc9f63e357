"""Chapter 9: how both models are split over devices, its page on `pmap`, and what is recorded."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.jax_utils import replicate, unreplicate
from flax.training.common_utils import shard
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import flux2, sd
from course.tpu.hlo import count_collectives
from course.tpu.records import recorded_splits
from helpers import bundled_checkpoint, create_key, prepare_prompts, split_keys
from tests.makers import small

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"sd": sd, "flux2": flux2}


def largest_difference(old, new) -> float:
    """Between arrays, or trees of them; the old may have copies of the new."""
    differences = []
    for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        if jax.dtypes.issubdtype(jnp.result_type(a), jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.float64(a), np.float64(b)
        differences.append(np.abs(a.reshape(-1, *b.shape) - b).max())
    return max(differences)


def test_both_sides_of_every_row_about_pmap_give_the_same(pipeline, params):
    page = (ROOT / "docs" / "from-pmap.md").read_text()
    names = {"pipeline": pipeline, "params": params, "jax": jax, "jnp": jnp, "np": np}
    names |= {"AxisType": AxisType, "Mesh": Mesh, "NamedSharding": NamedSharding, "P": P}
    names |= {"replicate": replicate, "unreplicate": unreplicate, "shard": shard}
    names |= {"create_key": create_key, "prepare_prompts": prepare_prompts}
    names |= {"split_keys": split_keys}
    exec(re.search(r"```python\n(.*?)```", page, flags=re.DOTALL)[1], names)
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) >= 20
    for row in rows:
        old, new = (eval(side, names) for side in row)
        assert largest_difference(old, new) == 0, row[0]


# Rules


def mesh_of(**sizes):
    """A mesh of so many devices along each axis."""
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


@pytest.fixture(scope="module", params=PACKAGES)
def library(request):
    """A model's package, and the configuration of its bundled checkpoint."""
    package = PACKAGES[request.param]
    return package, package.read_config(bundled_checkpoint(f"shapes-{request.param}").source)


def test_each_device_holds_as_much_of_the_parameters_as_rules_say(library):
    package, config = library
    shapes = package.parameter_shapes(config)

    def held(data, model, rules):
        where = package.shardings(config, mesh_of(data=data, model=model), rules)
        pieces = jax.tree.map(lambda x, place: np.prod(place.shard_shape(x.shape)), shapes, where)
        return sum(jax.tree.leaves(pieces))

    everything = held(8, 1, package.DATA_PARALLEL)
    assert everything / 8 < held(8, 1, package.FULLY_SHARDED) < everything / 7
    assert everything / 2 < held(4, 2, package.TENSOR_PARALLEL) < everything
    both = held(4, 2, package.TENSOR_PARALLEL | package.FULLY_SHARDED)
    assert everything / 8 < both < everything / 3


LAYER = "mid_block.attentions.0.transformer_blocks.*"
SPECS = [
    ("sd", "TENSOR_PARALLEL", f"unet {LAYER}.attn1.to_q.weight", P(None, None, "model")),
    ("sd", "TENSOR_PARALLEL", f"unet {LAYER}.attn1.to_out.0.weight", P(None, "model", None)),
    ("sd", "TENSOR_PARALLEL", f"unet {LAYER}.ff.net.2.weight", P(None, "model", None)),
    # Two axes have a rule for the mesh's axis "data": the last one is split.
    ("sd", "FULLY_SHARDED", f"unet {LAYER}.attn1.to_q.weight", P(None, None, "data")),
    ("sd", "FULLY_SHARDED", f"unet {LAYER}.attn1.to_out.0.weight", P(None, None, "data")),
    (
        "flux2",
        "TENSOR_PARALLEL",
        "transformer transformer_blocks.*.attn.to_q.weight",
        P(None, None, "model"),
    ),
    (
        "flux2",
        "TENSOR_PARALLEL",
        "transformer transformer_blocks.*.ff.linear_out.weight",
        P(None, "model", None),
    ),
    (
        "flux2",
        "TENSOR_PARALLEL",
        "transformer transformer_blocks.*.attn.norm_q.weight",
        P(None, None),
    ),
]


@pytest.mark.parametrize(("library", "rules", "name", "spec"), SPECS, indirect=["library"])
def test_rules_split_these_axes(library, rules, name, spec):
    package, config = library
    where = package.shardings(config, mesh_of(data=4, model=2), getattr(package, rules))
    part, name = name.split()
    assert where[part][name].spec == spec
    if rules == "TENSOR_PARALLEL":  # no rule for heads splits the one head of the VAE
        assert all(each.is_fully_replicated for each in where["vae"].values())


@pytest.mark.parametrize(
    ("devices", "rules", "sentence"),
    [
        ((1, 7), {"mlp": "model"}, "and 7 devices do not divide [0-9]+: choose another number of"),
        ((8, 1), {"embed": "host"}, r"The mesh has no axis 'host': choose one of data, model\."),
        ((8, 1), {"head": "model"}, "No parameter has an axis 'head': choose one of .*embed, h"),
    ],
)
def test_rules_that_do_not_fit_are_refused_in_a_sentence(library, devices, rules, sentence):
    package, config = library
    mesh = mesh_of(data=devices[0], model=devices[1])
    with pytest.raises(ValueError, match=sentence):
        package.shardings(config, mesh, rules)


# Images


@pytest.fixture(scope="module")
def small_models(small_sd, small_flux2):
    """Small models: parameters, a program, and its inputs for eight images."""
    empty = np.full((1, 1, 7), 98)

    def draw_sd(params, noise, ids):
        return sd.generate(params, small.SD, ids, None, empty, 2, latents=noise)

    params, config, tokenize = small_flux2
    ids, mask = tokenize(["a star", "a heart", "a small red star", "a large blue ring"] * 2)

    def draw_flux2(params, noise, ids, mask):
        return flux2.generate(params, config, ids, mask, noise, height=16, width=16, steps=2)

    noise = jax.random.normal(jax.random.key(0), (8, 8, 8, 4))
    inputs = (noise, np.arange(8 * 7).reshape(8, 1, 7))
    tokens = noise.reshape(8, 4, -1)[..., :32]
    return {
        "sd": SimpleNamespace(
            config=small.SD, params=small_sd, draw=jax.jit(draw_sd), inputs=inputs
        ),
        "flux2": SimpleNamespace(
            config=config, params=params, draw=jax.jit(draw_flux2), inputs=(tokens, ids, mask)
        ),
    }


# The mesh, rules, where noise lies, and what must be exchanged.
WAYS = {
    "data": ({"data": 8}, "DATA_PARALLEL", P("data"), set()),
    "tensor": ({"data": 4, "model": 2}, "TENSOR_PARALLEL", P("data"), {"all-reduce"}),
    "fully sharded": ({"data": 4}, "FULLY_SHARDED", P("data"), {"all-gather"}),
    "sequence": (
        {"rows": 4},
        "DATA_PARALLEL",
        P(None, "rows"),
        {"all-gather", "collective-permute"},
    ),
}


@pytest.fixture(scope="module")
def lower(small_models):
    """A function that lowers a model's program for a way to split it, and gives its inputs.

    JAX is told of the mesh, unless the images are free to move.
    """

    def lower(name, way, free=False):
        model = small_models[name]
        sizes, rules, spec, _ = WAYS[way]
        mesh = mesh_of(**sizes)
        where = PACKAGES[name].shardings(model.config, mesh, getattr(PACKAGES[name], rules))
        noise, *texts = model.inputs
        placed = [
            jax.device_put(model.params, where),
            jax.device_put(noise, NamedSharding(mesh, spec)),
            *jax.device_put(texts, NamedSharding(mesh, P(spec[0]))),
        ]
        with nullcontext() if free else jax.set_mesh(mesh):
            return model.draw.lower(*placed), placed

    return lower


@pytest.fixture(scope="module")
def on_one_device(small_models):
    return {
        name: np.asarray(each.draw(each.params, *each.inputs))
        for name, each in small_models.items()
    }


@pytest.mark.parametrize(
    ("name", "way"), [*(("sd", way) for way in WAYS), ("flux2", "data"), ("flux2", "tensor")]
)
def test_however_the_work_is_split_the_images_are_the_same(name, way, lower, on_one_device):
    lowered, inputs = lower(name, way)
    compiled = lowered.compile()
    assert np.abs(np.asarray(compiled(*inputs)) - on_one_device[name]).max() < 0.2 / 255
    exchanged = WAYS[way][3]
    collectives = count_collectives(compiled)
    assert exchanged <= set(collectives)
    if not exchanged:
        assert collectives == {}


def test_images_stay_where_they_are_only_if_a_mesh_is_set(lower):
    free, pinned = (
        count_collectives(lower("sd", "fully sharded", free)[0].compile()) for free in (True, False)
    )
    assert pinned["all-gather"] > free["all-gather"]
    assert pinned.get("all-reduce", 0) < free["all-reduce"]


@pytest.mark.parametrize("sampler", sd.SAMPLERS)
def test_shard_map_knows_what_varies_with_every_sampler(small_models, sampler):
    noise, ids = small_models["sd"].inputs

    def draw(params, ids, noise):
        empty = ids[:1]
        return sd.generate(params, small.SD, ids, None, empty, 2, latents=noise, sampler=sampler)

    specs = (P(), P("data"), P("data"))
    mapped = jax.shard_map(draw, mesh=mesh_of(data=8), in_specs=specs, out_specs=P("data"))
    assert jax.eval_shape(mapped, small_models["sd"].params, ids, noise).shape == (8, 8, 8, 3)


# What the TPU compiler said of Stable Diffusion XL


@pytest.fixture(scope="module")
def splits():
    return recorded_splits("ask/shardings")


def test_recorded_chips_hold_and_do_their_share(splits):
    assert splits.keys() == WAYS.keys()
    whole = splits["data"].parameters
    assert splits["sequence"].parameters == whole
    assert whole / 8 < splits["fully sharded"].parameters < whole / 7.9
    assert whole / 2 < splits["tensor"].parameters < 0.75 * whole
    flops = {}  # of an image
    for way, split in splits.items():
        chips = np.prod(list(split.mesh.values()))
        flops[way] = split.report.schedule.flops * chips / split.images
    alone = flops["data"]
    assert flops["fully sharded"] == pytest.approx(alone, rel=0.05)
    # Rows at the edge of a chip's share are needed by its neighbour, too.
    assert alone < flops["sequence"] < 1.1 * alone
    # Only transformers are split by heads: both chips compute every convolution.
    assert alone < flops["tensor"] < 1.4 * alone


def test_recorded_weights_move_while_chips_calculate(splits):
    assert splits["data"].exchanges == ()
    schedule = splits["fully sharded"].report.schedule
    assert schedule.beside_exchange > 0.9 * schedule.flops
    assert splits["fully sharded"].asynchronous > 0.8
