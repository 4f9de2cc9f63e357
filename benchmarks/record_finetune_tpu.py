"""Record what the TPU compiler says about a training step: ``benchmarks/finetune_tpu.json``.

The step is that of ``course.finetune``, and chapter 14 shows these answers. Each is written as soon
as it is there, and what is recorded is left out, so an interrupted run goes on where it stopped.
Delete the file to ask anew. A step took from 3 to 20 minutes on 2 cores beside other work.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from benchmarks.common import FOLDER, make_parser, name_of, read_json, work_through, write_json
from course.finetune import training
from course.sd import ATTENTION, parameter_shapes
from course.tpu import Report, ask_compiler, tpu_devices
from course.tpu.pieces import array, load_config

TARGET = FOLDER / "finetune_tpu.json"


def question(model: str, layers: str, batch: int, *, remat: bool, attention: str) -> dict:
    """What ``ask`` is asked, as the record has it."""
    names = {"model": model, "layers": layers, "batch": batch}
    return names | {"remat": remat, "attention": attention}


QUESTIONS = [
    question("sdxl", "attention", 1, remat=True, attention="flash"),
    question("sd", "all", 4, remat=False, attention="flash"),
    question("sdxl", "attention", 1, remat=False, attention="flash"),
    question("sd", "all", 4, remat=True, attention="flash"),
    question("sdxl", "attention", 4, remat=True, attention="flash"),
    question("sdxl", "attention", 2, remat=False, attention="flash"),
    question("sdxl", "attention", 1, remat=False, attention="plain"),
    # The usual recipes as course.finetune has them, if no option says otherwise.
    question("sd", "attention", 4, remat=False, attention="plain"),
    question("sdxl", "attention", 4, remat=True, attention="plain"),
]
EXAMPLES = 424  # images that are trained on, and their captions; a step takes a batch of them


def ask(
    model: str, layers: str, batch: int, remat: bool, attention: str, chip: str = "v5e"
) -> Report:
    """The report on a step: UNet and text encoders are in bfloat16, the LoRA in float32."""
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
    mesh = Mesh(np.array(tpu_devices(chip)), ("data",), axis_types=(AxisType.Auto,))
    step = training.compile_step(config, recipe, mesh)
    return ask_compiler(step, state, params, data, chip=chip)


def record(question: dict) -> None:
    report = ask(**question)
    print(report.verdict, flush=True)
    answers = read_json(TARGET, default=[])
    answers.append({"question": question, "report": dataclasses.asdict(report)})
    write_json(TARGET, answers)


def find_left() -> dict[str, Callable[[], None]]:
    known = [answer["question"] for answer in read_json(TARGET, default=[])]
    left = {}
    for question in QUESTIONS:
        if question not in known:
            left[name_of(question)] = functools.partial(record, question)
    return left


def main() -> int:
    options = make_parser(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    return work_through(find_left, options)


if __name__ == "__main__":
    sys.exit(main())
