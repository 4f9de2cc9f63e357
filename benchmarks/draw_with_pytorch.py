"""Draw with PyTorch's diffusers, and say how long it took: for each line of standard input, a sampler and steps.

``python -m benchmarks.draw_with_pytorch FOLDER BATCH``; `benchmarks.record_cpu` starts it. Nothing here imports JAX.
"""

import os
import sys
import time

os.environ["USE_FLAX"] = "0"  # or diffusers and transformers would import JAX because it is installed
import diffusers

SAMPLERS = {"ddim": diffusers.DDIMScheduler, "dpm++": diffusers.DPMSolverMultistepScheduler}


def main() -> None:
    folder, batch = sys.argv[1:]
    pipeline = diffusers.StableDiffusionPipeline.from_pretrained(folder)
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
