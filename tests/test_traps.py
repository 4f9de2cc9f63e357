"""Each trap that a chapter warns of and that this machine can show. If one is gone, the chapter must be rewritten."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import FlaxEulerDiscreteScheduler, FlaxPNDMScheduler, FlaxStableDiffusionPipeline
from flax.jax_utils import replicate

from helpers import count_compilations, create_key, prepare_prompts, split_keys

FEW = {"num_inference_steps": 2, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def inputs(pipeline, params):
    return prepare_prompts(pipeline, "a heart"), replicate(params), split_keys(create_key(0))


def load(checkpoint, **arguments):
    arguments = {"safety_checker": None, "feature_extractor": None} | arguments
    return FlaxStableDiffusionPipeline.from_pretrained(checkpoint.source, **arguments)


def test_the_compute_dtype_does_not_change_the_stored_one(checkpoint):
    _, params = load(checkpoint, dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(params["unet"])} == {jnp.dtype("float32")}


def test_a_variant_is_ignored(checkpoint):
    _, params = load(checkpoint, variant="bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(params["unet"])} == {jnp.dtype("float32")}


def test_the_text_encoder_computes_in_float32(checkpoint):
    pipeline, params = load(checkpoint, dtype=jnp.bfloat16)
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params["text_encoder"])
    assert pipeline.text_encoder(pipeline.prepare_inputs("a heart"), params=params)[0].dtype == jnp.float32


def test_without_a_safety_checker_both_arguments_are_needed(checkpoint):
    with pytest.raises(ValueError, match=r"expected .*feature_extractor"):
        FlaxStableDiffusionPipeline.from_pretrained(checkpoint.source, safety_checker=None)


def test_a_scheduler_in_bfloat16_makes_nothing_but_nan(pipeline, params):
    scheduler = params["scheduler"]
    common = scheduler.common
    rounded = common.replace(alphas_cumprod=common.alphas_cumprod.astype(jnp.bfloat16))
    broken = params | {"scheduler": scheduler.replace(common=rounded)}
    images = pipeline(pipeline.prepare_inputs("a heart"), broken, create_key(0), **FEW).images
    assert np.isnan(images).all()


def test_an_integer_guidance_scale_fails_without_naming_the_cause(pipeline, inputs):
    ids, p_params, keys = inputs
    with pytest.raises(ValueError) as error:
        pipeline(ids, p_params, keys, jit=True, guidance_scale=7, **FEW)
    assert "guidance" not in str(error.value)


def test_two_prompts_without_jit_fail(pipeline, params):
    with pytest.raises((ValueError, TypeError), match=r"broadcast|shape"):
        pipeline(pipeline.prepare_inputs(["a heart", "a star"]), params, create_key(0), **FEW)


def test_generate_needs_its_four_missing_arguments(pipeline, inputs):
    with pytest.raises(TypeError, match="missing 4 required positional arguments"):
        jax.pmap(pipeline._generate)(*inputs)


def test_a_second_pipeline_object_compiles_again(checkpoint, pipeline, inputs):
    ids, p_params, keys = inputs
    arguments = {"jit": True, "guidance_scale": 2.0, **FEW}
    pipeline(ids, p_params, keys, **arguments)
    second, _ = load(checkpoint)
    with count_compilations() as same:
        pipeline(ids, p_params, keys, **arguments)
    with count_compilations() as other:
        second(ids, p_params, keys, **arguments)
    assert len(same) == 0
    assert len(other) >= 1


def test_guidance_scale_1_is_the_prompt_alone_and_0_the_empty_prompt(pipeline, params):
    """Classifier-free guidance is always on."""
    heart, empty = (pipeline.prepare_inputs(prompt) for prompt in ("a red heart", ""))
    generate = jax.jit(pipeline._generate, static_argnums=(3, 4, 5))
    without = generate(heart, params, create_key(0), 5, 64, 64, 0.0)
    of_empty = generate(empty, params, create_key(0), 5, 64, 64, 3.0)
    assert np.abs(np.asarray(without) - np.asarray(of_empty)).max() < 1e-3


def test_a_long_prompt_is_cut_without_a_word(pipeline, recwarn):
    assert pipeline.prepare_inputs("a heart " * 100).shape == (1, 77)
    assert not recwarn.list


def test_pndm_leaves_out_its_last_step():
    scheduler = FlaxPNDMScheduler(skip_prk_steps=True)
    state = scheduler.set_timesteps(scheduler.create_state(), 20, shape=(1, 4, 8, 8))
    assert len(state.timesteps) == 21  # the pipeline's loop makes 20 steps


def test_euler_needs_leading_timesteps():
    misses = {}
    for spacing in ("linspace", "leading"):
        scheduler = FlaxEulerDiscreteScheduler(timestep_spacing=spacing)
        state = scheduler.set_timesteps(scheduler.create_state(), 50)
        timesteps = np.asarray(state.timesteps)
        misses[spacing] = int((~np.isin(timesteps.astype(np.int32), timesteps)).sum())
    assert misses == {"linspace": 48, "leading": 0}


# Lines of the original guides, of which a page says what they do today


def test_the_guides_assertion_never_fails():
    device_type = "cpu"
    with pytest.warns(SyntaxWarning, match="always true"):
        line = compile('assert ("TPU" in device_type, "Available device is not a TPU")', "guide", "exec")
    exec(line, {"device_type": device_type})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import jax.tools.colab_tpu", ImportError),
        ("from diffusers import make_image_grid", ImportError),
        ("from jax.experimental.compilation_cache import compilation_cache as cc; cc.initialize_cache", AttributeError),
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
