"""The programs that the chapters run, lowered from shapes: no weights, no vocabulary, no device that could run them."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from helpers.checkpoints import bundled_checkpoint, bundled_names
from helpers.tpu.compiler import tpu_devices

CONFIGURATIONS = Path(__file__).parents[1] / "configurations"
_MODELS = ("scheduler", "text_encoder", "text_encoder_2", "unet", "vae")  # what of a pipeline computes


@dataclass(frozen=True)
class Program:
    """A program to compile: a pipeline's ``_generate`` with everything that its shapes depend on.

    Attributes
    ----------
    pipeline : str
        ``sd`` (Stable Diffusion 1.4), ``sdxl`` (Stable Diffusion XL base 1.0), a bundled checkpoint, or the path of a
        folder in diffusers' format, of which only the configuration files are read.
    chip, chips : str, int
        A key of ``CHIPS``, and how many of them: 1, 4 or 8.
    batch : int
        Pictures that each chip draws in a call.
    height, width : int, optional
        Of a picture, in pixels; by default what the UNet was trained for.
    steps : int
    dtype : {"bfloat16", "float32"}
        Of the parameters (but the scheduler's, which stay in float32) and of the computation. The text encoders
        compute in float32 either way, as they do in the chapters.
    parallel : {"pmap", "jit"}
        ``jax.pmap`` as in chapter 5, or ``jax.jit`` with shardings.
    split_head_dim : bool, optional
        How the UNet's attention lays out its heads; by default as the chapters load the pipeline, which is True for
        XL and what the configuration says elsewhere.
    """

    pipeline: str
    chip: str = "v5e"
    chips: int = 1
    batch: int = 1
    height: int | None = None
    width: int | None = None
    steps: int = 50
    dtype: str = "bfloat16"
    parallel: str = "pmap"
    split_head_dim: bool | None = None

    def __post_init__(self):
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"The dtype is {self.dtype!r}: choose bfloat16 or float32.")
        if self.parallel not in ("pmap", "jit"):
            raise ValueError(f"The program is {self.parallel!r}: choose pmap or jit.")
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1.")
        for name in ("height", "width"):
            if getattr(self, name) is not None and (getattr(self, name) < 8 or getattr(self, name) % 8):
                raise ValueError(f"The {name} is {getattr(self, name)}: give a multiple of 8.")


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


def load_shapes(name: str, dtype: str = "bfloat16", split_head_dim: bool | None = None) -> tuple:
    """Build a pipeline from its configuration files, without weights and without a vocabulary.

    Parameters
    ----------
    name, dtype, split_head_dim
        As in ``Program``.

    Returns
    -------
    pipeline : FlaxStableDiffusionPipeline or FlaxStableDiffusionXLPipeline
    params : dict
        A tree of ``jax.ShapeDtypeStruct`` in the place of parameters.

    Examples
    --------
    >>> pipeline, params = load_shapes("shapes-sd")
    >>> params["unet"]["conv_in"]["kernel"]
    ShapeDtypeStruct(shape=(3, 3, 4, 96), dtype=bfloat16)
    """
    folder = _folder(name)
    index = json.loads((folder / "model_index.json").read_text())
    cls_name = index["_class_name"].removeprefix("Flax")
    if cls_name not in ("StableDiffusionPipeline", "StableDiffusionXLPipeline"):
        raise ValueError(f"{name!r} is a {cls_name}: only Stable Diffusion 1.x and XL have Flax pipelines here.")
    if split_head_dim is None and cls_name.endswith("XLPipeline"):
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
    if cls_name.endswith("XLPipeline"):
        parts |= {"tokenizer": None, "tokenizer_2": None}
    else:
        parts |= {"tokenizer": None, "safety_checker": None, "feature_extractor": None}
    pipeline = getattr(diffusers, f"Flax{cls_name}")(**parts)
    # _generate tokenizes the empty prompt. Which numbers that gives does not change the program's size or work.
    pipeline.tokenizer = lambda texts, max_length, **_: SimpleNamespace(
        input_ids=np.zeros((len(texts), max_length), np.int32)
    )
    return pipeline, params


def _is_xl(pipeline) -> bool:
    return hasattr(pipeline, "text_encoder_2")


def picture_size(program: Program, pipeline) -> tuple[int, int]:
    """Height and width of a program's pictures, in pixels.

    Raises
    ------
    ValueError
        If the UNet cannot halve the latents' sides as often as it has to.
    """
    usual = pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    sides = program.height or usual, program.width or usual
    step = pipeline.vae_scale_factor * 2 ** (len(pipeline.unet.config.block_out_channels) - 1)
    if any(side % step for side in sides):
        height, width = sides
        raise ValueError(f"{program.pipeline} cannot draw {height} × {width} pixels: give multiples of {step}.")
    return sides


def _token_ids(pipeline, batch: int) -> jax.ShapeDtypeStruct:
    length = pipeline.text_encoder.config.max_position_embeddings
    return jax.ShapeDtypeStruct((batch, 2, length) if _is_xl(pipeline) else (batch, length), jnp.int32)


def lower_program(program: Program, pipeline, params) -> jax.stages.Lowered:
    """Lower the pipeline's ``_generate`` for compile-only devices, as chapters 5 and 7 lower it for real ones."""
    devices = tpu_devices(program.chip, program.chips)
    ids = _token_ids(pipeline, program.batch * (program.chips if program.parallel == "jit" else 1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    guidance = jax.ShapeDtypeStruct((1,), jnp.float32)
    static = (3, 4, 5, 9) if _is_xl(pipeline) else (3, 4, 5)
    if program.parallel == "pmap":
        generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=static, devices=devices)

        def place(tree, split):  # a leading axis with an entry for each device
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct((program.chips, *s.shape), s.dtype), tree)

    else:
        mesh = Mesh(np.array(devices), ("chips",))
        along, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("chips",), ()))
        generate = jax.jit(pipeline._generate, static_argnums=static, out_shardings=along)

        def place(tree, split):
            sharding = along if split else everywhere
            return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), tree)

    # No latents, negative prompts, and pictures in the place of latents.
    extra = (None, place(ids, True), False) if _is_xl(pipeline) else ()
    sizes = picture_size(program, pipeline)
    inputs = (place(ids, True), place(params, False), place(key, False))
    return generate.lower(*inputs, program.steps, *sizes, place(guidance, False), *extra)


def lower_parts(program: Program, pipeline, params) -> dict[str, tuple[jax.stages.Lowered, int, int]]:
    """Lower the parts of ``_generate`` by themselves, for one chip, since the compiler counts a loop's body once.

    Returns
    -------
    dict
        For each part the lowered program, how often it runs in a call, and the bytes of the weights that each run
        reads whole. Of the tokens' embeddings, it reads only the rows of the prompts' tokens.
    """
    sharding = SingleDeviceSharding(tpu_devices(program.chip)[0])
    xl, batch = _is_xl(pipeline), program.batch
    unet, vae, scheduler = pipeline.unet, pipeline.vae, pipeline.scheduler

    def encode(params, ids, negative_ids):
        # As _generate does: the prompts, and the negative ones, each by itself.
        if xl:
            return [pipeline.get_embeddings(i, params) for i in (ids, negative_ids)]
        return [pipeline.text_encoder(i, params=params["text_encoder"])[0] for i in (ids, negative_ids)]

    def denoise(unet_params, latents, state, guidance, k, context, added):
        twice = jnp.concatenate([latents] * 2)
        t = jnp.array(state.timesteps, dtype=jnp.int32)[k]
        twice = scheduler.scale_model_input(state, twice, t)
        condition = {"added_cond_kwargs": added} if xl else {}
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

    height, width = picture_size(program, pipeline)
    scale, length = pipeline.vae_scale_factor, pipeline.text_encoder.config.max_position_embeddings
    latents = array(batch, unet.config.in_channels, height // scale, width // scale)
    state = jax.eval_shape(
        lambda s: scheduler.set_timesteps(s, num_inference_steps=program.steps, shape=latents.shape),
        params["scheduler"],
    )
    context = array(2 * batch, length, unet.config.cross_attention_dim)
    added = None
    if xl:
        pooled = pipeline.text_encoder_2.config.projection_dim
        added = {"text_embeds": array(2 * batch, pooled), "time_ids": array(2 * batch, 6)}
    ids = _token_ids(pipeline, batch)
    encoders = {name: tree for name, tree in params.items() if name.startswith("text_encoder")}
    decoder = {name: params["vae"][name] for name in ("decoder", "post_quant_conv")}
    index = array(dtype=jnp.int32)
    parts = {
        "text encoders": (encode, (encoders, ids, ids), 1),
        "denoising step": (denoise, (params["unet"], latents, state, array(1), index, context, added), program.steps),
        "VAE decoder": (decode, (decoder, latents), 1),
    }
    lowered = {}
    for name, (function, arguments, runs) in parts.items():
        placed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), arguments)
        traced = jax.jit(function).trace(*placed)
        jaxpr = traced.jaxpr.jaxpr
        _, read = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        weights = zip(jax.tree.leaves_with_path(arguments[0]), read, strict=False)  # the weights are the first inputs
        whole = [
            leaf for (path, leaf), is_read in weights if is_read and "token_embedding" not in jax.tree_util.keystr(path)
        ]
        lowered[name] = (traced.lower(), runs, tree_bytes(whole))
    return lowered


def tree_bytes(tree) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
