"""Drawing with one part of the model in memory at a time, where they do not fit together."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from course.flux2 import vae
from course.flux2.configs import read_config
from course.flux2.folders import load
from course.flux2.offload import blocks_on_host, find_host_memory
from course.flux2.pipeline import (
    STATIC,
    check_images,
    check_noise,
    denoise,
    encode_images,
    encode_prompts,
)
from course.flux2.tokenizer import Tokenizer
from course.model.guidance import is_guided
from course.model.quantize import quantize


def generate_in_turn(
    folder: str | Path,
    prompts: Sequence[str],
    noise: jax.Array,
    height: int,
    width: int,
    steps: int = 4,
    guidance: float | None = None,
    images: np.ndarray | None = None,
    shift: float | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    int8: bool = False,
    offload: bool = False,
    batch: int = 1,
) -> np.ndarray:
    """Do what ``generate`` does, from a folder, with one part of the model after the other.

    The text encoder reads all prompts and goes, the transformer draws all images and goes, and then
    the VAE decodes them. So the device holds the largest part, and not the sum of all. Reading
    takes long, so many prompts at a time cost less.

    Parameters
    ----------
    folder : str or Path
        In diffusers' format.
    prompts : sequence of str
    noise, height, width, steps, guidance, images, shift
        As of ``generate``.
    dtype : dtype
        Of parameters and computation: float32 or bfloat16.
    int8 : bool
        Whether to round the transformer's weights, as ``course.model.quantize`` does. That happens
        on the host, so the device never holds them in ``dtype``.
    offload : bool
        Whether the weights of the text encoder's layers and of the transformer's blocks stay in the
        host's memory, and come to the device one block at a time. That takes longer: the
        transformer's come over in each step.
    batch : int
        How many images to draw and to decode at a time.

    Returns
    -------
    numpy.ndarray
        Images from 0 to 1: float32, (prompts, height, width, 3).

    Raises
    ------
    FileNotFoundError, ValueError
        As ``load`` and ``generate`` do, or if there are no prompts, ``batch`` is below 1, or the
        device can read no weights from the host's memory.
    """
    if guidance is not None and not is_guided(guidance):
        guidance = None
    config = read_config(folder)
    size = {"height": height, "width": width}
    if batch < 1 or not len(prompts):
        raise ValueError(f"batch is {batch}, of {len(prompts)} prompts: give at least 1 of both.")
    check_noise(noise, config, len(prompts), **size)
    if images is not None:
        check_images(images, len(prompts), **size)
    if offload:
        find_host_memory(jax.devices()[0])  # which raises ValueError where there is none

    # The parameters of a part are those of one function, and go when it returns.

    def encode_texts() -> tuple[np.ndarray, np.ndarray | None]:
        params, tokenize = _load_part(folder, dtype, "text_encoder", offload=offload)
        encode = functools.partial(
            jax.jit(encode_prompts, static_argnames="config"), params, config
        )
        encoded = _in_batches(encode, batch, *tokenize(list(prompts)))
        empty = None if guidance is None else np.asarray(encode(*tokenize([""])))
        return encoded, empty

    def encode_references() -> np.ndarray:
        params, _, _ = load(folder, dtype, parts=("vae",))
        program = jax.jit(encode_images, static_argnames="config")
        encode = functools.partial(program, params, config)
        tokens = _in_batches(encode, batch, images.reshape(-1, *images.shape[-3:]))
        # The tokens of all images for a prompt follow one another.
        return tokens.reshape(len(images), -1, tokens.shape[-1])

    def draw(encoded: np.ndarray, empty: np.ndarray | None, reference: Any) -> np.ndarray:
        params, _ = _load_part(folder, dtype, "transformer", int8, offload)
        program = jax.jit(denoise, static_argnames=(*STATIC, "guidance"))

        def draw_some(noise: Any, prompt: np.ndarray, own: Any = None) -> jax.Array:
            some = reference if own is None else own
            options = size | {"steps": steps, "guidance": guidance, "shift": shift}
            return program(params, config, noise, prompt, empty=empty, reference=some, **options)

        if reference is None or len(reference) == 1:  # the same for all prompts
            return _in_batches(draw_some, batch, noise, encoded)
        return _in_batches(draw_some, batch, noise, encoded, reference)

    def decode(tokens: np.ndarray) -> np.ndarray:
        params, _, _ = load(folder, dtype, parts=("vae",))
        program = jax.jit(vae.decode, static_argnames=("config", *size))
        return _in_batches(lambda x: program(params["vae"], config.vae, x, **size), batch, tokens)

    encoded, empty = encode_texts()
    reference = None if images is None else encode_references()
    return decode(draw(encoded, empty, reference))


def _load_part(
    folder: str | Path, dtype: Any, part: str, int8: bool = False, offload: bool = False
) -> tuple[dict, Tokenizer]:
    """Read a part: first to the host, where its weights are rounded or wait."""
    if not int8 and not offload:
        params, _, tokenize = load(folder, dtype, parts=(part,))
        return params, tokenize
    device = jax.devices()[0]
    cpu = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    params, _, tokenize = load(folder, dtype, cpu, parts=(part,))
    if int8:
        params[part] = quantize(params[part])
    if offload:
        params[part] = blocks_on_host(params[part], device)
    else:
        params = jax.device_put(params, device)
    return params, tokenize


def _in_batches(function: Callable, batch: int, *arrays: Any) -> np.ndarray:
    """Return what a function gives of some rows of arrays after another, on the host."""
    rows = len(arrays[0])
    parts = []
    for start in range(0, rows, batch):
        parts.append(np.asarray(function(*(each[start : start + batch] for each in arrays))))
    return np.concatenate(parts)
