"""Record what the TPU compiler says about the training step of ``course.teach``: ``benchmarks/teach_tpu.json``.

Chapter 14 shows these answers. Each is written as soon as it is there, and what is recorded is left out, so an
interrupted run goes on where it stopped. A step of Stable Diffusion XL took from 2 to 66 minutes on 2 cores.
"""

import argparse
import dataclasses
import json
import logging
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from course import teach
from course.tpu import tpu_devices
from course.tpu.compiler import ask_compiler, write_json
from course.tpu.model import array, load_config
from stable_diffusion import parameter_shapes

TARGET = Path(__file__).with_name("teach_tpu.json")
QUESTIONS = [
    {"model": "sdxl", "layers": "attention", "batch": 1, "checkpoint": True},
    {"model": "sd", "layers": "all", "batch": 4, "checkpoint": False},
    {"model": "sdxl", "layers": "attention", "batch": 1, "checkpoint": False},
    {"model": "sd", "layers": "all", "batch": 4, "checkpoint": True},
    {"model": "sdxl", "layers": "attention", "batch": 4, "checkpoint": True},
    {"model": "sdxl", "layers": "attention", "batch": 2, "checkpoint": False},
]


def ask(model: str, layers: str, batch: int, checkpoint: bool, chip: str = "v5e"):
    """The compiler's report on a step: the UNet and the text encoders are in bfloat16, the LoRA in float32."""
    config = load_config(model)
    recipe = teach.Recipe(layers=layers, batch=batch, rehearsed=batch // 4, checkpoint=checkpoint)
    params = parameter_shapes(config, "bfloat16")
    del params["vae"]  # it encodes the images before training begins
    word = not config.is_xl
    state = jax.eval_shape(lambda params: teach.begin(params, recipe, word), params)
    side, ids = config.unet.sample_size, (len(config.text), config.text[0].max_position_embeddings)
    examples = 424
    latents = array(examples, side, side, config.unet.in_channels, dtype="float32")
    data = teach.Data(
        latents, array(examples, *ids, dtype="int32"), array(1, *ids, dtype="int32"), array(dtype="int32")
    )
    mesh = Mesh(np.array(tpu_devices(chip)[:1]), ("data",), axis_types=(AxisType.Auto,))
    return ask_compiler(teach.compile_step(config, recipe, mesh), state, params, data, chip=chip)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only the model of this name")
    parser.add_argument("--list", action="store_true", help="print what is left to ask, and compile nothing")
    options = parser.parse_args()
    answers = json.loads(TARGET.read_text()) if TARGET.exists() else []
    known = [answer["question"] for answer in answers]
    left = [each for each in QUESTIONS if each not in known and options.only in ("", each["model"])]
    if options.list:
        print("\n".join(map(str, left)) or "Nothing is left.")
        return 0
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    jax.config.update("jax_platforms", "cpu")
    for question in left:
        logging.info("%s", question)
        report = ask(**question)
        logging.info("%s", report.verdict)
        answers = json.loads(TARGET.read_text()) if TARGET.exists() else []
        answers.append({"question": question, "report": dataclasses.asdict(report)})
        write_json(TARGET, answers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
