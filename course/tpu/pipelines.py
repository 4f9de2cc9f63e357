"""diffusers' Flax pipelines as programs to ask about, from shapes alone."""

import json
from functools import cache
from types import SimpleNamespace

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import transformers

from course.tpu.chips import find_chip, tpu_devices
from course.tpu.programs import (
    DECODER,
    ENCODERS,
    STEP,
    WHOLE,
    Answer,
    Piece,
    Program,
    ask_pieces,
    find_folder,
    tree_bytes,
)
from course.tpu.records import recorded_answers

MODELS = ("scheduler", "text_encoder", "text_encoder_2", "unet", "vae")  # those that compute


def load_shapes(model: str, dtype: str = "bfloat16", split_head_dim: bool | None = None) -> tuple:
    """Build a pipeline from its configuration files, without weights and without a vocabulary.

    Parameters
    ----------
    model, dtype, split_head_dim
        As in `Program`.

    Returns
    -------
    tuple
        The pipeline and its parameters, as ``from_pretrained`` gives them, with
        ``jax.ShapeDtypeStruct`` in the place of arrays.

    Raises
    ------
    ValueError
        If there is no such model, or no Flax class for one of its parts.

    Examples
    --------
    >>> pipeline, params = load_shapes("shapes-sd")
    >>> params["unet"]["conv_in"]["kernel"]
    ShapeDtypeStruct(shape=(3, 3, 4, 96), dtype=bfloat16)
    """
    return shapes_of(Program(model, dtype=dtype, split_head_dim=split_head_dim))


def shapes_of(program: Program) -> tuple:
    """The pipeline of a program, and the shapes of its parameters, see `load_shapes`."""
    return _build(program.model, program.dtype, program.split_head_dim)


@cache  # it takes seconds
def _build(model: str, dtype: str, split_head_dim: bool) -> tuple:
    folder = find_folder(model)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    parts = {}
    params = {}
    for part in MODELS:
        if part not in index:
            continue
        library, kind = index[part]
        flax = f"Flax{kind.removeprefix('Flax')}"
        cls = getattr({"diffusers": diffusers, "transformers": transformers}[library], flax, None)
        if cls is None:
            raise ValueError(
                f"{model!r} has a {kind}, and there is no {flax}: "
                f"choose a pipeline with another {part}."
            )
        if part == "scheduler":
            config = json.loads(
                (folder / part / "scheduler_config.json").read_text(encoding="utf-8")
            )
            parts[part] = cls.from_config(config)
            params[part] = jax.eval_shape(parts[part].create_state)
            continue
        config = json.loads((folder / part / "config.json").read_text(encoding="utf-8"))
        if library == "transformers":
            # from_pretrained(dtype=…) never reaches these, so they compute in float32.
            parts[part] = cls(cls.config_class.from_dict(config), _do_init=False)
            shapes = parts[part].params_shape_tree
        else:
            if part == "unet":
                config["split_head_dim"] = split_head_dim
            parts[part] = cls.from_config(config, dtype=jnp.dtype(dtype))
            shapes = jax.eval_shape(parts[part].init_weights, jax.random.key(0))
        params[part] = jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, jnp.dtype(dtype)), shapes
        )

    def tokenize(texts, max_length, **_):
        # _generate tokenizes the empty prompt. Which numbers that gives does not change the
        # program's size or work.
        return SimpleNamespace(input_ids=np.zeros((len(texts), max_length), np.int32))

    # What else a pipeline has is not used here. But with None, diffusers warns of images that
    # nobody checks, and there are no images.
    if "text_encoder_2" in parts:
        unused = ("tokenizer", "tokenizer_2")
    else:
        unused = ("tokenizer", "safety_checker", "feature_extractor")
    cls = getattr(diffusers, f"Flax{index['_class_name'].removeprefix('Flax')}")
    return cls(**parts, **dict.fromkeys(unused, tokenize)), params


def ask_about(program: Program, timeout: float | None = None) -> Answer:
    """Ask the compiler about a pipeline's program and its parts.

    It takes half a minute for a bundled checkpoint, and long for a real model.
    """
    _, params = shapes_of(program)
    return ask_pieces(program, take_apart(program), params, timeout)


def ask_or_recall(program: Program) -> Answer:
    """Ask the compiler about a program; where it cannot be asked, recall the recorded answer.

    Raises
    ------
    RuntimeError
        If the compiler cannot be asked here, and nobody recorded an answer.
    """
    try:
        find_chip(program.chip)
    except RuntimeError as error:
        for answer in recorded_answers(attention=None):
            if answer.program == program:
                return answer
        raise RuntimeError(f"{error} None is recorded on {program}.") from None
    return ask_about(program)


def take_apart(program: Program) -> dict[str, Piece]:
    """The pieces of a pipeline's program: all of it, and its parts as ``_generate`` calls them."""
    return {
        WHOLE: take_whole(program),
        ENCODERS: take_encoders(program),
        STEP: take_step(program),
        DECODER: take_decoder(program),
    }


def take_whole(program: Program) -> Piece:
    """The pipeline's ``_generate``, pmapped as in chapters 5 and 7."""
    pipeline, params = shapes_of(program)
    devices = tpu_devices(program.chip, program.chips)

    def on_each(tree):
        """A leading axis for the devices, on every shape of a tree."""
        return jax.tree.map(lambda leaf: array(len(devices), *leaf.shape, dtype=leaf.dtype), tree)

    ids = on_each(token_ids(program, pipeline))
    arguments = [
        ids,
        on_each(params),
        on_each(jax.eval_shape(lambda: jax.random.key(0))),
        program.steps,
        program.height,
        program.width,
        on_each(array(1)),  # the guidance scale
    ]
    static = (3, 4, 5)
    if "text_encoder_2" in params:
        arguments += [None, ids, False]  # no latents; negative prompts; images, and not latents
        static = (3, 4, 5, 9)
    generate = jax.pmap(pipeline._generate, static_broadcasted_argnums=static, devices=devices)
    return Piece(generate, tuple(arguments))


def take_encoders(program: Program) -> Piece:
    """The text encoders, which read the prompts and the negative prompts, each by themselves.

    Its weights are those that a run reads whole: of the tokens' embeddings, it reads a few rows.
    """
    pipeline, params = shapes_of(program)
    is_xl = "text_encoder_2" in params

    def encode(params, ids, negative_ids):
        if is_xl:
            return [pipeline.get_embeddings(each, params) for each in (ids, negative_ids)]
        encoder = pipeline.text_encoder
        return [encoder(each, params=params["text_encoder"])[0] for each in (ids, negative_ids)]

    encoders = {name: tree for name, tree in params.items() if name.startswith("text_encoder")}
    texts = [tree["text_model"] for tree in encoders.values()]
    not_read = [text["embeddings"]["token_embedding"] for text in texts]
    if is_xl:
        # Of the first encoder it takes the last but one layer, so what follows is not read.
        layers = texts[0]["encoder"]["layers"]
        not_read += [layers[max(layers, key=int)], texts[0]["final_layer_norm"]]
    weights = tree_bytes(encoders) - tree_bytes(not_read)
    ids = token_ids(program, pipeline)
    return Piece(encode, (encoders, ids, ids), weights)


def take_step(program: Program) -> Piece:
    """A step of the loop in ``_generate``: the UNet, guidance, and the scheduler."""
    pipeline, params = shapes_of(program)
    unet = pipeline.unet
    scheduler = pipeline.scheduler

    def denoise(unet_params, latents, state, guidance, k, context, condition):
        twice = jnp.concatenate([latents] * 2)
        t = jnp.array(state.timesteps, dtype=jnp.int32)[k]
        twice = scheduler.scale_model_input(state, twice, t)
        times = jnp.broadcast_to(t, twice.shape[0])
        noise = unet.apply(
            {"params": unet_params}, twice, times, encoder_hidden_states=context, **condition
        ).sample
        without, with_prompt = jnp.split(noise, 2, axis=0)
        noise = without + guidance * (with_prompt - without)
        return scheduler.step(state, noise, t, latents).to_tuple()

    latents = latents_of(program, pipeline)
    state = jax.eval_shape(
        lambda state: scheduler.set_timesteps(
            state, num_inference_steps=program.steps, shape=latents.shape
        ),
        params["scheduler"],
    )
    texts = 2 * program.batch  # without the prompts, and with them
    tokens = pipeline.text_encoder.config.max_position_embeddings
    context = array(texts, tokens, unet.config.cross_attention_dim)
    condition = {}
    if "text_encoder_2" in params:
        pooled = array(texts, pipeline.text_encoder_2.config.projection_dim)
        condition["added_cond_kwargs"] = {"text_embeds": pooled, "time_ids": array(texts, 6)}
    guidance = array(1)
    number = array(dtype=jnp.int32)
    arguments = (params["unet"], latents, state, guidance, number, context, condition)
    return Piece(denoise, arguments, tree_bytes(params["unet"]))


def take_decoder(program: Program) -> Piece:
    """The half of the VAE that makes images from latents."""
    pipeline, params = shapes_of(program)
    vae = pipeline.vae

    def decode(vae_params, latents):
        latents = 1 / vae.config.scaling_factor * latents
        image = vae.apply({"params": vae_params}, latents, method=vae.decode).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    decoder = {name: params["vae"][name] for name in ("decoder", "post_quant_conv")}
    arguments = (decoder, latents_of(program, pipeline))
    return Piece(decode, arguments, tree_bytes(decoder))


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def token_ids(program: Program, pipeline) -> jax.ShapeDtypeStruct:
    """(batch, tokens), or for XL, with its two encoders, (batch, 2, tokens)."""
    tokens = pipeline.text_encoder.config.max_position_embeddings
    if hasattr(pipeline, "text_encoder_2"):
        return array(program.batch, 2, tokens, dtype=jnp.int32)
    return array(program.batch, tokens, dtype=jnp.int32)


def latents_of(program: Program, pipeline) -> jax.ShapeDtypeStruct:
    """(batch, channels, height, width)."""
    scale = pipeline.vae_scale_factor
    channels = pipeline.unet.config.in_channels
    return array(program.batch, channels, program.height // scale, program.width // scale)
