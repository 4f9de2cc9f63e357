"""Draw the fixture of the parity test with PyTorch's own pipeline: ``python -m training.pytorch_pictures FOLDER FILE``.

Nothing here imports JAX. The test that compares needs no PyTorch.
"""

import argparse
import os
import sys
from pathlib import Path

import numpy as np

os.environ["USE_FLAX"] = "0"  # or diffusers and transformers would import JAX because it is installed
import torch
from diffusers import DiffusionPipeline

from training import diffusion

PROMPTS = [
    "a small red heart on a white background",
    "a large blue star on a yellow background",
    "a medium green ring on a black background",
    "a purple moon",
    "an arrow on an orange background",
    "a large white cross",
    "a triangle",
    "pink",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a pipeline in PyTorch's format")
    parser.add_argument("file", type=Path, help="the .npz file to write")
    arguments = parser.parse_args()
    pipeline = DiffusionPipeline.from_pretrained(arguments.folder)
    latents = np.random.default_rng(0).standard_normal((len(PROMPTS), 4, 8, 8), dtype=np.float32)
    images = pipeline(
        PROMPTS,
        latents=torch.from_numpy(latents),
        num_inference_steps=diffusion.STEPS,
        guidance_scale=diffusion.GUIDANCE_SCALE,
        output_type="np",
    ).images
    np.savez_compressed(
        arguments.file,
        prompts=PROMPTS,
        latents=latents,
        # Half precision keeps 0.06 of 255, which is enough to see a difference of 1.
        images=images.astype(np.float16),
        num_inference_steps=diffusion.STEPS,
        guidance_scale=diffusion.GUIDANCE_SCALE,
    )
    assert not {"jax", "flax"} & set(sys.modules), "this picture must owe nothing to JAX"
    print(f"Wrote {arguments.file}.")


if __name__ == "__main__":
    main()
