"""The parts of course.sd against PyTorch's: names, small modules and schedulers."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from course import sd
from course.model.autoencoder import autoencoder_parameters, decode_in_tiles
from course.model.files import (
    OLD_NAMES,
    stack_layers,
    to_channels_first,
    to_channels_last,
    unstack_layers,
)
from course.model.parameters import declared_shapes
from course.sd import clip, configs, samplers, unet, vae
from tests.makers import common
from tests.makers.files import is_same


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-model.npz")


@pytest.fixture(scope="module")
def names():
    return common.read_json("pytorch-names")


def is_close(found, expected, tolerance=1e-5):
    """Whether the largest difference is this small, measured by the largest number."""
    assert found.shape == expected.shape
    largest = max(1, np.abs(expected).max())
    return np.abs(np.asarray(found) - expected).max() <= tolerance * largest


def read_part_config(part, options):
    return configs.read_class(options, common.PARTS[part], part)


def channels_last(x):
    return np.moveaxis(x, 1, -1)


def channels_first(x):
    return np.moveaxis(x, -1, 1)


@pytest.mark.parametrize("model", ["sd", "sd21", "sdxl"])
def test_names_and_shapes_are_those_of_pytorchs_modules(names, model):
    config = common.read_model(names[model]["configurations"])
    shapes = sd.parameter_shapes(config)
    expected = names[model]["parameters"]
    assert shapes.keys() == expected.keys()
    for part in expected:
        found = {name: value.shape for name, value in unstack_layers(shapes[part]).items()}
        assert found == {
            name: to_channels_last(name, np.broadcast_to(0, shape)).shape
            for name, shape in expected[part].items()
        }


def test_the_recorded_unets_have_as_many_numbers_as_those_on_the_hub(names):
    numbers = {}
    for model, recorded in names.items():
        shapes = recorded["parameters"]["unet"].values()
        numbers[model] = sum(np.prod(shape) for shape in shapes)
    assert numbers == {"sd": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684}


def make_up(parameters):
    """Numbers for declared parameters, which the reference makes up by their names in files."""
    numbers = {}
    for name, shape in unstack_layers(declared_shapes(parameters)).items():
        shape_in_pytorch = to_channels_first(name, np.broadcast_to(0, shape.shape)).shape
        numbers[name] = to_channels_last(name, common.made_up(name, shape_in_pytorch))
    return stack_layers(numbers)


def test_a_text_encoder_gives_what_pytorchs_gives(recorded):
    config = read_part_config("text_encoder_2", common.SMALL_TEXT)
    p = make_up(clip.text_parameters(config))
    encode = jax.jit(functools.partial(clip.encode_text, config=config))
    hidden, _, pooled = encode(p, ids=recorded["ids"])
    assert is_close(hidden[-2], recorded["text hidden"])
    assert is_close(pooled, recorded["pooled"])


@pytest.mark.parametrize("model", common.SMALL_UNETS)
def test_a_unet_gives_what_pytorchs_gives(recorded, model):
    config = read_part_config("unet", common.SMALL_UNETS[model])

    @jax.jit
    def run(p, latents, timestep, context, pooled, sizes):
        condition = unet.project_text(p, config, context, pooled, sizes)
        return unet.unet(p, config, latents, timestep, condition)

    output = run(
        make_up(unet.unet_parameters(config)),
        channels_last(common.made_up_input("latents", 2, 4, 8, 12)),
        jnp.float32([10, 700]),
        common.made_up_input("context", 2, 7, 32),
        common.made_up_input("pooled", 2, 24),
        jnp.float32(common.SIZES),
    )
    assert is_close(channels_first(output), recorded[f"unet {model}"])


def test_a_vae_gives_what_pytorchs_gives(recorded):
    config = read_part_config("vae", common.SMALL_VAE)
    image = 1 / (1 + np.exp(-common.made_up_input("image", 1, 3, 8, 12)))
    latents = common.made_up_input("latents of an image", 1, 4, 4, 6)

    @jax.jit
    def run(p, image, latents):
        mean, deviation = vae.encode(p, config, image)
        return mean, deviation, vae.decode(p, config, latents)

    p = make_up(autoencoder_parameters(config))
    mean, deviation, decoded = run(p, channels_last(image), channels_last(latents))
    assert is_close(channels_first(mean), recorded["mean"])
    assert is_close(channels_first(deviation), recorded["deviation"])
    assert is_close(channels_first(decoded), recorded["decoded"])


@pytest.mark.parametrize("sides", [(16, 16), (21, 9), (3, 30)])
@pytest.mark.parametrize("tile", [4, 5, 8, 64])
def test_tiles_pass_into_one_another(sides, tile):
    """Where a decoder looks at one latent only, tiles change nothing."""

    def enlarge(latents):
        return latents.repeat(8, axis=1).repeat(8, axis=2)

    latents = jax.random.normal(jax.random.key(0), (2, *sides, 3))
    found = decode_in_tiles(enlarge, latents, tile)
    np.testing.assert_allclose(found, enlarge(latents), atol=1e-6)


def test_a_vae_decodes_tiles_as_they_are_and_one_tile_as_the_whole():
    config = read_part_config("vae", common.SMALL_VAE)
    p = make_up(autoencoder_parameters(config))
    latents = channels_last(common.made_up_input("latents of an image", 1, 4, 4, 6))
    whole = vae.decode(p, config, latents)
    np.testing.assert_allclose(vae.decode(p, config, latents, tile=6), whole, atol=1e-5)
    tiles = vae.decode(p, config, latents, tile=4)
    scale = whole.shape[1] // 4
    # The left tile has four columns, of which the right one shares two.
    left = vae.decode(p, config, latents[:, :, :4])
    alone = np.s_[:, :, : 2 * scale]
    np.testing.assert_allclose(tiles[alone], left[alone], atol=1e-5)
    assert np.abs(tiles - whole).max() > 1e-3


@pytest.mark.parametrize("sampler", sd.SAMPLERS)
@pytest.mark.parametrize("spacing", common.SPACINGS)
@pytest.mark.parametrize("prediction", common.PREDICTIONS)
def test_a_sampler_ends_where_pytorchs_scheduler_ends(recorded, sampler, spacing, prediction):
    options = common.schedule_options(spacing, prediction)
    schedule = configs.read_class(options, common.SCHEDULERS[sampler], "made up")

    @jax.jit
    def run(noise, steps):
        return samplers.sample(common.stand_in, schedule, noise, steps)

    ends = np.stack([run(jnp.linspace(-2, 2, 8), steps) for steps in common.COUNTS])
    assert is_close(ends, recorded[f"{sampler} {spacing} {prediction}"], tolerance=1e-4)


def test_a_folder_from_before_2023_is_read(folder, models, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = {}
    for name, value in load_file(file).items():
        for old, new in OLD_NAMES.items():
            name = name.replace(f".{new}.", f".{old}.")
        tensors[name] = value
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in tensors
    save_file(tensors, file)
    file = copy / "text_encoder" / "model.safetensors"
    positions = {"text_model.embeddings.position_ids": np.arange(77)[None]}
    save_file(load_file(file) | positions, file)
    params, config, _ = models["shapes-sd"]
    found, found_config, _ = sd.load(copy)
    assert found_config == config
    assert is_same(found, params)
