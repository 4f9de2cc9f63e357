"""Whole images of course.sd: those of PyTorch and of the Flax pipelines, from any input.

``python -m tests.makers.reference`` recorded PyTorch's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from course.sd import STATIC, generate, pipeline
from course.sd.configs import read_class
from course.sd.samplers import SAMPLERS
from helpers import bundled_checkpoint, count_compilations
from tests.makers import common
from tests.makers.small import SD

GUIDANCE = common.GUIDANCE


def farthest(images, others):
    """The largest difference of any two numbers, in steps of 255."""
    assert images.shape == others.shape
    return 255 * np.abs(np.asarray(images, np.float32) - np.asarray(others, np.float32)).max()


# The bundled checkpoints


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-model.npz")


@pytest.fixture(scope="module", params=["shapes-sd", "shapes-sdxl"])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def draw(name, models, recorded, any_sampler):
    """A function that draws the recorded prompts from the recorded latents by any sampler."""
    params, config, tokenize = models[name]
    ids = tokenize(common.PROMPTS)
    negative_ids = None if config.is_xl else tokenize([""])
    latents = np.moveaxis(recorded["latents"], 1, -1)
    samplers = list(SAMPLERS)

    def draw_any(params, which, steps):
        with any_sampler(which, samplers):
            inputs = (ids, None, negative_ids, steps, GUIDANCE, latents)
            return generate(params, config, *inputs, sampler="any")

    program = jax.jit(draw_any).lower(params, 0, 1).compile()

    def draw(sampler):
        return np.asarray(program(params, samplers.index(sampler), common.STEPS[sampler]))

    return draw


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_images_are_those_of_pytorchs_pipeline(draw, recorded, name, sampler):
    assert farthest(draw(sampler), recorded[f"{name} {sampler}"] / 65535) <= 0.05


def test_images_are_those_of_the_flax_pipeline(name, draw, load, recorded):
    """By the sampler that the checkpoint comes with."""
    checkpoint = bundled_checkpoint(name)
    flax_pipeline, params = load(checkpoint)
    ids = flax_pipeline.prepare_inputs(common.PROMPTS)
    sampler = {"shapes-sd": "ddim", "shapes-sdxl": "euler"}[name]
    sizes = (common.STEPS[sampler], checkpoint.height, checkpoint.height)
    program = jax.jit(flax_pipeline._generate, static_argnums=(3, 4, 5))
    expected = program(ids, params, None, *sizes, GUIDANCE, recorded["latents"])
    assert farthest(draw(sampler), expected) <= 1


# The small model


IDS = np.arange(8 * 7).reshape(8, 1, 7)
NEGATIVE = np.full((1, 1, 7), 98)
ALL_NEGATIVE = np.repeat(NEGATIVE, 8, axis=0)
KEYS = jax.random.split(jax.random.key(0), 8)
program = jax.jit(generate, static_argnames=STATIC)


@pytest.fixture(scope="module")
def draw_one(small_sd):
    """A function that draws the first prompt's image by itself, on one device."""

    def draw_one(negative_ids=NEGATIVE, steps=3, guidance=GUIDANCE):
        return program(small_sd, SD, IDS[:1], KEYS[:1], negative_ids, steps, guidance)

    return draw_one


@pytest.fixture(scope="module")
def draw_all(small_sd):
    """A function that draws all prompts' images on one device, with a negative prompt for each."""

    def draw_all(ids=IDS, keys=KEYS, guidance=(GUIDANCE,) * 8):
        return program(small_sd, SD, ids, keys, ALL_NEGATIVE, 3, np.float32(guidance))

    return draw_all


@pytest.fixture(scope="module")
def image(draw_one):
    return np.asarray(draw_one())


@pytest.fixture(scope="module")
def images(draw_all):
    return np.asarray(draw_all())


def test_with_shard_map_images_are_the_same_and_one_negative_prompt_serves(small_sd, image, images):
    def draw(params, ids, keys):
        return generate(params, SD, ids, keys, NEGATIVE, 3, GUIDANCE)

    mesh = Mesh(np.array(jax.devices()[:3]), ("data",))
    specs = (P(), P("data"), P("data"))
    mapped = jax.shard_map(draw, mesh=mesh, in_specs=specs, out_specs=P("data"))
    found = np.asarray(jax.jit(mapped)(small_sd, IDS[:3], KEYS[:3]))
    assert np.array_equal(found[:1], image)
    assert farthest(found, images[:3]) <= 0.5


def test_each_image_follows_its_own_prompts_key_and_guidance(draw_all, images):
    turned = draw_all(IDS[::-1], KEYS[::-1])
    assert farthest(turned[::-1], images) < 0.01
    assert farthest(turned, images) > 1
    found = draw_all(guidance=[GUIDANCE] * 4 + [0] * 4)
    assert farthest(found[:4], images[:4]) < 0.01
    assert farthest(found[4:], images[4:]) > 1


def test_at_a_guidance_of_1_or_less_the_prompt_alone_decides(small_sd, draw_one):
    unguided = program(small_sd, SD, IDS[:1], KEYS[:1], steps=3, guided=False)
    for scale in (1.0, 0.0):
        assert farthest(draw_one(guidance=scale), unguided) < 0.01


def test_different_inputs_compile_nothing_and_change_the_image(draw_one, image):
    with count_compilations() as compiled:
        others = [draw_one(NEGATIVE - 1), draw_one(steps=4), draw_one(guidance=7.5)]
        for steps in (-1, 0, 999, 1000):  # out of range
            assert np.isnan(draw_one(steps=steps)).all()
    assert compiled == []
    assert all(farthest(other, image) > 1 for other in others)


def test_in_bfloat16_the_image_is_almost_the_same(small_sd, image):
    params = jax.tree.map(lambda value: value.astype(jnp.bfloat16), small_sd)
    found = program(params, SD, IDS[:1], KEYS[:1], NEGATIVE, 3, GUIDANCE)
    assert found.dtype == jnp.float32
    assert 0 < 255 * np.abs(found - image).mean() < 3


def test_one_key_stands_for_the_noise_that_pipelines_draw_from_it():
    key = jax.random.key(5)
    expected = jax.random.normal(key, (8, 4, 8, 6)).transpose(0, 2, 3, 1)
    assert np.array_equal(pipeline.draw_noise(key, (8, 8, 6, 4)), expected)


# Guidance in halves and left out


@pytest.fixture(scope="module")
def guided(small_sd):
    """``generate`` without a network: it gives latents in the place of images.

    What stands in for the UNet depends on latents and text.
    """

    def answer(p, config, x, timestep, condition, attention, remat):
        about = next(iter(condition.words.values()))[0].mean((0, 2, 3, 4))
        return x * (1 + about.reshape(-1, 1, 1, 1))

    def guided(**options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "unet", answer)
            patch.setattr(pipeline, "decode", lambda p, config, latents, attention, tile: latents)
            return generate(small_sd, SD, IDS[:2], KEYS[:2], NEGATIVE, 3, 5.0, **options)

    return guided


@pytest.fixture(scope="module")
def late(guided):
    """What is drawn if guidance is left out below a timestep: nowhere, in some steps, in all."""
    draw = jax.jit(lambda below: guided(unguided_below=below))
    return {below: draw(below) for below in (0, 500, 1000)}


def by_halves(guided, devices):
    mesh = jax.make_mesh(
        (devices,), ("half",), devices=jax.devices()[:devices], axis_types=(AxisType.Auto,)
    )
    half = functools.partial(guided, guidance_axis="half")
    return jax.jit(jax.shard_map(half, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False))


def test_guidance_on_two_devices_draws_the_images_of_one(guided, late):
    assert jnp.abs(by_halves(guided, 2)() - late[0]).max() < 1e-5
    assert jnp.abs(late[1000] - late[0]).max() > 1e-2  # guidance does change them


@pytest.mark.parametrize("devices", [1, 3])
def test_guidance_needs_an_axis_of_two_devices(guided, devices):
    message = rf"the axis 'half' has {devices} device\(s\): give it two"
    with pytest.raises(ValueError, match=message):
        by_halves(guided, devices)()


def test_guidance_is_left_out_below_a_timestep_or_everywhere(guided, late):
    without = jax.jit(lambda: guided(guided=False))()
    assert jnp.abs(late[1000] - without).max() < 1e-5
    assert min(jnp.abs(late[500] - late[other]).max() for other in (0, 1000)) > 1e-2


# Configurations


UNET = "UNet2DConditionModel"
EULER = "EulerDiscreteScheduler"
REFUSALS = [
    ({}, "UNet3DConditionModel", "a file is for UNet3DConditionModel, .* choose one of CLIPText"),
    ({"act_fn": "gelu"}, UNET, "a file asks for act_fn = 'gelu', .*: it has 'silu'."),
    ({"down_block_types": ["AttnDownBlock2D"]}, UNET, "asks for down_block_types = .*: it has"),
    ({"class_embed_type": "timestep"}, UNET, "asks for class_embed_type = 'timestep', which"),
    ({"layers_per_block": [1, 2]}, UNET, r"asks for layers_per_block = \[1, 2\], which"),
    ({"layers_per_block": None}, UNET, "asks for layers_per_block = None, which"),
    ({"block_out_channels": 32}, UNET, "asks for block_out_channels = 32, which"),
    ({"prediction_type": "sample"}, EULER, "= 'sample', which .*: it has 'epsilon' and 'v_pre"),
    ({"trained_betas": [0.1]}, EULER, "asks for trained_betas = .*, which"),
]


@pytest.mark.parametrize(("options", "kind", "sentence"), REFUSALS)
def test_what_a_configuration_asks_for_in_vain_is_named(options, kind, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_class(options, kind, "a file")


def test_null_is_read_where_it_switches_off():
    """Scripts that converted files of the original layout wrote it so."""
    assert not read_class({"upcast_attention": None}, UNET, "a file").upcast_attention
