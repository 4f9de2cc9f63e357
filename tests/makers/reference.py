"""What PyTorch's classes say of the model: ``python -m tests.makers.reference [FOLDER]``.

It writes two files. ``pytorch-names.json.gz`` has the names and shapes of all parameters of Stable
Diffusion 1.4, 2.1 and XL, from modules that PyTorch builds without memory. ``pytorch-model.npz``
has images of the bundled checkpoints by diffusers' pipelines, with every sampler; what small
modules with made-up parameters give; and where schedulers end.
"""

import json

import diffusers
import numpy as np
import torch
import transformers

from tests.makers import common
from tests.makers.pipelines import (
    build_module,
    build_pipeline,
    draw,
    fill,
    folder_to_write,
    given,
    read_configurations,
    versions,
)


def name_parameters() -> dict:
    """For each model its configurations, and for each part the names and shapes of parameters."""
    real = common.ROOT / "course" / "tpu" / "configurations"
    models = {
        "sd": read_configurations(real / "sd"),
        "sdxl": read_configurations(real / "sdxl"),
    }
    models["sd21"] = models["sd"] | common.SD21
    found = {}
    for model, configurations in models.items():
        parts = {}
        for part, options in configurations.items():
            with torch.device("meta"):
                state = build_module(part, options).state_dict()
            parts[part] = {name: list(value.shape) for name, value in state.items()}
        found[model] = {"configurations": configurations, "parameters": parts}
    return found


def draw_images() -> dict:
    """Images of the bundled checkpoints with every sampler, and the noise from which they come."""
    noise = np.random.default_rng(0).standard_normal((8, 4, 8, 8), np.float32)
    latents = noise[: len(common.PROMPTS)]
    found = {"latents": latents}
    for name in ("shapes-sd", "shapes-sdxl"):
        pipeline = build_pipeline(name)
        schedule = pipeline.scheduler.config
        for sampler, steps in common.STEPS.items():
            scheduler = getattr(diffusers, common.SCHEDULERS[sampler])
            pipeline.scheduler = scheduler.from_config(schedule)
            found[f"{name} {sampler}"] = draw(pipeline, common.PROMPTS, latents, steps)
    return found


def run_small_modules() -> dict:
    """What small modules with made-up parameters make of made-up inputs."""
    text = fill(build_module("text_encoder_2", common.SMALL_TEXT))
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 99, (2, 77)))
    encoded = text(ids, output_hidden_states=True)
    found = {
        "ids": ids.numpy().astype(np.int32),
        "text hidden": encoded.hidden_states[-2],
        "pooled": encoded.text_embeds,
    }
    for name, options in common.SMALL_UNETS.items():
        added = None
        if name == "sdxl":
            sizes = torch.tensor([common.SIZES, common.SIZES])
            added = {"text_embeds": given("pooled", 2, 24), "time_ids": sizes}
        unet = fill(build_module("unet", options))
        found[f"unet {name}"] = unet(
            given("latents", 2, 4, 8, 12),
            torch.tensor([10, 700]),
            given("context", 2, 7, 32),
            added_cond_kwargs=added,
        ).sample
    vae = fill(build_module("vae", common.SMALL_VAE))
    scale = vae.config.scaling_factor
    image = given("image", 1, 3, 8, 12).sigmoid()
    encoded = vae.encode(2 * image - 1).latent_dist
    found["mean"] = scale * encoded.mean
    found["deviation"] = scale * encoded.std
    decoded = vae.decode(given("latents of an image", 1, 4, 4, 6) / scale).sample
    found["decoded"] = (decoded / 2 + 0.5).clamp(0, 1)
    return {name: np.asarray(value) for name, value in found.items()}


def run_scheduler(kind: str, spacing: str, prediction: str, steps: int) -> np.ndarray:
    """Where a scheduler ends that asks the stand-in for a model."""
    options = common.schedule_options(spacing, prediction)
    scheduler = getattr(diffusers, kind).from_config(options)
    scheduler.set_timesteps(steps)
    x = torch.linspace(-2, 2, 8) * scheduler.init_noise_sigma
    for timestep in scheduler.timesteps:
        scaled = scheduler.scale_model_input(x, timestep)
        output = common.stand_in(scaled, float(timestep))
        x = scheduler.step(output, timestep, x).prev_sample
    return x.numpy()


def run_schedulers() -> dict:
    """Where each scheduler ends for each spacing, prediction and number of steps."""
    found = {}
    for sampler, kind in common.SCHEDULERS.items():
        for spacing in common.SPACINGS:
            for prediction in common.PREDICTIONS:
                ends = [run_scheduler(kind, spacing, prediction, steps) for steps in common.COUNTS]
                found[f"{sampler} {spacing} {prediction}"] = np.stack(ends)
    return found


def main() -> None:
    folder = folder_to_write(__doc__)
    made_by = versions(torch, diffusers, transformers)
    common.write_json(folder / "pytorch-names.json.gz", made_by, name_parameters())
    with torch.no_grad():
        found = draw_images() | run_small_modules() | run_schedulers()
    np.savez_compressed(folder / "pytorch-model.npz", versions=json.dumps(made_by), **found)


if __name__ == "__main__":
    main()
