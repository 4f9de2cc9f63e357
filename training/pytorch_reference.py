"""What PyTorch's classes say, for the tests of stable_diffusion/: ``python -m training.pytorch_reference FOLDER``.

It writes two files. ``pytorch-names.json.gz`` has the names and shapes of all parameters of Stable Diffusion 1.4, 2.1
and XL, from modules that PyTorch builds without memory. ``pytorch-model.npz`` has images of the bundled checkpoints by
diffusers' pipelines, with every sampler; what small modules with made-up parameters give; and where schedulers end.
"""

import argparse
import gzip
import json
import os
import zlib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["a small red heart on a white background", "a large blue star on a yellow background"]
STEPS = {"ddim": 30, "euler": 30, "dpm++": 15, "pndm": 15}
CLASSES = {
    "ddim": "DDIMScheduler",
    "euler": "EulerDiscreteScheduler",
    "dpm++": "DPMSolverMultistepScheduler",
    "pndm": "PNDMScheduler",
}
SPACINGS, PREDICTIONS, COUNTS = ("leading", "linspace", "trailing"), ("epsilon", "v_prediction"), (1, 2, 5, 13, 50)
BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}

# Stable Diffusion 2.1 for 768 x 768 pixels, as its files on the Hub had it.
SD21 = {
    "unet": {
        "_class_name": "UNet2DConditionModel",
        "attention_head_dim": [5, 10, 20, 20],
        "block_out_channels": [320, 640, 1280, 1280],
        "cross_attention_dim": 1024,
        "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
        "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
        "dual_cross_attention": False,
        "sample_size": 96,
        "upcast_attention": True,
        "use_linear_projection": True,
    },
    "text_encoder": {
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "model_type": "clip_text_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 23,
        "pad_token_id": 1,
        "projection_dim": 512,
        "vocab_size": 49408,
    },
}

# Small modules that have what the bundled checkpoints do not: several depths and numbers of heads, an end token that
# the configuration does not know, plain GELU, two residual blocks, more than one level without attention.
SMALL_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "hidden_act": "gelu",
    "projection_dim": 24,
    "eos_token_id": 2,
}
_SMALL_UNET = {"norm_num_groups": 8, "cross_attention_dim": 32}
SMALL_UNETS = {
    "sd2": {
        **_SMALL_UNET,
        "block_out_channels": [16, 24],
        "layers_per_block": 2,
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "attention_head_dim": [2, 3],
        "use_linear_projection": True,
        "upcast_attention": True,
    },
    "sdxl": {
        **_SMALL_UNET,
        "block_out_channels": [16, 24, 32],
        "layers_per_block": 1,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 1, 2],
        "attention_head_dim": [2, 3, 4],
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": 6 * 8 + 24,
    },
}
SMALL_VAE = {
    "block_out_channels": [16, 24],
    "norm_num_groups": 8,
    "layers_per_block": 1,
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
    "scaling_factor": 0.5,
}
SIZES = [64, 96, 0, 8, 64, 96]  # of an image, as Stable Diffusion XL is told them


def made_up(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter that follows from its name and its shape in PyTorch, so that nobody need keep it."""
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)
    if len(shape) > 1:
        return values / np.sqrt(np.prod(shape[1:]), dtype=np.float32)
    return (name.endswith("weight") + values / 10).astype(np.float32)


def made_up_input(name: str, *shape: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, np.float32)


def stand_in(x, timestep):
    """What schedulers are asked with in place of a model: any smooth function, of NumPy's arrays or PyTorch's."""
    return 0.3 * x + 0.0004 * timestep * (1 - x * x / (1 + x * x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="tests/fixtures")
    folder = parser.parse_args().folder
    os.environ["USE_FLAX"] = "0"
    import diffusers
    import torch
    import transformers

    diffusers.logging.set_verbosity_error()
    versions = {module.__name__: module.__version__ for module in (torch, diffusers, transformers)}
    with gzip.GzipFile(folder / "pytorch-names.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps({"versions": versions, "models": _names()}, separators=(",", ":")).encode())
    with torch.no_grad():
        found = {**_images(), **_small_modules(), **_schedulers()}
    np.savez_compressed(folder / "pytorch-model.npz", versions=json.dumps(versions), **found)


def _names() -> dict:
    """For each model its configurations, and for each part the names and shapes of its parameters."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    models = {name: _configurations(ROOT / "course" / "tpu" / "configurations" / name) for name in ("sd", "sdxl")}
    models["sd21"] = {**models["sd"], **SD21}
    names = {}
    for model, configurations in models.items():
        parts = {}
        for part, options in configurations.items():
            options = {name: value for name, value in options.items() if not name.startswith("_")}
            with torch.device("meta"):
                if part == "unet":
                    module = UNet2DConditionModel(**options)
                elif part == "vae":
                    module = AutoencoderKL(**options)
                else:
                    kind = CLIPTextModelWithProjection if part == "text_encoder_2" else CLIPTextModel
                    module = kind(CLIPTextConfig(**options))
            parts[part] = {name: list(value.shape) for name, value in module.state_dict().items()}
        names[model] = {"configurations": configurations, "parameters": parts}
    return names


def _configurations(folder: Path) -> dict:
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob("*/config.json"))}


def build_pipeline(name: str):
    """diffusers' pipeline on PyTorch with the weights of a bundled checkpoint, its scheduler DDIM."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

    folder = ROOT / "checkpoints" / name
    configurations = _configurations(folder)
    parts = {"unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL}
    modules = {part: kind(**_of_pytorch(configurations[part])) for part, kind in parts.items()}
    kinds = {"text_encoder": CLIPTextModel, "text_encoder_2": CLIPTextModelWithProjection}
    for part in kinds.keys() & configurations.keys():
        modules[part] = kinds[part](CLIPTextConfig(**configurations[part]))
    for part, module in modules.items():
        module.load_state_dict(_pytorch_parameters(folder / part))
        module.eval()
    tokenizer = CLIPTokenizer.from_pretrained(folder / "tokenizer")
    options = _of_pytorch(json.loads((folder / "scheduler" / "scheduler_config.json").read_text()))
    options |= {"clip_sample": False, "skip_prk_steps": True, "set_alpha_to_one": True, "steps_offset": 1}
    options["timestep_spacing"] = "leading"
    scheduler = diffusers.DDIMScheduler.from_config(options)
    if "text_encoder_2" in modules:
        pipeline = diffusers.StableDiffusionXLPipeline(
            **modules, tokenizer=tokenizer, tokenizer_2=tokenizer, scheduler=scheduler, add_watermarker=False
        )
    else:
        pipeline = diffusers.StableDiffusionPipeline(
            **modules, tokenizer=tokenizer, scheduler=scheduler, safety_checker=None, feature_extractor=None
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _images() -> dict:
    """Images of the bundled checkpoints, 16 bits for each number, whose step is 0.004 of 255."""
    import diffusers
    import torch

    latents = np.random.default_rng(0).standard_normal((8, 4, 8, 8), np.float32)[: len(PROMPTS)]
    found = {"latents": latents}
    for name in ("shapes-sd", "shapes-sdxl"):
        pipeline = build_pipeline(name)
        for sampler, steps in STEPS.items():
            pipeline.scheduler = getattr(diffusers, CLASSES[sampler]).from_config(pipeline.scheduler.config)
            images = pipeline(
                PROMPTS,
                latents=torch.from_numpy(latents),
                num_inference_steps=steps,
                guidance_scale=3.0,
                output_type="np",
            ).images
            found[f"{name} {sampler}"] = np.round(images * 65535).astype(np.uint16)
    return found


def _of_pytorch(options: dict) -> dict:
    """The options of a Flax configuration that PyTorch's class has too."""
    flax_only = {"split_head_dim", "use_memory_efficient_attention"}
    return {name: value for name, value in options.items() if name not in flax_only and not name.startswith("_")}


def _pytorch_parameters(folder: Path) -> dict:
    """The bundled parameters with PyTorch's order of axes."""
    import torch

    from course.convert import turn_back
    from stable_diffusion.weights import read_part

    return {name: torch.from_numpy(turn_back(name, value)) for name, value in read_part(folder).items()}


def _small_modules() -> dict:
    """What small modules with made-up parameters make of made-up inputs."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    def filled(module):
        parameters = {name: made_up(name, tuple(value.shape)) for name, value in module.state_dict().items()}
        module.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()})
        return module.eval()

    def given(name, *shape):
        return torch.from_numpy(made_up_input(name, *shape))

    text = filled(CLIPTextModelWithProjection(CLIPTextConfig(**SMALL_TEXT)))
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 99, (2, 77)))
    answer = text(ids, output_hidden_states=True)
    found = {"ids": ids.numpy().astype(np.int32), "text hidden": answer.hidden_states[-2], "pooled": answer.text_embeds}
    for name, options in SMALL_UNETS.items():
        added = {"text_embeds": given("pooled", 2, 24), "time_ids": torch.tensor([SIZES] * 2)}
        found[f"unet {name}"] = filled(UNet2DConditionModel(**options))(
            given("latents", 2, 4, 8, 12),
            torch.tensor([10, 700]),
            given("context", 2, 7, 32),
            added_cond_kwargs=added if name == "sdxl" else None,
        ).sample
    vae = filled(AutoencoderKL(**SMALL_VAE))
    latents = vae.encode(2 * given("image", 1, 3, 8, 12).sigmoid() - 1).latent_dist
    found |= {"mean": vae.config.scaling_factor * latents.mean, "deviation": vae.config.scaling_factor * latents.std}
    decoded = vae.decode(given("latents of an image", 1, 4, 4, 6) / vae.config.scaling_factor).sample
    found["decoded"] = (decoded / 2 + 0.5).clamp(0, 1)
    return {name: np.asarray(value) for name, value in found.items()}


def _schedulers() -> dict:
    """Where each scheduler ends that asks the stand-in, for each spacing, prediction and number of steps."""
    import diffusers
    import torch

    noise = torch.linspace(-2, 2, 8)
    found = {}
    for sampler, kind in CLASSES.items():
        for spacing in SPACINGS:
            for prediction in PREDICTIONS:
                options = {**BETAS, "timestep_spacing": spacing, "prediction_type": prediction}
                options |= {"clip_sample": False, "skip_prk_steps": True, "set_alpha_to_one": False}
                ends = []
                for steps in COUNTS:
                    scheduler = getattr(diffusers, kind).from_config(options)
                    scheduler.set_timesteps(steps)
                    x = noise * scheduler.init_noise_sigma
                    for timestep in scheduler.timesteps:
                        output = stand_in(scheduler.scale_model_input(x, timestep), float(timestep))
                        x = scheduler.step(output, timestep, x).prev_sample
                    ends.append(x.numpy())
                found[f"{sampler} {spacing} {prediction}"] = np.stack(ends)
    return found


if __name__ == "__main__":
    main()
