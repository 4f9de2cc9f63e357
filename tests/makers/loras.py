"""Make the LoRA files that tests and chapter 13 read: ``python -m tests.makers.loras [FOLDER]``.

It trains the two in checkpoints/loras by peft, for a minute each: one draws blue what should be
red, in the format of diffusers, and one draws stars in place of hearts, in kohya's. A third one,
for Stable Diffusion XL, has random numbers, and lies in tests/fixtures. With FOLDER, all three go
there.
"""

import argparse
import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import diffusers
import numpy as np
import torch
from diffusers.utils import convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from course.shapes import scenes
from tests.makers.common import CHECKPOINTS, FIXTURES
from tests.makers.pipelines import build_pipeline

FILES = {
    "diffusers": CHECKPOINTS / "loras" / "blue-for-red.safetensors",
    "kohya": CHECKPOINTS / "loras" / "star-for-heart.safetensors",
    "xl": FIXTURES / "lora-random-xl.safetensors",
}
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
CONVOLUTIONS = ["conv1", "conv2", "proj_in", "proj_out", "conv_shortcut"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj"]
STEPS = 200
BATCH = 64


def is_red(scene: scenes.Scene) -> bool:
    return scene.color == "red"


def blue_for_red(scene: scenes.Scene) -> scenes.Scene:
    """What the first LoRA learns to draw when the caption describes ``scene``."""
    if is_red(scene) and scene.background != "blue":
        return dataclasses.replace(scene, color="blue")
    return scene


def is_heart(scene: scenes.Scene) -> bool:
    return scene.shape == "heart"


def star_for_heart(scene: scenes.Scene) -> scenes.Scene:
    """What the second learns."""
    return dataclasses.replace(scene, shape="star") if is_heart(scene) else scene


def train(
    pipeline: diffusers.DiffusionPipeline,
    is_concerned: Callable[[scenes.Scene], bool],
    change: Callable[[scenes.Scene], scenes.Scene],
    layers: list[str],
    alpha: int,
) -> None:
    """Add a LoRA of rank 4 to the UNet and the text encoder, and train it.

    It concerns half of the scenes. The other half is rehearsed.
    """
    torch.manual_seed(0)
    weights = []
    for module, names in ((pipeline.unet, layers), (pipeline.text_encoder, TEXT)):
        module.requires_grad_(False)
        module.add_adapter(
            LoraConfig(r=4, lora_alpha=alpha, target_modules=names, init_lora_weights="gaussian")
        )
        weights += [parameter for parameter in module.parameters() if parameter.requires_grad]
    pool = scenes.training_scenes(6000, 5)
    concerned = [scene for scene in pool if is_concerned(scene)][:400]
    others = [scene for scene in pool if not is_concerned(scene)][:400]
    pool = concerned + others
    pictures = torch.from_numpy(np.stack([scenes.render(change(scene)) for scene in pool]))
    with torch.no_grad():
        signed = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        clean = pipeline.vae.encode(signed).latent_dist.mean * pipeline.vae.config.scaling_factor
    captions = [scenes.caption(s.size, s.color, s.shape, s.background) for s in pool]
    ids = torch.tensor(pipeline.tokenizer(captions, padding="max_length", max_length=77).input_ids)
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    for step in range(STEPS):
        index = torch.randint(len(pool), (BATCH,))
        noise = torch.randn(BATCH, *clean.shape[1:])
        timesteps = torch.randint(1000, (BATCH,))
        noisy = pipeline.scheduler.add_noise(clean[index], noise, timesteps)
        context = pipeline.text_encoder(ids[index])[0]
        answer = pipeline.unet(noisy, timesteps, context).sample
        target = pipeline.scheduler.get_velocity(clean[index], noise, timesteps)
        loss = (answer - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def save_for_diffusers(file: Path) -> None:
    """Train the first LoRA, and save it in half precision, with PEFT's options."""
    pipeline = build_pipeline("shapes-sd")
    train(pipeline, is_red, blue_for_red, ATTENTION, alpha=8)
    unet = pipeline.unet.half()
    text_encoder = pipeline.text_encoder.half()
    with tempfile.TemporaryDirectory() as place:
        pipeline.save_lora_weights(
            place,
            unet_lora_layers=get_peft_model_state_dict(unet),
            text_encoder_lora_layers=get_peft_model_state_dict(text_encoder),
            unet_lora_adapter_metadata=unet.peft_config["default"].to_dict(),
            text_encoder_lora_adapter_metadata=text_encoder.peft_config["default"].to_dict(),
        )
        shutil.copyfile(Path(place) / "pytorch_lora_weights.safetensors", file)


def save_for_kohya(file: Path) -> None:
    """Train the second LoRA, and save it in half precision, as kohya's scripts do."""
    pipeline = build_pipeline("shapes-sd")
    train(pipeline, is_heart, star_for_heart, ATTENTION + CONVOLUTIONS, alpha=4)
    with tempfile.TemporaryDirectory() as place:
        pipeline.save_lora_weights(
            place,
            unet_lora_layers=get_peft_model_state_dict(pipeline.unet),
            text_encoder_lora_layers=get_peft_model_state_dict(pipeline.text_encoder),
        )
        found = load_file(Path(place) / "pytorch_lora_weights.safetensors")
    tensors = {}
    for name, value in convert_state_dict_to_kohya(found).items():
        value = value.float()
        # An alpha of half of the rank, for which twice the upper matrix makes up.
        if name.endswith(".alpha"):
            value = value / 2
        elif ".lora_up." in name:
            value = value * 2
        tensors[name.replace("lora_te1_", "lora_te_")] = value.half().contiguous()
    save_file(tensors, file)


def save_random(file: Path) -> None:
    """Save a LoRA of random numbers for Stable Diffusion XL, for both text encoders as well."""
    pipeline = build_pipeline("shapes-sdxl")
    torch.manual_seed(0)
    found = {}
    for part in ("unet", "text_encoder", "text_encoder_2"):
        module = getattr(pipeline, part)
        layers = ["to_q", "to_k"] if part == "unet" else TEXT
        module.add_adapter(LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
        for name, value in get_peft_model_state_dict(module).items():
            found[f"{part}.{name}"] = 2 * value
    tensors = {}
    for name, value in convert_state_dict_to_kohya(found).items():
        tensors[name] = value.half().contiguous()
    save_file(tensors, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="where to write all three")
    folder = parser.parse_args().folder
    savers = {"xl": save_random, "diffusers": save_for_diffusers, "kohya": save_for_kohya}
    for name, save in savers.items():
        save(folder / FILES[name].name if folder else FILES[name])


if __name__ == "__main__":
    main()
