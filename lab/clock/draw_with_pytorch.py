"""Draw with PyTorch's diffusers, and say how long it took: `lab.clock.cpu` starts it.

``python -m lab.clock.draw_with_pytorch FOLDER BATCH`` reads a sampler and a number of steps from
each line of standard input. With a third argument, ``compile``, ``torch.compile`` compiles the
UNet and the VAE's decoder first. Nothing here imports JAX.
"""

import os
import sys
import time

# Otherwise diffusers and transformers import JAX, because it is installed.
os.environ["USE_FLAX"] = "0"
import diffusers
import torch

SAMPLERS = {"ddim": diffusers.DDIMScheduler, "dpm++": diffusers.DPMSolverMultistepScheduler}


def main() -> None:
    folder, batch, *how = sys.argv[1:]
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    if how == ["compile"]:
        pipeline.unet = torch.compile(pipeline.unet, dynamic=False)
        pipeline.vae.decode = torch.compile(pipeline.vae.decode, dynamic=False)
    pipeline.set_progress_bar_config(disable=True)
    prompts = ["a small red heart on a white background"] * int(batch)
    for line in sys.stdin:
        sampler, steps = line.split()
        pipeline.scheduler = SAMPLERS[sampler].from_config(pipeline.scheduler.config)
        start = time.perf_counter()
        pipeline(prompts, num_inference_steps=int(steps), guidance_scale=3.0, output_type="np")
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main()
