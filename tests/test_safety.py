"""The repair of diffusers' safety checker, which calls JAX in a way that version 0.10 removed."""

import numpy as np
from diffusers.pipelines.stable_diffusion import safety_checker_flax
from transformers import CLIPConfig

from helpers.safety import repair_safety_checker

SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": 56,
}


def test_a_repaired_checker_flags_what_is_near_its_concepts(monkeypatch):
    """With an untrained checker; a concept's weight is the least cosine that flags an image."""
    monkeypatch.setattr(safety_checker_flax, "jax_cosine_distance", None)
    repair_safety_checker()
    config = CLIPConfig(vision_config=SMALL_VISION, projection_dim=8)
    checker = safety_checker_flax.FlaxStableDiffusionSafetyChecker(config)
    pixels = np.random.default_rng(0).normal(size=(2, 3, 224, 224))
    assert np.asarray(checker(pixels)).tolist() == [False, False]
    below_every_cosine = np.full(17, -1.1, np.float32)
    params = checker.params | {"concept_embeds_weights": below_every_cosine}
    assert np.asarray(checker(pixels, params)).tolist() == [True, True]
