"""What the tests share. JAX gets its simulated devices here, before any test starts it."""

import os

import diffusers
import jax.numpy as jnp
import pytest
import transformers
from diffusers import FlaxStableDiffusionPipeline

import helpers

# What the person who runs the tests has set would change what they test.
for variable in ("TUTORIAL_DEVICES", "TUTORIAL_CHECKPOINT", "JAX_PLATFORMS", "HF_ENDPOINT", "HF_TOKEN"):
    os.environ.pop(variable, None)
helpers.simulate_devices(8)
diffusers.logging.set_verbosity_error()
transformers.logging.set_verbosity_error()


@pytest.fixture(scope="session")
def checkpoint():
    return helpers.bundled_checkpoint("shapes-sd")


@pytest.fixture(scope="session")
def loaded(checkpoint):
    """The bundled pipeline and its parameters, in float32."""
    return FlaxStableDiffusionPipeline.from_pretrained(
        checkpoint.source, dtype=jnp.float32, safety_checker=None, feature_extractor=None
    )


@pytest.fixture(scope="session")
def pipeline(loaded):
    return loaded[0]


@pytest.fixture(scope="session")
def params(loaded):
    return loaded[1]
