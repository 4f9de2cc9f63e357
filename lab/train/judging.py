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


def make_drawing(config: sd.Config, tokenize: Tokenizer) -> Callable[..., np.ndarray]:
    """Return a function from parameters, captions, steps and guidance to pictures.

    It takes other arguments of ``sd.generate``, too. The pictures are float32, (captions, height,
    width, 3), from 0 to 1. Picture ``k`` starts from the noise of ``jax.random.key(k)``.
    """
    generate = jax.jit(sd.generate, static_argnames=sd.STATIC)
    # XL has zeros in place of an empty negative prompt.
    negative = None if config.is_xl else tokenize([""])

    def draw(
        params: dict, captions: list[str], steps: int, guidance: float = GUIDANCE, **how
    ) -> np.ndarray:
        drawn = []
        for start in range(0, len(captions), BATCH):
            some = captions[start : start + BATCH]
            keys = jax.vmap(jax.random.key)(jnp.arange(start, start + len(some)))
            ids = tokenize(some)
            images = generate(params, config, ids, keys, negative, steps, guidance, **how)
            drawn.append(np.float32(images))
        return np.concatenate(drawn)

    return draw


def count_attributes(
    asked: list[dict[str, str | None]], images: Iterable[np.ndarray]
) -> dict[str, int]:
    """Count pictures that are right, in all and in each attribute, and others.

    ``refused`` are no scene to the judge. In ``colors`` the colours of background and shape are
    right, whatever the shape is.
    """
    counts = dict.fromkeys(("right", *scenes.ATTRIBUTES, "refused", "colors"), 0)
    for named, image in zip(asked, images, strict=True):
        seen = judge.read_scene(image)
        answers = judge.right_attributes(named, seen)
        counts["right"] += all(answers.values())
        counts["refused"] += isinstance(seen, judge.Refusal)
        counts["colors"] += has_the_colors(named, judge.read_colors(image))
        for name, answer in answers.items():
            counts[name] += bool(answer)
    return counts


def has_the_colors(named: dict[str, str | None], seen: tuple | judge.Refusal) -> bool:
    """Return whether the colours that ``judge.read_colors`` sees are those of a caption."""
    if isinstance(seen, judge.Refusal):
        return False
    background, color, _ = seen
    return named["background"] in (None, background) and named["color"] in (None, color)
