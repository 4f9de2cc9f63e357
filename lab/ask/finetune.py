"""A training step of ``course.finetune``, which chapter 14 shows.

UNet and text encoders are in bfloat16, the LoRA in float32. A step took from 3 to 20 minutes on 2
cores beside other work.
"""

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from course.finetune import training
from course.sd import ATTENTION, parameter_shapes
from course.tpu import ask_compiler, tpu_devices
from course.tpu.pieces import array, load_config
from course.tpu.records import answer_of

CHIP = "v5e"
EXAMPLES = 424  # images that are trained on, and their captions; a step takes a batch of them
# Model, layers, batch, remat and attention. Last are the usual recipes, as course.finetune has them
# if no option says otherwise.
QUESTIONS = [
    ("sdxl", "attention", 1, True, "flash"),
    ("sd", "all", 4, False, "flash"),
    ("sdxl", "attention", 1, False, "flash"),
    ("sd", "all", 4, True, "flash"),
    ("sdxl", "attention", 4, True, "flash"),
    ("sdxl", "attention", 2, False, "flash"),
    ("sdxl", "attention", 1, False, "plain"),
    ("sd", "attention", 4, False, "plain"),
    ("sdxl", "attention", 4, True, "plain"),
]


def questions(rows: list[dict]) -> list[dict]:
    names = ("model", "layers", "batch", "remat", "attention")
    return [dict(zip(names, question, strict=True)) for question in QUESTIONS]


def answer(model: str, layers: str, batch: int, remat: bool, attention: str) -> dict:
    config = load_config(model)
    recipe = training.Recipe(
        layers=layers,
        batch=batch,
        rehearsed=batch // 4,
        remat=remat,
        attention=ATTENTION[attention],  # the function itself, as there is no TPU here
    )
    has_word = not config.is_xl
    # What the others do is done before training begins.
    params = training.trained_parts(parameter_shapes(config, "bfloat16"), has_word)
    state = jax.eval_shape(lambda params: training.init_state(params, recipe, has_word), params)
    side = config.unet.sample_size
    encoders = len(config.text)
    tokens = config.text[0].max_position_embeddings
    if has_word:
        texts = array(EXAMPLES, encoders, tokens, dtype="int32")
    else:
        texts = training.Encoded(
            array(EXAMPLES, tokens, config.unet.cross_attention_dim, dtype="bfloat16"),
            array(EXAMPLES, config.text[-1].projection_dim, dtype="bfloat16"),
        )
    data = training.Data(
        latents=array(EXAMPLES, side, side, config.unet.in_channels, dtype="float32"),
        caption=array(EXAMPLES, dtype="int32"),
        texts=texts,
        new=array(dtype="int32"),
        prior_weight=array(dtype="float32"),
    )
    mesh = Mesh(np.array(tpu_devices(CHIP)), ("data",), axis_types=(AxisType.Auto,))
    step = training.compile_step(config, recipe, mesh)
    return answer_of(ask_compiler(step, state, params, data, chip=CHIP))
