"""What PyTorch's classes say of Z-Image-Turbo: ``python -m tests.makers.flux2_z_image [FOLDER]``.

It writes two files. ``flux2_z_image_names.json`` has the names and shapes of all parameters of the
transformer, from a module that PyTorch builds without memory. ``flux2_z_image.npz`` is about a
small transformer with made-up parameters: what it makes of made-up inputs, and where its pipeline
ends.
"""

import argparse
import json
import re
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers

from tests.makers.common import FIXTURES, made_up, made_up_input
from tests.makers.pipelines import versions

# As the transformer's config.json in Tongyi-MAI/Z-Image-Turbo has it.
REAL = {
    "all_f_patch_size": [1],
    "all_patch_size": [2],
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
    "cap_feat_dim": 2560,
    "dim": 3840,
    "in_channels": 16,
    "n_heads": 30,
    "n_kv_heads": 30,
    "n_layers": 30,
    "n_refiner_layers": 2,
    "norm_eps": 1e-05,
    "qk_norm": True,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
}
# As large as keeps those sizes different that could be taken for each other.
SMALL = REAL | {
    "axes_dims": [24, 28, 36],
    "axes_lens": [128, 12, 16],
    "cap_feat_dim": 40,
    "dim": 264,
    "in_channels": 4,
    "n_heads": 3,
    "n_kv_heads": 3,
    "n_layers": 3,
}
# Latents of images, and tokens of prompts. The first case has something to fill up everywhere; in
# the second, image and first prompt are whole multiples of 32.
CASES = {
    "filled up": {"size": [8, 12], "lengths": [5, 40], "times": [0.125, 0.75]},
    "whole": {"size": [16, 8], "lengths": [64, 33], "times": [0, 1]},
}
SHIFT, STEPS = 3.0, 3


def name_parameters() -> dict[str, list[int]]:
    """Names and shapes of the parameters of Z-Image-Turbo's transformer.

    Blocks that differ by their numbers only have one name, with ``{count}`` in place of the number.
    """
    with torch.device("meta"):
        module = diffusers.ZImageTransformer2DModel(**REAL)
    numbers, shapes = {}, {}
    for name, value in module.state_dict().items():
        match = re.match(r"(noise_refiner|context_refiner|layers)\.(\d+)\.(.*)", name)
        before, number, after = match.groups() if match else (name, None, "")
        numbers.setdefault((before, after), []).append(number)
        assert shapes.setdefault((before, after), list(value.shape)) == list(value.shape)
    found = {}
    for (before, after), shape in shapes.items():
        found_numbers = numbers[before, after]
        if found_numbers == [None]:
            found[before] = shape
        else:
            assert found_numbers == [str(k) for k in range(len(found_numbers))]
            found[f"{before}.{{{len(found_numbers)}}}.{after}"] = shape
    return found


def build_transformer() -> torch.nn.Module:
    module = diffusers.ZImageTransformer2DModel(**SMALL)
    for name, parameter in module.named_parameters():
        parameter.data = torch.from_numpy(made_up(name, tuple(parameter.shape)))
    return module.eval()


def make_inputs(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Latents and prompts of a case."""
    case = CASES[name]
    lengths = case["lengths"]
    latents = made_up_input(f"{name} latents", 2, SMALL["in_channels"], *case["size"])
    text = made_up_input(f"{name} text", 2, max(lengths), SMALL["cap_feat_dim"])
    prompts = [torch.from_numpy(each[:length]) for each, length in zip(text, lengths, strict=True)]
    return torch.from_numpy(latents), prompts


def run_transformer(module: torch.nn.Module, name: str) -> np.ndarray:
    """What the transformer makes of a case, by its own convention of time and sign."""
    latents, prompts = make_inputs(name)
    time = torch.tensor(CASES[name]["times"], dtype=torch.float32)
    # It takes films, and these have one frame.
    outputs = module(list(latents[:, :, None]), time, prompts).sample
    return torch.stack(outputs)[:, :, 0].numpy()


def run_pipeline(module: torch.nn.Module, name: str) -> np.ndarray:
    """The latents at which diffusers' pipeline ends, which starts from those of a case."""
    latents, prompts = make_inputs(name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    pipeline = diffusers.ZImagePipeline(
        scheduler, vae=None, text_encoder=None, tokenizer=None, transformer=module
    )
    pipeline.set_progress_bar_config(disable=True)
    height, width = CASES[name]["size"]
    images = pipeline(
        prompt_embeds=prompts,
        latents=latents,
        height=8 * height,
        width=8 * width,
        num_inference_steps=STEPS,
        guidance_scale=0,  # Z-Image-Turbo is distilled
        output_type="latent",
    ).images
    return images.numpy()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    folder = parser.parse_args().folder
    made_by = versions(torch, diffusers, transformers)
    recorded = {"versions": made_by, "configuration": REAL, "parameters": name_parameters()}
    text = json.dumps(recorded, indent=0)
    # A shape on the line of its name.
    text = re.sub(r"\[([^]]*)\]", lambda shape: f"[{' '.join(shape[1].split())}]", text)
    (folder / "flux2_z_image_names.json").write_text(text + "\n", encoding="utf-8")
    made_of = {"configuration": SMALL, "cases": CASES, "shift": SHIFT, "steps": STEPS}
    module = build_transformer()
    with torch.no_grad():
        found = {name: run_transformer(module, name) for name in CASES}
        found["drawn"] = run_pipeline(module, "filled up")
    np.savez_compressed(
        folder / "flux2_z_image.npz",
        versions=json.dumps(made_by),
        made_of=json.dumps(made_of),
        **found,
    )


if __name__ == "__main__":
    main()
