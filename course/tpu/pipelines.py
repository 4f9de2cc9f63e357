"""Stable Diffusion's programs, asked of the TPU compiler: lowered from shapes, without weights and vocabulary."""

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers

from course.tpu.chips import tpu_devices
from course.tpu.compiler import Part, Report, ask_compiler
from course.tpu.model import CONFIGURATIONS
from helpers.checkpoints import bundled_checkpoint, bundled_names

_MODELS = ("scheduler", "text_encoder", "text_encoder_2", "unet", "vae")  # what of a pipeline computes


@dataclass(frozen=True)
class Program:
    """A program to compile: a pipeline's ``_generate``, pmapped, with everything that its shapes depend on."""

    pipeline: str  #: ``sd``, ``sdxl``, a bundled checkpoint, or a folder in diffusers' format with configuration files
    chip: str = "v5e"  #: a key of ``CHIPS``
    chips: int = 1  #: 1, 4 or 8
    batch: int = 1  #: images that each device draws in a call
    height: int | None = None  #: of an image, in pixels; None for what the UNet was trained for
    width: int | None = None  #: likewise
    steps: int = 50  #: of denoising
    dtype: str = "bfloat16"  #: or float32, of the computation and of the parameters, but for the scheduler's
    split_head_dim: bool | None = None  #: of the UNet's attention; None for what the chapters take (True for XL)

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"The dtype is {self.dtype!r}: choose bfloat16 or float32.")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")


class Shapes(NamedTuple):
    """A pipeline without weights, and a tree of ``jax.ShapeDtypeStruct`` in the place of its parameters."""

    pipeline: diffusers.FlaxDiffusionPipeline
    params: dict
    is_xl: bool


def _folder(name: str) -> Path:
    """Where a pipeline's configuration files are."""
    if (CONFIGURATIONS / name / "model_index.json").exists():
        return CONFIGURATIONS / name
    if name in bundled_names():
        return Path(bundled_checkpoint(name).source)
    if not (Path(name) / "model_index.json").exists():
        known = ", ".join(["sd", "sdxl", *bundled_names()])
        raise ValueError(f"{name!r} is no pipeline: give {known}, or a folder with a model_index.json.")
    return Path(name)


def load_shapes(name: str, dtype: str = "bfloat16", split_head_dim: bool | None = None) -> Shapes:
    """Build a pipeline from its configuration files, without weights and without a vocabulary.

    Parameters
    ----------
    name, dtype, split_head_dim
        As in `Program`, where ``name`` is ``pipeline``.

    Raises
    ------
    ValueError
        If there is no such pipeline, or no Flax class for one of its parts.

    Examples
    --------
    >>> load_shapes("shapes-sd").params["unet"]["conv_in"]["kernel"]
    ShapeDtypeStruct(shape=(3, 3, 4, 96), dtype=bfloat16)
    """
    folder = _folder(name)
    index = json.loads((folder / "model_index.json").read_text())
    cls_name = index["_class_name"].removeprefix("Flax")
    if cls_name not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise ValueError(f"{name!r} is a {cls_name}: only Stable Diffusion 1.x and XL have Flax pipelines here.")
    is_xl = cls_name == "StableDiffusionXLPipeline"
    if split_head_dim is None and is_xl:
        split_head_dim = True
    parts, params = {}, {}
    for part in (model for model in _MODELS if model in index):
        library, kind = index[part]
        flax = f"Flax{kind.removeprefix('Flax')}"
        cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], flax, None)
        if cls is None:
            raise ValueError(f"{name!r} has a {kind}, and there is no {flax}: choose a pipeline with another {part}.")
        if part == "scheduler":
            parts[part] = cls.from_config(json.loads((folder / part / "scheduler_config.json").read_text()))
            params[part] = jax.eval_shape(parts[part].create_state)
            continue
        config = json.loads((folder / part / "config.json").read_text())
        if library == "transformers":
            # from_pretrained(dtype=…) never reaches these, so they compute in float32.
            parts[part] = cls(cls.config_class.from_dict(config), _do_init=False)
            shapes = parts[part].params_shape_tree
        else:
            if part == "unet" and split_head_dim is not None:
                config["split_head_dim"] = split_head_dim
            parts[part] = cls.from_config(config, dtype=jnp.dtype(dtype))
            shapes = jax.eval_shape(parts[part].init_weights, jax.random.key(0))
        params[part] = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)), shapes)

    def tokenize(texts, max_length, **_):
        # _generate tokenizes the empty prompt. Which numbers that gives does not change the program's size or work.
        return SimpleNamespace(input_ids=np.zeros((len(texts), max_length), np.int32))

    # The others are not used. But with None, diffusers warns of images that nobody checks, and there are no images.
    others = ("tokenizer", "tokenizer_2") if is_xl else ("tokenizer", "safety_checker", "feature_extractor")
    pipeline = getattr(diffusers, f"Flax{cls_name}")(**parts, **dict.fromkeys(others, tokenize))
    return Shapes(pipeline, params, is_xl)


def complete(program: Program, shapes: Shapes) -> Program:
    """The program with nothing left to a default.

    Raises
    ------
    ValueError
        If the UNet cannot halve the latents' sides as often as it has to.
    """
    pipeline, config = shapes.pipeline, shapes.pipeline.unet.config
    usual = config.sample_size * pipeline.vae_scale_factor
    height, width = (usual if side is None else side for side in (program.height, program.width))
    step = pipeline.vae_scale_factor * 2 ** (len(config.block_out_channels) - 1)
    if min(height, width) < step or height % step or width % step:
        raise ValueError(f"{program.pipeline} cannot draw {height} × {width} pixels: give multiples of {step}.")
    name, heads = Path(program.pipeline).name, bool(config.split_head_dim)
    return dataclasses.replace(program, pipeline=name, height=height, width=width, split_head_dim=heads)


def _token_ids(program: Program, shapes: Shapes) -> jax.ShapeDtypeStruct:
    length = shapes.pipeline.text_encoder.config.max_position_embeddings
    ids = (program.batch, 2, length) if shapes.is_xl else (program.batch, length)
    return jax.ShapeDtypeStruct(ids, jnp.int32)


def ask_about_whole(program: Program, shapes: Shapes) -> Report:
    """Ask about the pipeline's ``_generate``, pmapped as in chapters 5 and 7. Minutes for a real model."""
    program, devices = complete(program, shapes), tpu_devices(program.chip, program.chips)

    def on_each(tree):
        return jax.tree.map(lambda s: jax.ShapeDtypeStruct((len(devices), *s.shape), s.dtype), tree)

    ids, key = on_each(_token_ids(program, shapes)), jax.eval_shape(lambda: jax.random.key(0))
    guidance = jax.ShapeDtypeStruct((1,), jnp.float32)
    # XL: no latents, negative prompts, and images in the place of latents.
    static, extra = ((3, 4, 5, 9), (None, ids, False)) if shapes.is_xl else ((3, 4, 5), ())
    generate = jax.pmap(shapes.pipeline._generate, static_broadcasted_argnums=static, devices=devices)
    inputs = ids, on_each(shapes.params), on_each(key), program.steps, program.height, program.width, on_each(guidance)
    return ask_compiler(generate, *inputs, *extra, chip=program.chip)


class Piece(NamedTuple):
    """A part of ``_generate`` as a function of its own, with shapes of its arguments."""

    name: str
    runs: int
    weights: int  #: bytes of what each run reads whole: of the tokens' embeddings, it reads only the prompts' rows
    function: Callable
    arguments: tuple

    def ask(self, chip: str) -> Part:
        """Ask the compiler about this part, on one device. The weights are what it has to move at least."""
        report = ask_compiler(self.function, *self.arguments, chip=chip)
        work = dataclasses.replace(report.work, least_bytes=self.weights)
        return Part(self.name, self.runs, work, report.compile_seconds)


def take_apart(program: Program, shapes: Shapes) -> tuple[Piece, Piece, Piece]:
    """The text encoders, a denoising step and the VAE's decoder, as ``_generate`` calls them."""
    program = complete(program, shapes)
    pipeline, params, is_xl = shapes
    unet, vae, scheduler = pipeline.unet, pipeline.vae, pipeline.scheduler

    def encode(params, ids, negative_ids):
        # As _generate does: the prompts, and the negative ones, each by itself.
        if is_xl:
            return [pipeline.get_embeddings(i, params) for i in (ids, negative_ids)]
        return [pipeline.text_encoder(i, params=params["text_encoder"])[0] for i in (ids, negative_ids)]

    def denoise(unet_params, latents, state, guidance, k, context, condition):
        twice = jnp.concatenate([latents] * 2)
        t = jnp.array(state.timesteps, dtype=jnp.int32)[k]
        twice = scheduler.scale_model_input(state, twice, t)
        times = jnp.broadcast_to(t, twice.shape[0])
        noise = unet.apply({"params": unet_params}, twice, times, encoder_hidden_states=context, **condition).sample
        without, with_prompt = jnp.split(noise, 2, axis=0)
        return scheduler.step(state, without + guidance * (with_prompt - without), t, latents).to_tuple()

    def decode(vae_params, latents):
        latents = 1 / vae.config.scaling_factor * latents
        image = vae.apply({"params": vae_params}, latents, method=vae.decode).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    ids, pairs, scale = _token_ids(program, shapes), 2 * program.batch, pipeline.vae_scale_factor
    latents = array(program.batch, unet.config.in_channels, program.height // scale, program.width // scale)
    state = jax.eval_shape(
        lambda s: scheduler.set_timesteps(s, num_inference_steps=program.steps, shape=latents.shape),
        params["scheduler"],
    )
    context, condition = array(pairs, ids.shape[-1], unet.config.cross_attention_dim), {}
    encoders = {name: tree for name, tree in params.items() if name.startswith("text_encoder")}
    texts = [tree["text_model"] for tree in encoders.values()]
    looked_up = [text["embeddings"]["token_embedding"] for text in texts]
    if is_xl:
        pooled = pipeline.text_encoder_2.config.projection_dim
        condition = {"added_cond_kwargs": {"text_embeds": array(pairs, pooled), "time_ids": array(pairs, 6)}}
        # Of the first encoder it takes the last but one layer, so what follows is not read.
        layers = texts[0]["encoder"]["layers"]
        looked_up += [texts[0]["final_layer_norm"], layers[max(layers, key=int)]]
    decoder = {name: params["vae"][name] for name in ("decoder", "post_quant_conv")}
    step = params["unet"], latents, state, array(1), array(dtype=jnp.int32), context, condition
    return (
        Piece("text encoders", 1, tree_bytes(encoders) - tree_bytes(looked_up), encode, (encoders, ids, ids)),
        Piece("denoising step", program.steps, tree_bytes(params["unet"]), denoise, step),
        Piece("VAE decoder", 1, tree_bytes(decoder), decode, (decoder, latents)),
    )


def tree_bytes(tree) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
