"""Whole images of course.sd: those of the Flax pipelines and of PyTorch, from any input.

``python -m tests.makers.reference`` recorded PyTorch's. Since ours match both, the images of the
Flax pipelines match those of PyTorch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import sd
from course.model import layers
from course.sd import (
    STATIC,
    Config,
    ScheduleConfig,
    TextConfig,
    UNetConfig,
    VAEConfig,
    generate,
    pipeline,
    unet,
)
from course.sd.configs import read_class
from course.sd.samplers import SAMPLERS
from course.tpu.hlo import count_collectives
from helpers import bundled_checkpoint, count_compilations
from tests.makers import common

GUIDANCE = common.GUIDANCE


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-model.npz")


@pytest.fixture(scope="module", params=["shapes-sd", "shapes-sdxl"])
def checkpoint(request):
    return bundled_checkpoint(request.param)


@pytest.fixture(scope="module")
def own_sampler(checkpoint):
    return {"shapes-sd": "ddim", "shapes-sdxl": "euler"}[checkpoint.name]


@pytest.fixture(scope="module")
def model(checkpoint):
    return sd.load(checkpoint.source)


def compile_drawing(model, recorded, any_sampler, samplers):
    """A function that draws the recorded prompts from the recorded latents with these samplers."""
    params, config, tokenize = model
    ids = tokenize(common.PROMPTS)
    negative_ids = None if config.is_xl else tokenize([""])
    latents = np.moveaxis(recorded["latents"], 1, -1)

    def draw_any(params, which, steps):
        with any_sampler(which, samplers):
            return generate(
                params,
                config,
                ids,
                jax.random.key(0),
                negative_ids,
                steps,
                GUIDANCE,
                latents,
                sampler="any",
            )

    program = jax.jit(draw_any).lower(params, 0, 1).compile()

    def draw(sampler):
        return np.asarray(program(params, samplers.index(sampler), common.STEPS[sampler]))

    return draw


@pytest.fixture(scope="module")
def draw(model, recorded, any_sampler):
    return compile_drawing(model, recorded, any_sampler, list(SAMPLERS))


@pytest.fixture(scope="module")
def draw_as_flax(model, recorded, any_sampler, own_sampler):
    """The same with the GELU and the epsilon that Flax has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "gelu", jax.nn.gelu)
        patch.setattr(unet, "TRANSFORMER_EPSILON", 1e-5)
        return compile_drawing(model, recorded, any_sampler, [own_sampler])


@pytest.fixture(scope="module")
def flax_images(load, checkpoint, recorded, own_sampler):
    """Images of the checkpoint's Flax pipeline, by the sampler that it comes with."""
    flax_pipeline, params = load(checkpoint)
    ids = flax_pipeline.prepare_inputs(common.PROMPTS)
    steps = common.STEPS[own_sampler]
    side = checkpoint.height
    program = jax.jit(flax_pipeline._generate, static_argnums=(3, 4, 5))
    return program(ids, params, None, steps, side, side, GUIDANCE, recorded["latents"])


def farthest(images, others):
    """The largest difference of any two numbers, in steps of 255."""
    assert images.shape == others.shape
    return 255 * np.abs(np.asarray(images, np.float32) - np.asarray(others, np.float32)).max()


def test_images_are_those_of_the_flax_pipeline(draw, flax_images, own_sampler):
    assert farthest(draw(own_sampler), flax_images) <= 1


def test_with_the_gelu_and_epsilon_of_flax_they_are_so_to_a_hundredth(
    draw_as_flax, flax_images, own_sampler
):
    assert farthest(draw_as_flax(own_sampler), flax_images) <= 0.01


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_images_are_those_of_pytorchs_pipeline(draw, recorded, checkpoint, sampler):
    assert farthest(draw(sampler), recorded[f"{checkpoint.name} {sampler}"] / 65535) <= 0.05


# A small model with all parts, whose images mean nothing: what follows is true of any.
SMALL = Config(
    text=(
        TextConfig(
            vocab_size=99,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=7,
            eos_token_id=98,
        ),
    ),
    unet=UNetConfig(
        sample_size=8,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        block_out_channels=(8,),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=16,
        attention_head_dim=2,
    ),
    vae=VAEConfig(block_out_channels=(8,), norm_num_groups=4),
    schedule=ScheduleConfig("ddim", steps_offset=1),
)
IDS = np.arange(8 * 7).reshape(8, 1, 7)
NEGATIVE = np.full((1, 1, 7), 98)
ALL_NEGATIVE = np.repeat(NEGATIVE, 8, axis=0)
KEYS = jax.random.split(jax.random.key(0), 8)
program = jax.jit(generate, static_argnames=STATIC)


@pytest.fixture(scope="module")
def small():
    """Made-up parameters of the small model."""
    random = np.random.default_rng(0)

    def make_up(shape):
        numbers = random.standard_normal(shape.shape, shape.dtype)
        return numbers / np.sqrt(np.prod(shape.shape[:-1]))

    return jax.tree.map(make_up, sd.parameter_shapes(SMALL))


@pytest.fixture(scope="module")
def image(small):
    """The first prompt's image by itself, drawn on one device."""
    return np.asarray(program(small, SMALL, IDS[:1], KEYS[:1], NEGATIVE, 3, GUIDANCE))


@pytest.fixture(scope="module")
def images(small):
    """All prompts' images on one device, with a negative prompt for each."""
    return np.asarray(program(small, SMALL, IDS, KEYS, ALL_NEGATIVE, 3, GUIDANCE))


@pytest.fixture(scope="module")
def draw_on(small):
    """A function that draws an image on each of some devices, by ``shard_map`` or ``jit`` alone."""

    def draw(params, ids, keys):
        return generate(params, SMALL, ids, keys, NEGATIVE, 3, GUIDANCE)

    @functools.cache
    def draw_on(devices, mapped):
        mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
        function = draw
        if mapped:
            function = jax.shard_map(
                draw,
                mesh=mesh,
                in_specs=(P(), P("data"), P("data")),
                out_specs=P("data"),
            )
        split = NamedSharding(mesh, P("data"))
        inputs = (
            jax.device_put(small, NamedSharding(mesh, P())),
            jax.device_put(IDS[:devices], split),
            jax.device_put(KEYS[:devices], split),
        )
        compiled = jax.jit(function).lower(*inputs).compile()
        return np.asarray(compiled(*inputs)), count_collectives(compiled)

    return draw_on


@pytest.mark.parametrize("devices", [3, 8])
def test_with_shard_map_an_image_is_the_same_on_any_number_of_devices(draw_on, image, devices):
    found, _ = draw_on(devices, True)
    assert len(found) == devices
    assert np.array_equal(found[:1], image)
    assert np.array_equal(found[:3], draw_on(3, True)[0])


def test_with_jit_alone_it_is_almost_the_same_and_devices_exchange_nothing(draw_on, images):
    found, collectives = draw_on(8, False)
    assert farthest(found, images) <= 0.5
    assert collectives == {}


def test_one_negative_prompt_serves_for_all(draw_on, images):
    assert farthest(draw_on(8, True)[0], images) <= 0.5


def test_a_different_negative_prompt_gives_different_images(small, image):
    assert farthest(program(small, SMALL, IDS[:1], KEYS[:1], NEGATIVE - 1, 3, GUIDANCE), image) > 1


def test_each_image_follows_its_own_prompts_and_key(small, images):
    turned = program(small, SMALL, IDS[::-1], KEYS[::-1], ALL_NEGATIVE, 3, GUIDANCE)
    assert farthest(turned[::-1], images) < 0.01
    assert farthest(turned, images) > 1


def test_guidance_may_differ_from_image_to_image(small, images):
    scales = np.float32([GUIDANCE] * 4 + [0] * 4)
    found = program(small, SMALL, IDS, KEYS, ALL_NEGATIVE, 3, scales)
    assert farthest(found[:4], images[:4]) < 0.01
    assert farthest(found[4:], images[4:]) > 1


def test_at_a_guidance_of_1_or_less_the_prompt_alone_decides(small):
    unguided = program(small, SMALL, IDS[:1], KEYS[:1], steps=3, guided=False)
    for scale in (1.0, 0.0):
        guided = program(small, SMALL, IDS[:1], KEYS[:1], IDS[1:2], 3, scale)
        assert farthest(guided, unguided) < 0.01


def test_different_steps_and_guidance_compile_nothing(small, image):
    with count_compilations() as compiled:
        others = [
            program(small, SMALL, IDS[:1], KEYS[:1], NEGATIVE, *new)
            for new in ((4, GUIDANCE), (3, 7.5))
        ]
    assert compiled == []
    assert all(farthest(other, image) > 1 for other in others)


@pytest.mark.parametrize("steps", [-1, 0, 999, 1000])
def test_in_a_compiled_program_steps_out_of_range_give_nan(small, image, steps):
    assert np.isnan(program(small, SMALL, IDS[:1], KEYS[:1], NEGATIVE, steps, GUIDANCE)).all()


def test_in_bfloat16_the_image_is_almost_the_same(small, image):
    params = jax.tree.map(lambda value: value.astype(jnp.bfloat16), small)
    found = program(params, SMALL, IDS[:1], KEYS[:1], NEGATIVE, 3, GUIDANCE)
    assert found.dtype == jnp.float32
    assert 0 < 255 * np.abs(found - image).mean() < 3


def test_one_key_stands_for_the_noise_that_pipelines_draw_from_it(small, monkeypatch):
    monkeypatch.setattr(pipeline, "sample", lambda model, schedule, noise, *_: noise)
    monkeypatch.setattr(pipeline, "decode", lambda params, config, latents, _: latents)
    key = jax.random.key(5)
    noise = jax.jit(lambda params: generate(params, SMALL, IDS, key, NEGATIVE))(small)
    assert np.array_equal(noise, jax.random.normal(key, (8, 4, 8, 8)).transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("options", "kind", "sentence"),
    [
        (
            {},
            "UNet3DConditionModel",
            "a file is for UNet3DConditionModel, .* choose one of CLIPTextModel, ",
        ),
        (
            {"act_fn": "gelu"},
            "UNet2DConditionModel",
            "a file asks for act_fn = 'gelu', .*: it has 'silu'.",
        ),
        (
            {"down_block_types": ["AttnDownBlock2D"]},
            "UNet2DConditionModel",
            "asks for down_block_types = .*: it has",
        ),
        (
            {"class_embed_type": "timestep"},
            "UNet2DConditionModel",
            "asks for class_embed_type = 'timestep', which",
        ),
        (
            {"layers_per_block": [1, 2]},
            "UNet2DConditionModel",
            r"asks for layers_per_block = \[1, 2\], which",
        ),
        (
            {"layers_per_block": None},
            "UNet2DConditionModel",
            "asks for layers_per_block = None, which",
        ),
        (
            {"block_out_channels": 32},
            "UNet2DConditionModel",
            "asks for block_out_channels = 32, which",
        ),
        (
            {"prediction_type": "sample"},
            "EulerDiscreteScheduler",
            "asks for prediction_type = 'sample', which .*: it has 'epsilon' and 'v_prediction'",
        ),
        (
            {"trained_betas": [0.1]},
            "EulerDiscreteScheduler",
            "asks for trained_betas = .*, which",
        ),
    ],
)
def test_what_a_configuration_asks_for_in_vain_is_named(options, kind, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_class(options, kind, "a file")


def test_null_is_read_where_it_switches_off():
    """Scripts that converted files of the original layout wrote it so."""
    config = read_class({"upcast_attention": None}, "UNet2DConditionModel", "a file")
    assert not config.upcast_attention
