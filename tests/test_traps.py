"""What the course says of JAX and of the original guides, and no chapter shows.

If one is gone, the text must be rewritten. What diffusers does stays as it is: no version after
this one has its Flax pipelines.
"""

import jax
import pytest
from flax.jax_utils import replicate

from helpers import create_key, prepare_prompts, split_keys

FEW = {"num_inference_steps": 2, "height": 64, "width": 64}


@pytest.fixture(scope="module")
def inputs(pipeline, params):
    return prepare_prompts(pipeline, "a heart"), replicate(params), split_keys(create_key(0))


def test_an_integer_guidance_scale_fails_without_naming_the_cause(pipeline, inputs):
    with pytest.raises(ValueError) as error:
        pipeline(*inputs, jit=True, guidance_scale=7, **FEW)
    assert "guidance" not in str(error.value)


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


def test_the_guides_assertion_never_fails():
    line = 'assert ("TPU" in device_type, "Available device is not a TPU")'
    with pytest.warns(SyntaxWarning, match="always true"):
        code = compile(line, "guide", "exec")
    exec(code, {"device_type": "cpu"})


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("import jax.tools.colab_tpu", ImportError),
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
    assert jax.random.PRNGKey(0).shape == (2,)
    assert jax.tree_util.tree_map(lambda leaf: leaf + 1, {"a": 1}) == {"a": 2}
