"""What PyTorch draws with the LoRA that chapter 14 ships: ``python -m training.pytorch_teach``.

diffusers and peft read both files of checkpoints/taught. ``tests/fixtures/pytorch-teach.npz`` gets the images that the
pipeline draws with them, the noise from which it does, and the tokens of its prompts.
"""

import json

import diffusers
import numpy as np
import peft
import torch
import transformers

from training.pytorch_own_weights import FIXTURES, GUIDANCE, STEPS
from training.pytorch_reference import ROOT, build_pipeline

TAUGHT = ROOT / "checkpoints" / "taught"
PROMPTS = ["a large red bowtie on a white background", "a medium blue bowtie on a yellow background"]


def main() -> None:
    diffusers.logging.set_verbosity_error()
    pipeline = build_pipeline("shapes-sd")
    pipeline.load_textual_inversion(TAUGHT, weight_name="bowtie.word.safetensors")
    pipeline.load_lora_weights(TAUGHT, weight_name="bowtie.safetensors")
    latents = np.random.default_rng(0).standard_normal((len(PROMPTS), 4, 8, 8), np.float32)
    settings = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np"}
    with torch.no_grad():
        images = pipeline(PROMPTS, latents=torch.from_numpy(latents), **settings).images
    np.savez_compressed(
        FIXTURES / "pytorch-teach.npz",
        versions=json.dumps({module.__name__: module.__version__ for module in (torch, diffusers, transformers, peft)}),
        prompts=PROMPTS,
        ids=pipeline.tokenizer(PROMPTS, padding="max_length", max_length=77).input_ids,
        latents=latents,
        images=np.round(images * 65535).astype(np.uint16),
    )


if __name__ == "__main__":
    main()
