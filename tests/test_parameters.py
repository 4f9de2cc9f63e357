"""What both models ask of their parameters: rules that split them, and refusals in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from course import flux2, sd
from course.tpu.programs import CONFIGURATIONS
from helpers import bundled_checkpoint

MODELS = {"shapes-sd": sd, "shapes-flux2": flux2}


@pytest.fixture(scope="module", params=MODELS)
def library(request):
    """A model's package, and the configuration of its bundled checkpoint."""
    package = MODELS[request.param]
    return package, package.read_config(bundled_checkpoint(request.param).source)


def mesh_of(data, model):
    """A mesh of so many groups of devices, and so many in each."""
    devices = np.array(jax.devices()[: data * model])
    return Mesh(devices.reshape(data, model), ("data", "model"))


def held_on_each(shapes, where):
    """How many numbers are on each device."""
    pieces = jax.tree.map(lambda x, place: np.prod(place.shard_shape(x.shape)), shapes, where)
    return sum(jax.tree.leaves(pieces))


def test_fully_sharded_parameters_take_an_eighth_and_tensor_parallel_ones_less(library):
    package, config = library
    shapes = package.parameter_shapes(config)

    def held(data, model, rules):
        return held_on_each(shapes, package.shardings(config, mesh_of(data, model), rules))

    everything = held(8, 1, package.DATA_PARALLEL)
    assert everything / 8 < held(8, 1, package.FULLY_SHARDED) < everything / 7
    assert everything / 2 < held(4, 2, package.TENSOR_PARALLEL) < everything
    both = held(4, 2, package.TENSOR_PARALLEL | package.FULLY_SHARDED)
    assert everything / 8 < both < everything / 3


def test_no_rule_for_heads_splits_the_one_head_of_the_vae(library):
    package, config = library
    where = package.shardings(config, mesh_of(4, 2), package.TENSOR_PARALLEL)
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
    with pytest.raises(ValueError, match=sentence):
        package.shardings(config, mesh_of(*devices), rules)


def shape(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def draw_with(package, params):
    """The shape of what these parameters draw: two images of a published model."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if package is sd:
        config = sd.read_config(CONFIGURATIONS / "sd")
        ids = shape(2, 1, 77, dtype=jnp.int32)
        return jax.eval_shape(
            lambda *inputs: sd.generate(inputs[0], config, *inputs[1:]), params, ids, key, ids
        )
    inputs = (
        shape(2, 512, dtype=jnp.int32),
        shape(2, 512, dtype=bool),
        shape(2, 4096, 128, dtype=jnp.float32),
    )
    return jax.eval_shape(
        lambda *inputs: flux2.generate(inputs[0], flux2.Config(), *inputs[1:], 1024, 1024),
        params,
        *inputs,
    )


PUBLISHED = {"sd": (sd, sd.read_config(CONFIGURATIONS / "sd")), "flux2": (flux2, flux2.Config())}
SPOILED = {
    ("sd", "unet", "conv_in.bias", None): r"is missing: give parameters .* has it as \(320,\)\.",
    ("sd", "unet", "conv_in.bias", (4,)): r"has the shape \(4,\): give .* has it as \(320,\)\.",
    ("sd", "vae", "post_quant_conv.weight", (1, 1, 4, 3)): r"has the shape \(1, 1, 4, 3\): give",
    ("flux2", "transformer", "proj_out.weight", None): r"is missing: .* as \(3072, 128\)\.",
    ("flux2", "transformer", "proj_out.weight", (3072,)): r"has the shape \(3072,\): give",
    ("flux2", "vae", "bn.running_mean", (32,)): r"has the shape \(32,\): .* has it as \(128,\)\.",
}


@pytest.mark.parametrize(("model", "part", "name", "sizes"), SPOILED)
def test_a_parameter_that_is_missing_or_does_not_fit_is_named(model, part, name, sizes):
    package, config = PUBLISHED[model]
    params = package.parameter_shapes(config, jnp.bfloat16)
    del params[part][name]
    if sizes:
        params[part][name] = shape(*sizes)
    sentence = f"The parameter {name} of {part} {SPOILED[model, part, name, sizes]}"
    with pytest.raises(ValueError, match=sentence):
        draw_with(package, params)


@pytest.mark.parametrize(("model", "side"), [("sd", 512), ("flux2", 1024)])
def test_shapes_alone_tell_the_shape_of_the_images(model, side):
    package, config = PUBLISHED[model]
    images = draw_with(package, package.parameter_shapes(config, jnp.bfloat16))
    assert (images.shape, images.dtype) == ((2, side, side, 3), jnp.float32)
