"""Traps that chapters warn of, beyond what they show.

If one is gone, the chapter must be rewritten. Where a chapter fails without its trap, its execution
fails, and nothing is repeated here.
"""

import jax
import jax.numpy as jnp
import pytest
from diffusers import FlaxPNDMScheduler, FlaxStableDiffusionPipeline
from flax.jax_utils import replicate

from helpers import create_key, prepare_prompts, split_keys

FEW = {"num_inference_steps": 2, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def inputs(pipeline, params):
    return prepare_prompts(pipeline, "a heart"), replicate(params), split_keys(create_key(0))


def test_a_variant_is_ignored(checkpoint):
    without_checker = {"safety_checker": None, "feature_extractor": None}
    _, params = FlaxStableDiffusionPipeline.from_pretrained(
        checkpoint.source, variant="bf16", **without_checker
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(params["unet"])} == {jnp.dtype("float32")}


def test_an_integer_guidance_scale_fails_without_naming_the_cause(pipeline, inputs):
    ids, p_params, keys = inputs
    with pytest.raises(ValueError) as error:
        pipeline(ids, p_params, keys, jit=True, guidance_scale=7, **FEW)
    assert "guidance" not in str(error.value)


def test_a_long_prompt_is_cut_without_a_word(pipeline, recwarn):
    assert pipeline.prepare_inputs("a heart " * 100).shape == (1, 77)
    assert not recwarn.list


def test_with_two_images_on_each_device_a_flag_is_taken_for_a_device(pipeline, inputs, monkeypatch):
    def flag_the_last(images, params, jit):
        return images, [False] * (len(images) - 1) + [True]

    ids, p_params, keys = inputs
    monkeypatch.setattr(pipeline, "safety_checker", "stand-in")
    monkeypatch.setattr(pipeline, "_run_safety_checker", flag_the_last)
    with pytest.raises(IndexError):
        pipeline(
            ids.repeat(2, axis=1),
            p_params | {"safety_checker": {}},
            keys,
            jit=True,
            guidance_scale=3.0,
            **FEW,
        )


def test_pndm_leaves_out_its_last_step():
    scheduler = FlaxPNDMScheduler(skip_prk_steps=True)
    state = scheduler.set_timesteps(scheduler.create_state(), 20, shape=(1, 4, 8, 8))
    assert len(state.timesteps) == 21  # the pipeline's loop makes 20 steps


# Lines of the original guides, of which a page says what they do today


def test_the_guides_assertion_never_fails():
    device_type = "cpu"
    with pytest.warns(SyntaxWarning, match="always true"):
        line = compile(
            'assert ("TPU" in device_type, "Available device is not a TPU")', "guide", "exec"
        )
    exec(line, {"device_type": device_type})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import jax.tools.colab_tpu", ImportError),
        ("from diffusers import make_image_grid", ImportError),
        (
            "from jax.experimental.compilation_cache import compilation_cache as cc;"
            "cc.initialize_cache",
            AttributeError,
        ),
    ],
)
def test_a_line_of_the_guides_fails(line, error):
    with pytest.raises(error):
        exec(line, {})


def test_lines_of_the_guides_that_still_work():
    from diffusers.utils import make_image_grid
    from huggingface_hub import notebook_login

    assert callable(make_image_grid) and callable(notebook_login)
    assert jax.random.PRNGKey(0).shape == (2,)
    assert jax.tree_util.tree_map(lambda leaf: leaf + 1, {"a": 1}) == {"a": 2}
