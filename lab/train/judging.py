"""Draw captions with Stable Diffusion, and count what the judge finds right."""

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np

from course import sd
from course.sd.tokenizer import Tokenizer
from course.shapes import judge, scenes

BATCH = 25
GUIDANCE = 3.0


def make_drawing(
    config: sd.Config, tokenize: Tokenizer
) -> Callable[[dict, list[str], int, float], np.ndarray]:
    """Return a function from parameters, captions, steps and guidance to pictures.

    They are float32, (captions, height, width, 3), from 0 to 1. Picture ``k`` starts from the noise
    of ``jax.random.key(k)``.
    """
    generate = jax.jit(sd.generate, static_argnames=sd.STATIC)
    # XL has zeros in place of an empty negative prompt.
    negative = None if config.is_xl else tokenize([""])

    def draw(
        params: dict, captions: list[str], steps: int, guidance: float = GUIDANCE
    ) -> np.ndarray:
        drawn = []
        for start in range(0, len(captions), BATCH):
            some = captions[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(jnp.arange(start, start + len(some)))
            images = generate(params, config, tokenize(some), keys, negative, steps, guidance)
            drawn.append(np.asarray(images))
        return np.concatenate(drawn)

    return draw


def count_attributes(asked: list[dict[str, str]], images: Iterable[np.ndarray]) -> dict[str, int]:
    """Return how many pictures are right, in all and in each attribute, and how many no scene."""
    counts = dict.fromkeys(("right", *scenes.ATTRIBUTES, "refused"), 0)
    for named, image in zip(asked, images, strict=True):
        seen = judge.read(image)
        answers = judge.right_attributes(named, seen)
        counts["right"] += all(answers.values())
        counts["refused"] += isinstance(seen, judge.Refusal)
        for name, answer in answers.items():
            counts[name] += bool(answer)
    return counts
