"""What models are trained on: scenes of the shapes, and captions that name some of it."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course.shapes import scenes

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINTS = ROOT / "checkpoints"
PIXELS = 64
POOL_SEED = 1  # of the scenes to draw
EMPTY_CAPTIONS = 0.1  # the share that names nothing, for guidance
DROPPED_ATTRIBUTES = 0.35  # of each attribute in captions that are neither empty nor full

# What a caption can say of each attribute; last, nothing.
OPTIONS = {
    "size": (*scenes.SIZES, None),
    "color": (*scenes.COLORS, None),
    "shape": (*scenes.SHAPES, None),
    "background": (*scenes.BACKGROUNDS, None),
}
COUNTS = tuple(len(options) for options in OPTIONS.values())  # there are 4,000 captions


def attributes_of(number: int) -> dict[str, str | None]:
    """Return what the caption with this number names."""
    indices = np.unravel_index(number, COUNTS)
    return {
        name: options[index]
        for (name, options), index in zip(OPTIONS.items(), indices, strict=True)
    }


def all_captions() -> list[str]:
    """Return every caption there is, in the order of ``caption_number``; the last one is empty."""
    return [scenes.caption(**attributes_of(number)) for number in range(int(np.prod(COUNTS)))]


def attribute_indices(scene: scenes.Scene) -> list[int]:
    """Return a scene's attributes as places in ``OPTIONS``."""
    return [options.index(getattr(scene, name)) for name, options in OPTIONS.items()]


def caption_number(attributes: jax.Array, named: jax.Array) -> jax.Array:
    """Return the number of a caption that names some attributes: see ``all_captions``."""
    unnamed = jnp.array(COUNTS) - 1
    return jnp.ravel_multi_index(
        tuple(jnp.where(named, attributes, unnamed).T), COUNTS, mode="clip"
    )


def is_full(numbers: jax.Array) -> jax.Array:
    """Return of captions whether they name every attribute."""
    indices = jnp.unravel_index(numbers, COUNTS)
    pairs = zip(indices, COUNTS, strict=True)
    return jnp.stack([index < count - 1 for index, count in pairs]).all(axis=0)


def random_captions(key: jax.Array, attributes: jax.Array, full: float) -> jax.Array:
    """Draw what captions name of scenes: all, some or no attributes.

    ``full`` is the share that names all. The result is numbers of captions, (scenes,).
    """
    first, second = jax.random.split(key)
    kind = jax.random.uniform(first, (len(attributes), 1))
    kept = jax.random.uniform(second, attributes.shape) > DROPPED_ATTRIBUTES
    named = (kind > EMPTY_CAPTIONS) & ((kind < EMPTY_CAPTIONS + full) | kept)
    return caption_number(attributes, named)


def render_all(some: list[scenes.Scene], batch: int = 500) -> Iterator[np.ndarray]:
    """Draw scenes on all cores, in their order: yields uint8, (batch, 64, 64, 3)."""
    # JAX has threads by now, so its process must not be forked.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        for start in range(0, len(some), batch):
            pictures = processes.map(scenes.render, some[start : start + batch], chunksize=100)
            yield np.stack(list(pictures))
            print(f"drawn: {start:,} of {len(some):,} scenes", end="\r", flush=True)
    print()


def kept(file: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return what the file holds, or make that and keep it there, since it takes minutes."""
    if file.exists():
        with np.load(file) as saved:
            return dict(saved)
    data = make()
    partial_file = file.with_suffix(".part.npz")
    np.savez(partial_file, **data)
    partial_file.replace(file)  # so that an interruption leaves no file that is cut off
    return data
