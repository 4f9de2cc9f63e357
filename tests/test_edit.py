"""Drawing over images, and from pure noise, as on PyTorch.

``python -m tests.makers.own_weights`` made what PyTorch draws.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from course import sd
from course.sd import edit, samplers, vae
from tests.makers import common
from tests.makers import files as make


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-own-weights.npz")


# Schedules that end in pure noise.


def test_a_schedule_that_ends_in_pure_noise_gives_pytorchs_image(models, recorded, any_sampler):
    params, config, tokenize = models["shapes-sd"]
    zero_snr = np.load(common.FIXTURES / "pytorch-zero-snr.npz")
    schedule = dataclasses.replace(
        config.schedule, rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    config = dataclasses.replace(config, schedule=schedule)
    ids = tokenize([str(prompt) for prompt in recorded["prompts"]])
    latents = np.moveaxis(zero_snr["latents"], 1, -1)
    names = ["ddim", "euler", "dpm++"]

    @jax.jit
    def draw(params, which):
        inputs = ids, jax.random.key(0), tokenize([""]), int(zero_snr["steps"]), 3.0, latents
        with any_sampler(which, names):
            return sd.generate(params, config, *inputs, sampler="any")

    for which, name in enumerate(names):
        found = draw(params, which)
        expected = zero_snr[name] / np.float32(65535)
        assert 255 * np.abs(found - expected).max() < 0.05, name


# Drawing over images. By which samplers diffusers did it, and at which strengths:
STRENGTHS = {"shapes-sd": {"ddim": 0.6, "euler": 0.8, "dpm++": 1.0}, "shapes-sdxl": {"euler": 0.75}}
CAN_START_LATE = list(STRENGTHS["shapes-sd"])
DRAWN_OVER = [
    (model, sampler, strength)
    for model, strengths in STRENGTHS.items()
    for sampler, strength in strengths.items()
]


@pytest.fixture(scope="module")
def pictures(recorded):
    return recorded["pictures"] / np.float32(255)


@pytest.fixture(scope="module")
def draw_over(models, recorded, pictures, any_sampler):
    """A function that draws over the recorded pictures, by one program for all samplers."""
    latents = np.moveaxis(recorded["noise"], 1, -1)

    @functools.partial(jax.jit, static_argnames="config")
    def program(params, config, which, ids, negative_ids, strength, mask):
        inputs = params, config, ids, jax.random.key(0), negative_ids, pictures
        with any_sampler(which, CAN_START_LATE):
            options = {"sampler": "any", "latents": latents}
            if mask is None:
                return edit.image_to_image(*inputs, strength, 20, 3.0, **options)
            return edit.inpaint(*inputs, mask, strength, 20, 3.0, **options)

    def draw_over(model, sampler, strength, mask=None):
        params, config, tokenize = models[model]
        edit.check_inputs(config, pictures, strength, mask)
        ids = tokenize([str(prompt) for prompt in recorded["picture prompts"]])
        negative_ids = None if config.is_xl else tokenize([""])
        which = CAN_START_LATE.index(sampler)
        return program(params, config, which, ids, negative_ids, strength, mask)

    return draw_over


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_image_to_image_gives_pytorchs_image(draw_over, recorded, model, sampler, strength):
    found = draw_over(model, sampler, strength)
    make.assert_same_image(found, recorded[f"{model} image to image {sampler} {strength}"])


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_inpainting_gives_pytorchs_image(draw_over, recorded, model, sampler, strength):
    found = draw_over(model, sampler, strength, recorded["mask"])
    make.assert_same_image(found, recorded[f"{model} inpainting {sampler} {strength}"])


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(p, config, images):
    mean, _ = vae.encode(p, config, images)
    return vae.decode(p, config, mean)


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_far_from_the_mask_inpainting_leaves_the_picture(
    draw_over, models, recorded, pictures, model, sampler, strength
):
    params, config, _ = models[model]
    found = draw_over(model, sampler, strength, recorded["mask"])
    by_the_vae_alone = there_and_back(params["vae"], config.vae, pictures)
    far = np.ones((64, 64), bool)
    far[8:, 8:] = False  # pixels 16 to 56 are drawn, in whole latents; and one latent around
    error = 255 * np.abs(found - pictures)[:, far].mean()
    own_error = 255 * np.abs(by_the_vae_alone - pictures)[:, far].mean()
    assert error < own_error + 0.5


IMAGES = np.full((1, 64, 64, 3), 0.5, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES[:, 1:]}, "has 63 × 64 pixels: resize it to multiples of 16"),
        ({"images": IMAGES * 255}, "divide bytes by 255"),
        ({"images": IMAGES * np.nan}, "go from nan to nan"),
        ({"images": np.ones((1, 64, 64, 4))}, r"images have the shape \(1, 64, 64, 4\)"),
        ({"images": IMAGES[0]}, r"images have the shape \(64, 64, 3\)"),
        ({"strength": 1.5}, "strength is 1.5: choose 0 to 1"),
        ({"strength": -0.1}, "strength is -0.1"),
        ({"strength": float("nan")}, "strength is nan"),
        ({"mask": np.ones((32, 32))}, r"mask has the shape \(32, 32\)"),
    ],
)
def test_what_cannot_be_drawn_over_is_refused_in_a_sentence(models, changes, message):
    _, config, _ = models["shapes-sd"]
    inputs = {"images": IMAGES, "strength": 0.5} | changes
    with pytest.raises(ValueError, match=message):
        edit.check_inputs(config, **inputs)


def test_pndm_does_not_start_in_the_middle(models):
    _, config, _ = models["shapes-sd"]
    latents = jnp.zeros((1, 8, 8, 4))
    with pytest.raises(ValueError, match="'pndm' cannot start from an image: choose ddim"):
        samplers.sample(None, config.schedule, latents, 5, "pndm", image=latents)
