"""Rules that split the parameters of both models over devices."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from course import flux2, sd
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


def test_each_device_holds_as_much_of_the_parameters_as_rules_say(library):
    package, config = library
    shapes = package.parameter_shapes(config)

    def held(data, model, rules):
        return held_on_each(shapes, package.shardings(config, mesh_of(data, model), rules))

    everything = held(8, 1, package.DATA_PARALLEL)
    assert everything / 8 < held(8, 1, package.FULLY_SHARDED) < everything / 7
    assert everything / 2 < held(4, 2, package.TENSOR_PARALLEL) < everything
    both = held(4, 2, package.TENSOR_PARALLEL | package.FULLY_SHARDED)
    assert everything / 8 < both < everything / 3


def test_tensor_parallel_splits_heads_and_feed_forward_channels_only(library):
    package, config = library
    where = package.shardings(config, mesh_of(4, 2), package.TENSOR_PARALLEL)
    for part, parameters in package.model_parameters(config).items():
        for name, parameter in parameters.items():
            is_split = not where[part][name].is_fully_replicated
            assert is_split == bool({"heads", "mlp", "heads_and_mlp"} & set(parameter.axes)), name


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
