"""What PyTorch draws with chapter 14's LoRA: ``python -m tests.makers.finetune [FOLDER]``.

diffusers and peft read both files of checkpoints/taught. ``pytorch-finetune.npz`` gets the images
that the pipeline draws with them, the noise from which it does, and the tokens of its prompts.
"""

import json

import diffusers
import numpy as np
import peft
import torch
import transformers

from tests.makers.common import CHECKPOINTS
from tests.makers.pipelines import build_pipeline, draw, folder_to_write, versions

TAUGHT = CHECKPOINTS / "taught"
STEPS = 10
PROMPTS = [
    "a large red bowtie on a white background",
    "a medium blue bowtie on a yellow background",
]


def main() -> None:
    folder = folder_to_write(__doc__)
    pipeline = build_pipeline("shapes-sd")
    pipeline.load_textual_inversion(TAUGHT, weight_name="bowtie.word.safetensors")
    pipeline.load_lora_weights(TAUGHT, weight_name="bowtie.safetensors")
    latents = np.random.default_rng(0).standard_normal((len(PROMPTS), 4, 8, 8), np.float32)
    with torch.no_grad():
        images = draw(pipeline, PROMPTS, latents, STEPS)
    np.savez_compressed(
        folder / "pytorch-finetune.npz",
        versions=json.dumps(versions(torch, diffusers, transformers, peft)),
        prompts=PROMPTS,
        ids=pipeline.tokenizer(PROMPTS, padding="max_length", max_length=77).input_ids,
        latents=latents,
        images=images,
    )


if __name__ == "__main__":
    main()
