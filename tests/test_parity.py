"""From the same weights, latents and scheduler, PyTorch's pipeline and the Flax pipeline draw the same pictures.

PyTorch's pictures are a fixture, made by training/pytorch_pictures.py, so this test needs no PyTorch. What remains
between the two is mostly the GELU of the UNet's feed-forward layers: exact there, a tanh approximation in Flax.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import bundled_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="module", params=["shapes-sd", "shapes-sdxl"])
def checkpoint(request):
    return bundled_checkpoint(request.param)


@pytest.fixture(scope="module")
def loaded(load, checkpoint):
    return load(checkpoint)


@pytest.fixture(scope="module")
def params(loaded):
    return loaded[1]


@pytest.fixture(scope="module")
def fixture(checkpoint):
    return np.load(FIXTURES / f"{checkpoint.name}.npz")


@pytest.fixture(scope="module")
def largest_difference(loaded, fixture, checkpoint):
    """A function from parameters to the largest difference of each picture, in steps of 255."""
    pipeline, _ = loaded
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))
    ids = pipeline.prepare_inputs(fixture["prompts"].tolist())
    steps, guidance = int(fixture["num_inference_steps"]), float(fixture["guidance_scale"])
    size = checkpoint.height, checkpoint.width

    def compare(params):
        images = generate(ids, params, None, steps, *size, guidance, jnp.asarray(fixture["latents"]))
        return 255 * np.abs(np.asarray(images) - fixture["images"].astype(np.float32)).max(axis=(1, 2, 3))

    return compare


def test_flax_draws_what_pytorch_draws(largest_difference, params):
    difference = largest_difference(params)
    assert len(difference) == 8
    assert difference.max() <= 1


def test_one_perturbed_weight_is_noticed(largest_difference, params):
    kernel = params["unet"]["conv_in"]["kernel"]
    broken = params | {
        "unet": params["unet"] | {"conv_in": params["unet"]["conv_in"] | {"kernel": kernel.at[0].add(0.1)}}
    }
    assert largest_difference(broken).max() > 1


def test_the_fixture_was_drawn_with_the_settings_of_the_chapters(fixture, checkpoint):
    assert int(fixture["num_inference_steps"]) == checkpoint.num_inference_steps
    assert float(fixture["guidance_scale"]) == checkpoint.guidance_scale
