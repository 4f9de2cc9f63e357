"""Z-Image-Turbo's transformer against diffusers': names, shapes, outputs, and what it draws."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course.flux2 import sampler
from course.flux2.z_image import ZImageConfig, velocity, z_image_parameters
from tests.makers.common import FIXTURES, made_up, made_up_input

NAMES = json.loads((FIXTURES / "flux2_z_image_names.json").read_text(encoding="utf-8"))
RECORDED = np.load(FIXTURES / "flux2_z_image.npz")
MADE_OF = json.loads(str(RECORDED["made_of"]))
PADDED = {"filled up": 96, "whole": 64}  # to how many tokens prompts are padded
TOLERANCE = 2e-5


def read_config(options):
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    fields = ZImageConfig.__dataclass_fields__
    return ZImageConfig(**{name: values[name] for name in fields})


SMALL = read_config(MADE_OF["configuration"])


def is_close(found, expected):
    """Whether the largest difference is small, measured by the largest number."""
    assert found.shape == expected.shape
    largest = max(1, np.abs(expected).max())
    return np.abs(np.asarray(found) - expected).max() <= TOLERANCE * largest


def channels_last(x):
    return np.moveaxis(x, 1, -1)


def to_pytorch(name, shape):
    """A parameter's shape in PyTorch. Matrices are turned; the tokens that fill up are not."""
    if name.endswith("weight"):
        return shape[::-1]
    return shape


def shapes_in_pytorch(config):
    """Shapes by name, with ``{count}`` in place of the number of a block, as in the fixture."""
    found = {}
    for name, (shape, axes) in z_image_parameters(config).items():
        assert len(shape) == len(axes)
        if "*" in name:
            depth, *shape = shape
            name = name.replace("*", f"{{{depth}}}")
        found[name] = list(to_pytorch(name, tuple(shape)))
    return found


def make_up(config):
    """Numbers for the parameters, which the reference makes up by their names in files."""
    found = {}
    for name, parameter in z_image_parameters(config).items():

        def make(one, shape):
            value = made_up(one, to_pytorch(one, shape))
            return value.T if one.endswith("weight") else value

        if "*" in name:
            depth, *shape = parameter.shape
            ones = [make(name.replace("*", str(k)), tuple(shape)) for k in range(depth)]
            found[name] = np.stack(ones)
        else:
            found[name] = make(name, parameter.shape)
    return found


@pytest.fixture(scope="module")
def p():
    return make_up(SMALL)


def make_inputs(case):
    """Latents, prompts with padding that is not to be read, their mask, and diffusers' times."""
    height, width = MADE_OF["cases"][case]["size"]
    lengths = MADE_OF["cases"][case]["lengths"]
    latents = made_up_input(f"{case} latents", 2, SMALL.in_channels, height, width)
    given = made_up_input(f"{case} text", 2, max(lengths), SMALL.cap_feat_dim)
    text = np.full((2, PADDED[case], SMALL.cap_feat_dim), np.nan, np.float32)
    text[:, : max(lengths)] = given
    mask = np.arange(PADDED[case]) < np.array(lengths)[:, None]
    text[~mask] = np.nan
    return channels_last(latents), text, mask, np.float32(MADE_OF["cases"][case]["times"])


run = jax.jit(velocity, static_argnames="config")


def test_the_configuration_is_that_of_the_hub():
    assert read_config(NAMES["configuration"]) == ZImageConfig()


def test_names_and_shapes_are_those_of_diffusers():
    assert shapes_in_pytorch(ZImageConfig()) == NAMES["parameters"]


def test_it_has_as_many_numbers_as_the_model_on_the_hub():
    parameters = z_image_parameters(ZImageConfig()).values()
    assert sum(np.prod(each.shape) for each in parameters) == 6_154_908_736


@pytest.mark.parametrize("case", MADE_OF["cases"])
def test_it_gives_what_diffusers_gives_with_time_and_sign_reversed(p, case):
    latents, text, mask, time = make_inputs(case)
    found = run(p, SMALL, latents, text, mask, 1 - time)
    assert is_close(found, -channels_last(RECORDED[case]))


def test_with_eulers_method_it_draws_what_diffusers_pipeline_draws(p):
    latents, text, mask, _ = make_inputs("filled up")

    def move(x, time):
        return run(p, SMALL, x, text, mask, jnp.full(len(x), time))

    times = sampler.times(MADE_OF["steps"], MADE_OF["shift"])
    assert is_close(sampler.euler(move, latents, times), channels_last(RECORDED["drawn"]))


def test_the_real_model_gives_float32_of_bfloat16():
    p = {}
    for name, (shape, _) in z_image_parameters(ZImageConfig()).items():
        p[name] = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    latents = jax.ShapeDtypeStruct((2, 128, 96, 16), jnp.float32)
    text = jax.ShapeDtypeStruct((2, 512, 2560), jnp.bfloat16)
    mask = jax.ShapeDtypeStruct((2, 512), bool)
    time = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert jax.eval_shape(run, p, ZImageConfig(), latents, text, mask, time) == latents


@pytest.mark.parametrize(
    ("size", "tokens", "message"),
    [
        ((8, 7), 32, "There are 8 x 7 latents: choose even numbers."),
        ((8, 8), 40, "Prompts are padded to 40 tokens: choose a multiple of 32."),
        ((8, 8), 128, "Text and image need (130, 4, 4) positions"),
        ((26, 8), 32, "Text and image need (34, 13, 4) positions"),
    ],
)
def test_sizes_that_the_model_does_not_take_are_refused(size, tokens, message):
    latents = np.zeros((1, *size, 4), np.float32)
    text = np.zeros((1, tokens, 40), np.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        velocity({}, SMALL, latents, text, np.ones((1, tokens), bool), np.ones(1))
