"""What can be asked about a model: pieces of a program, each a function and its shapes.

A program without an attention is a diffusers pipeline's, and one with an attention is that of the
model of ``course.sd`` or ``course.flux2``. All have the same pieces. Nothing here needs weights:
shapes come from a model's configuration files.
"""

import dataclasses
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course import flux2
from course.families import Config, code_of, find_code
from course.flux2.tokenizer import MAX_LENGTH
from course.model.files import read_json
from course.model.guidance import pair
from course.sd import (
    ATTENTION,
    denoise_step,
    encode_condition,
    generate,
    parameter_shapes,
)
from course.sd.samplers import SAMPLERS
from course.sd.vae import decode
from course.tpu.answers import Answer, Report
from course.tpu.chips import find_chip, tpu_devices
from course.tpu.compiler import ask_compiler
from course.tpu.jaxpr import repeated_flops
from course.tpu.programs import DECODER, ENCODERS, PARTS, STEP, WHOLE, Program, configured_folder
from course.tpu.records import recorded_answers
from helpers import require_flax


class Piece(NamedTuple):
    """What the compiler is asked about: a function, and shapes of its arguments."""

    function: Callable
    arguments: tuple
    #: what a run has to move; None for all arguments that are read, and the result
    least_bytes: int | None = None
    #: whether layers are run by ``jax.lax.scan``, whose body the compiler counts once
    is_scanned: bool = False

    def ask(self, chip: str, timeout: float | None = None) -> Report:
        """Ask the compiler, see `course.tpu.ask_compiler`.

        The operations are then those of a run, but for loops other than scans.
        """
        report = ask_compiler(self.function, *self.arguments, chip=chip, timeout=timeout)
        if report.work is None:
            return report
        work = report.work
        if self.least_bytes is not None:
            work = dataclasses.replace(work, least_bytes=self.least_bytes)
        if self.is_scanned:
            more = repeated_flops(self.function, *self.arguments)
            work = dataclasses.replace(work, flops=work.flops + more)
        return dataclasses.replace(report, work=work)


def take_piece(program: Program, name: str) -> Piece:
    """Return a piece of a program: `WHOLE`, or one of its `PARTS`."""
    if program.attention is None:
        takes = PIPELINE_PIECES
    elif isinstance(load_config(program.model), flux2.Config):
        takes = FLUX2_PIECES
    else:
        takes = MODEL_PIECES
    return takes[name](program)


def ask_about(program: Program, timeout: float | None = None) -> Answer:
    """Ask the compiler about a whole program and, if it fits, about its parts.

    It takes half a minute for a bundled checkpoint, and long for a real model: ten minutes for a
    step alone. ``timeout`` is for each piece, see `course.tpu.ask_compiler`.
    """
    reports = {WHOLE: take_piece(program, WHOLE).ask(program.chip, timeout)}
    if reports[WHOLE].fits:
        for name in PARTS:
            reports[name] = take_piece(program, name).ask(program.chip, timeout)
    return Answer(program, reports, parameter_bytes(program))


def answer_or_recall(program: Program) -> Answer:
    """Ask the compiler about a program; where it cannot be asked, recall the recorded answer.

    Raises
    ------
    RuntimeError
        If the compiler cannot be asked here, and nobody recorded an answer.
    """
    try:
        find_chip(program.chip)
    except RuntimeError as error:
        for answer in recorded_answers(attention=program.attention):
            if answer.program == program:
                return answer
        raise RuntimeError(f"{error} None is recorded on {program}.") from None
    return ask_about(program)


def parameter_bytes(program: Program) -> int:
    """Return the bytes of the parameters of a program's models."""
    if program.attention is None:
        _, params = build_pipeline(program)
    else:
        config = load_config(program.model)
        params = code_of(config).parameter_shapes(config, program.dtype)
    # A scheduler has a state, and no parameters.
    return sum(tree_bytes(tree) for name, tree in params.items() if name != "scheduler")


def tree_bytes(tree) -> int:
    """Return the bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def array(*shape: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    """Return the shape of an array."""
    return jax.ShapeDtypeStruct(shape, dtype)


# diffusers' Flax pipelines


COMPUTING_PARTS = ("scheduler", "text_encoder", "text_encoder_2", "unet", "vae")


def build_pipeline(program: Program) -> tuple:
    """Build a program's pipeline, without weights and without a vocabulary.

    Returns
    -------
    tuple
        The pipeline and its parameters, as ``from_pretrained`` gives them, with
        ``jax.ShapeDtypeStruct`` in the place of arrays.

    Raises
    ------
    ValueError
        If there is no Flax class for one of its parts.

    Examples
    --------
    >>> from course.tpu import make_program
    >>> pipeline, params = build_pipeline(make_program("shapes-sd"))
    >>> params["unet"]["conv_in"]["kernel"]
    ShapeDtypeStruct(shape=(3, 3, 4, 96), dtype=bfloat16)
    """
    return _build(program.model, program.dtype, program.split_head_dim)


@cache  # it takes seconds
def _build(model: str, dtype: str, split_head_dim: bool) -> tuple:
    require_flax()
    import diffusers  # the model of course.sd does without both
    import transformers

    folder = configured_folder(model)
    index = read_json(folder / "model_index.json")
    parts = {}
    params = {}
    for part in COMPUTING_PARTS:
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
            config = read_json(folder / part / "scheduler_config.json")
            parts[part] = cls.from_config(config)
            params[part] = jax.eval_shape(parts[part].create_state)
            continue
        config = read_json(folder / part / "config.json")
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


def whole_pipeline(program: Program) -> Piece:
    """Return the pipeline's ``_generate``, pmapped as in chapters 5 and 7."""
    pipeline, params = build_pipeline(program)
    devices = tpu_devices(program.chip, program.chips)

    def on_each(tree):
        """Give every shape of a tree a leading axis for the devices."""
        return jax.tree.map(lambda leaf: array(len(devices), *leaf.shape, dtype=leaf.dtype), tree)

    ids = on_each(pipeline_ids(program, pipeline))
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


def pipeline_encoders(program: Program) -> Piece:
    """Return the text encoders, which read prompts and negative prompts, each by themselves.

    Their weights are those that a run reads whole: of the tokens' embeddings, it reads a few rows.
    """
    pipeline, params = build_pipeline(program)
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
    ids = pipeline_ids(program, pipeline)
    return Piece(encode, (encoders, ids, ids), weights)


def pipeline_step(program: Program) -> Piece:
    """Return a step of the loop in ``_generate``: the UNet, guidance, and the scheduler."""
    pipeline, params = build_pipeline(program)
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

    latents = pipeline_latents(program, pipeline)
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


def pipeline_decoder(program: Program) -> Piece:
    """Return the half of the VAE that makes images from latents."""
    pipeline, params = build_pipeline(program)
    vae = pipeline.vae

    def decode(vae_params, latents):
        latents = 1 / vae.config.scaling_factor * latents
        image = vae.apply({"params": vae_params}, latents, method=vae.decode).sample
        return (image / 2 + 0.5).clip(0, 1).transpose(0, 2, 3, 1)

    decoder = {name: params["vae"][name] for name in ("decoder", "post_quant_conv")}
    arguments = (decoder, pipeline_latents(program, pipeline))
    return Piece(decode, arguments, tree_bytes(decoder))


def pipeline_ids(program: Program, pipeline) -> jax.ShapeDtypeStruct:
    """Return the shape (batch, tokens), or for XL, with its two encoders, (batch, 2, tokens)."""
    tokens = pipeline.text_encoder.config.max_position_embeddings
    if hasattr(pipeline, "text_encoder_2"):
        return array(program.batch, 2, tokens, dtype=jnp.int32)
    return array(program.batch, tokens, dtype=jnp.int32)


def pipeline_latents(program: Program, pipeline) -> jax.ShapeDtypeStruct:
    """Return the shape (batch, channels, height, width)."""
    scale = pipeline.vae_scale_factor
    channels = pipeline.unet.config.in_channels
    return array(program.batch, channels, program.height // scale, program.width // scale)


PIPELINE_PIECES = {
    WHOLE: whole_pipeline,
    ENCODERS: pipeline_encoders,
    STEP: pipeline_step,
    DECODER: pipeline_decoder,
}

# The model of course.sd


def load_config(model: str) -> Config:
    """Read the configuration of a model, see ``Program.model``."""
    folder = configured_folder(model)
    return find_code(folder).read_config(folder)


def whole_model(program: Program) -> Piece:
    """Return ``course.sd.generate``, from token ids to images."""
    config = load_config(program.model)

    def draw(params, ids, negative_ids, latents, steps, guidance):
        return generate(
            params,
            config,
            ids,
            key=None,
            negative_ids=negative_ids,
            steps=steps,
            guidance=guidance,
            latents=latents,
            attention=ATTENTION[program.attention],
            height=program.height,
            width=program.width,
            decode_batch=program.decode_batch,
        )

    params = parameter_shapes(config, program.dtype)
    ids = model_ids(program, config)
    negative_ids = None if config.is_xl else ids
    steps = array(dtype=jnp.int32)
    guidance = array(dtype=jnp.float32)
    arguments = (params, ids, negative_ids, model_latents(program, config), steps, guidance)
    return Piece(draw, arguments)


def model_encoders(program: Program) -> Piece:
    """Return the text encoders, and what the UNet makes of their results once for all steps."""
    config = load_config(program.model)

    def encode(params, ids, negative_ids):
        return encode_condition(
            params, config, ids, negative_ids, height=program.height, width=program.width
        )

    params = parameter_shapes(config, program.dtype)
    ids = model_ids(program, config)
    return Piece(encode, (params, ids, ids), is_scanned=True)


def model_step(program: Program) -> Piece:
    """Return a step of denoising: the model's prediction with guidance, and the sampler."""
    config = load_config(program.model)
    sampler = SAMPLERS[config.schedule.sampler]

    def denoise(p, condition, guidance, i, latents, memory):
        point = sampler.point(config.schedule, program.steps, i)
        predicted = denoise_step(
            {"unet": p},
            config,
            latents,
            point.timestep,
            condition,
            guidance,
            attention=ATTENTION[program.attention],
        )
        last = program.steps - 1
        return sampler.step(config.schedule, latents, predicted, point, i, last, memory)

    encoders = model_encoders(program)
    condition = jax.eval_shape(encoders.function, *encoders.arguments)
    params = parameter_shapes(config, program.dtype)
    latents = model_latents(program, config)
    memory = jax.eval_shape(sampler.memory, latents)
    guidance = array(dtype=jnp.float32)
    i = array(dtype=jnp.int32)
    arguments = (params["unet"], condition, guidance, i, latents, memory)
    return Piece(denoise, arguments, is_scanned=True)


def model_decoder(program: Program) -> Piece:
    """Return the half of the VAE that makes images from latents."""
    config = load_config(program.model)

    def draw(p, latents):
        return decode(p, config.vae, latents, ATTENTION[program.attention])

    params = parameter_shapes(config, program.dtype)
    return Piece(draw, (params["vae"], model_latents(program, config)))


def model_ids(program: Program, config: Config) -> jax.ShapeDtypeStruct:
    """Return the shape (batch, text encoders, tokens)."""
    tokens = config.text[0].max_position_embeddings
    return array(program.batch, len(config.text), tokens, dtype=jnp.int32)


def model_latents(program: Program, config: Config) -> jax.ShapeDtypeStruct:
    """Return the shape (batch, height, width, channels)."""
    scale = config.pixels_per_latent
    return array(
        program.batch,
        program.height // scale,
        program.width // scale,
        config.unet.in_channels,
        dtype=jnp.float32,
    )


MODEL_PIECES = {
    WHOLE: whole_model,
    ENCODERS: model_encoders,
    STEP: model_step,
    DECODER: model_decoder,
}

# The model of course.flux2, which has guidance where it is not distilled.

FLUX2_GUIDANCE = 4.0


def whole_flux2(program: Program) -> Piece:
    """Return ``course.flux2.generate``, from token ids to images."""
    config = load_config(program.model)

    def draw(params, ids, mask, noise, empty):
        guidance = None if config.is_distilled else FLUX2_GUIDANCE
        size = (program.height, program.width)
        return flux2.generate(
            params, config, ids, mask, noise, *size, program.steps, guidance, empty
        )

    params = flux2.parameter_shapes(config, program.dtype)
    texts = flux2_texts(program, config, program.batch)
    empty = None if config.is_distilled else flux2_texts(program, config, 1)
    return Piece(draw, (params, *texts, flux2_tokens(program, config), empty), is_scanned=True)


def flux2_encoder(program: Program) -> Piece:
    """Return the text encoder, which also reads the empty prompt where there is guidance."""
    config = load_config(program.model)

    def encode(p, ids, mask):
        return flux2.encode_prompts({"text_encoder": p}, config, ids, mask)

    params = flux2.parameter_shapes(config, program.dtype)
    texts = flux2_texts(program, config, program.batch + (not config.is_distilled))
    return Piece(encode, (params["text_encoder"], *texts), is_scanned=True)


def flux2_step(
    program: Program, velocity: Callable = flux2.velocity, guided: bool | None = None
) -> Piece:
    """Return a run of the transformer, of twice the batch where there is guidance.

    ``velocity`` is the transformer, or does the same for tokens that are split over devices. By
    default there is guidance if the model is not distilled.
    """
    config = load_config(program.model)
    rows, columns = flux2.size_in_tokens(config, program.height, program.width)
    if guided is None:
        guided = not config.is_distilled

    def step(p, noisy, texts, time):
        if guided:
            noisy = pair(noisy, noisy)
        times = jnp.full(len(noisy), time)
        places = flux2.positions(rows, columns), flux2.text_positions(texts.shape[1])
        return velocity(p, config.transformer, noisy, texts, times, *places)

    params = flux2.parameter_shapes(config, program.dtype)
    twice = program.batch * (2 if guided else 1)
    channels = config.transformer.joint_attention_dim
    tokens = flux2_text_length(program, config)
    texts = array(twice, tokens, channels, dtype=jnp.dtype(program.dtype))
    noisy = flux2_tokens(program, config)
    return Piece(step, (params["transformer"], noisy, texts, array()), is_scanned=True)


def flux2_decoder(program: Program) -> Piece:
    """Return the half of the VAE that makes images from tokens."""
    config = load_config(program.model)

    def draw(p, tokens):
        return flux2.decode(p, config.vae, tokens, program.height, program.width)

    params = flux2.parameter_shapes(config, program.dtype)
    return Piece(draw, (params["vae"], flux2_tokens(program, config)))


def flux2_text_length(program: Program, config: flux2.Config) -> int:
    """Return how many tokens a prompt has: 512, or fewer if the tokenizer's settings say so."""
    folder = configured_folder(program.model)
    if not (folder / "tokenizer").is_dir():  # of a real model there is its configuration alone
        return MAX_LENGTH
    return flux2.load_tokenizer(folder, config).max_length


def flux2_texts(
    program: Program, config: flux2.Config, prompts: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Return the shapes of token ids and their mask."""
    tokens = flux2_text_length(program, config)
    return array(prompts, tokens, dtype=jnp.int32), array(prompts, tokens, dtype=jnp.bool_)


def flux2_tokens(program: Program, config: flux2.Config) -> jax.ShapeDtypeStruct:
    """Return the shape (batch, tokens, channels)."""
    rows, columns = flux2.size_in_tokens(config, program.height, program.width)
    return array(program.batch, rows * columns, config.transformer.in_channels)


FLUX2_PIECES = {
    WHOLE: whole_flux2,
    ENCODERS: flux2_encoder,
    STEP: flux2_step,
    DECODER: flux2_decoder,
}
