"""A training step of ``course.finetune``, which chapter 14 shows.

UNet, transformer and text encoders are in bfloat16, the LoRA in float32. A step took from 3 to 20
minutes on 2 cores beside other work.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from course import flux2
from course.families import Config, code_of
from course.finetune import training
from course.flux2.tokenizer import MAX_LENGTH
from course.sd import ATTENTION
from course.tpu import ask_compiler, tpu_devices
from course.tpu.pieces import array, load_config
from course.tpu.records import answer_of

CHIP = "v5e"
EXAMPLES = 424  # images that are trained on, and their captions; a step takes a batch of them
# Of FLUX.2 a caption takes 8 MB, and so there are as many as own images have, and one for others.
CAPTIONS = 26
# Model, layers, rank, side of the images, batch, remat and attention. Of each, the usual recipe is
# last, as course.finetune has it if no option says otherwise; of Stable Diffusion it has rank 4.
QUESTIONS = [
    ("sdxl", "attention", 8, 1024, 1, True, "flash"),
    ("sd", "all", 8, 512, 4, False, "flash"),
    ("sdxl", "attention", 8, 1024, 1, False, "flash"),
    ("sd", "all", 8, 512, 4, True, "flash"),
    ("sdxl", "attention", 8, 1024, 4, True, "flash"),
    ("sdxl", "attention", 8, 1024, 2, False, "flash"),
    ("sdxl", "attention", 8, 1024, 1, False, "plain"),
    ("sd", "attention", 8, 512, 4, False, "plain"),
    ("sdxl", "attention", 8, 1024, 4, True, "plain"),
    ("flux2", "attention", 16, 512, 1, True, "automatic"),
    ("flux2", "attention", 16, 512, 1, False, "automatic"),
    ("flux2", "attention", 16, 512, 4, True, "automatic"),
    ("flux2", "attention", 16, 1024, 1, False, "automatic"),
    ("flux2", "attention", 16, 1024, 1, True, "automatic"),
    ("flux2", "attention", 16, 1024, 4, True, "automatic"),
]


def questions(rows: list[dict]) -> list[dict]:
    names = ("model", "layers", "rank", "side", "batch", "remat", "attention")
    return [dict(zip(names, question, strict=True)) for question in QUESTIONS]


def answer(
    model: str, layers: str, rank: int, side: int, batch: int, remat: bool, attention: str
) -> dict:
    config = load_config(model)
    recipe = training.Recipe(
        rank=rank,
        layers=layers,
        batch=batch,
        rehearsed=batch // 4,
        remat=remat,
        # The function itself, as there is no TPU here; FLUX.2 leaves no choice.
        attention=attention if model == "flux2" else ATTENTION[attention],
    )
    has_word = model == "sd"
    # What the others do is done before training begins.
    whole = code_of(config).parameter_shapes(config, "bfloat16")
    params = training.trained_parts(whole, has_word)
    state = jax.eval_shape(lambda params: training.init_state(params, recipe, has_word), params)
    data = training.Data(
        latents=latent_shapes(config, side),
        caption=array(EXAMPLES, dtype="int32"),
        texts=text_shapes(config, has_word),
        new=array(dtype="int32"),
        prior_weight=array(dtype="float32"),
    )
    mesh = Mesh(np.array(tpu_devices(CHIP)), ("data",), axis_types=(AxisType.Auto,))
    step = training.compile_step(config, recipe, mesh)
    return answer_of(ask_compiler(step, state, params, data, chip=CHIP))


def latent_shapes(config: Config, side: int) -> jax.ShapeDtypeStruct:
    if isinstance(config, flux2.Config):
        side //= config.vae.pixels_per_token
        return array(EXAMPLES, side, side, config.transformer.in_channels, dtype="float32")
    side //= config.pixels_per_latent
    return array(EXAMPLES, side, side, config.unet.in_channels, dtype="float32")


def text_shapes(config: Config, has_word: bool) -> jax.ShapeDtypeStruct | training.Encoded:
    if isinstance(config, flux2.Config):
        channels = config.transformer.joint_attention_dim
        return array(CAPTIONS, MAX_LENGTH, channels, dtype="bfloat16")
    tokens = config.text[0].max_position_embeddings
    if has_word:
        return array(EXAMPLES, len(config.text), tokens, dtype="int32")
    return training.Encoded(
        array(EXAMPLES, tokens, config.unet.cross_attention_dim, dtype="bfloat16"),
        array(EXAMPLES, config.text[-1].projection_dim, dtype="bfloat16"),
    )
