"""What PyTorch's classes say of FLUX.2-klein: ``python -m tests.makers.flux2_parts [FOLDER]``.

It writes two files. ``flux2_names.json`` has the names and shapes of all parameters of
FLUX.2-klein-4B, from modules that PyTorch builds without memory. ``flux2_parts.npz`` is about a
small checkpoint with made-up parameters: all but these of the folder that diffusers saved, what its
parts make of made-up inputs, what its pipeline draws, and the times of schedulers.
"""

import json
import re
import tempfile
from pathlib import Path

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu, retrieve_timesteps
from safetensors.numpy import load_file
from transformers import Qwen2TokenizerFast, Qwen3Config, Qwen3ForCausalLM

from lab.train.tokenizers import QWEN_LENGTH, write_qwen
from tests.makers.common import made_up_input, to_16_bits
from tests.makers.pipelines import fill, folder_to_write, given, versions

# As diffusers' scripts/convert_flux2_to_diffusers.py has FLUX.2-klein-4B, Qwen3-4B its config.json,
# and AutoencoderKLFlux2 its defaults.
REAL_TRANSFORMER = {
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [32, 32, 32, 32],
    "rope_theta": 2000,
    "guidance_embeds": False,
}
REAL_TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
}

# A small checkpoint in which those sizes differ that could be taken for each other.
TRANSFORMER = {
    "in_channels": 32,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 120,
    "timestep_guidance_channels": 48,
    "mlp_ratio": 3.0,
    "axes_dims_rope": [2, 4, 6, 4],
    "rope_theta": 2000,
    "guidance_embeds": False,
}
TEXT = {
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
VAE = {
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "block_out_channels": [8, 16, 24],
    "decoder_block_out_channels": [12, 16, 20],
    "layers_per_block": 2,
    "latent_channels": 8,
    "norm_num_groups": 4,
    "sample_size": 64,
    "batch_norm_eps": 1e-3,
}
SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True, "time_shift_type": "exponential"}
READ_LAYERS = (2, 4, 6)  # a quarter, two and three of the text encoder's 8 layers
STEPS = 3
PROMPTS = ["a small red heart on a white background", "a star"]
SIZES = ((1, 3), (256, 4), (1024, 50), (4096, 4), (4300, 28), (4301, 28), (8192, 10))


def name_parameters() -> dict[str, dict[str, list[int]]]:
    """Names and shapes of the parameters of FLUX.2-klein-4B, by part.

    Blocks that differ by their numbers only have one name, with ``{count}`` in place of the number.
    """
    with torch.device("meta"):
        modules = {
            "transformer": diffusers.Flux2Transformer2DModel(**REAL_TRANSFORMER),
            "text_encoder": Qwen3ForCausalLM(Qwen3Config(**REAL_TEXT)),
            "vae": diffusers.AutoencoderKLFlux2(),
        }
    found = {}
    for part, module in modules.items():
        shapes = {name: list(value.shape) for name, value in module.state_dict().items()}
        blocks = {}
        for name, shape in shapes.items():
            match = re.match(r"((?:single_)?transformer_blocks|model\.layers)\.(\d+)\.(.*)", name)
            before, number, after = match.groups() if match else (name, None, "")
            blocks.setdefault((before, after, tuple(shape)), []).append(number)
        found[part] = {}
        for (before, after, shape), numbers in blocks.items():
            name = before if numbers == [None] else f"{before}.{{{len(numbers)}}}.{after}"
            assert numbers == [None] or numbers == [str(k) for k in range(len(numbers))]
            assert name not in found[part]
            found[part][name] = list(shape)
    return found


def build_pipeline(folder: Path) -> diffusers.Flux2KleinPipeline:
    """A pipeline with made-up parameters, which has been saved to a folder."""
    write_qwen(folder / "tokenizer")
    tokenizer = Qwen2TokenizerFast.from_pretrained(folder / "tokenizer")
    text = Qwen3Config(vocab_size=len(tokenizer), **TEXT)
    vae = fill(diffusers.AutoencoderKLFlux2(**VAE))
    channels = vae.bn.running_mean.shape
    vae.bn.running_mean = torch.from_numpy(made_up_input("bn.running_mean", *channels) / 2)
    vae.bn.running_var = torch.from_numpy(np.exp(made_up_input("bn.running_var", *channels)))
    pipeline = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER),
        vae=vae,
        text_encoder=fill(Qwen3ForCausalLM(text)),
        tokenizer=tokenizer,
        transformer=fill(diffusers.Flux2Transformer2DModel(**TRANSFORMER)),
        is_distilled=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.save_pretrained(folder)
    return pipeline


def describe(folder: Path) -> dict:
    """All but the made-up parameters of a folder: its texts, and what its safetensors hold."""
    texts, tensors, statistics = {}, {}, {}
    for file in sorted(folder.rglob("*.*")):
        place = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            values = load_file(file)
            tensors[place] = {name: value.shape for name, value in values.items()}
            statistics |= {name: values[name] for name in values if name.startswith("bn.")}
        else:
            texts[place] = file.read_text(encoding="utf-8")
    return {"folder": json.dumps({"texts": texts, "tensors": tensors}), **statistics}


def run_transformer(pipeline: diffusers.Flux2KleinPipeline) -> dict:
    """Velocities for two sizes of image and text, the second time with two reference images."""
    found = {}
    for name, rows, columns, texts, references in (
        ("small", 3, 5, 7, 0),
        ("with references", 4, 2, 11, 2),
    ):
        latents = torch.zeros(2, 1, rows, columns)
        places = [pipeline._prepare_latent_ids(latents)[0]]
        if references:
            places += pipeline._prepare_image_ids([latents[:1]] * references)
        tokens = (1 + references) * rows * columns
        text = given(f"text {name}", 2, texts, TRANSFORMER["joint_attention_dim"])
        found[f"velocity {name}"] = pipeline.transformer(
            hidden_states=given(f"image {name}", 2, tokens, TRANSFORMER["in_channels"]),
            encoder_hidden_states=text,
            timestep=torch.tensor([1.0, 0.3]),
            img_ids=torch.cat(places),
            txt_ids=pipeline._prepare_text_ids(text)[0],
        ).sample
    return found


def run_text(pipeline: diffusers.Flux2KleinPipeline) -> dict:
    """What the transformer gets of prompts of several lengths."""
    encoded, _ = pipeline.encode_prompt(
        PROMPTS, max_sequence_length=QWEN_LENGTH, text_encoder_out_layers=READ_LAYERS
    )
    return {"prompts": PROMPTS, "encoded": encoded}


def run_vae(pipeline: diffusers.Flux2KleinPipeline) -> dict:
    """Latents of images, the tokens that they become, and images of tokens."""
    image = given("image", 2, 3, 16, 24).sigmoid()
    mean = pipeline.vae.encode(2 * image - 1).latent_dist.mean
    patches = pipeline._patchify_latents(mean)
    tokens = pipeline._encode_vae_image(2 * image - 1, generator=None)
    latents = given("latents", 2, VAE["latent_channels"], 4, 6)
    decoded = pipeline.vae.decode(latents).sample
    return {
        "mean": mean,
        "packed": pipeline._pack_latents(patches),
        "normalized": pipeline._pack_latents(tokens),
        "decoded": (decoded / 2 + 0.5).clamp(0, 1),
    }


def run_schedulers() -> dict:
    """The times of the steps: shifted by the number of tokens, and by fixed numbers."""
    found = {}
    for tokens, steps in SIZES:
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(**SCHEDULER)
        mu = compute_empirical_mu(tokens, steps)
        # As the pipeline has them.
        even = np.linspace(1.0, 1 / steps, steps)
        retrieve_timesteps(scheduler, steps, sigmas=even, mu=mu)
        found[f"times {tokens} {steps}"] = scheduler.sigmas
        found[f"mu {tokens} {steps}"] = np.float64(mu)
    for shift in (1.0, 3.0):
        for steps in (1, 4, 30):
            scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
            even = np.linspace(1.0, 1 / steps, steps)
            retrieve_timesteps(scheduler, steps, sigmas=even, mu=0.5)
            found[f"times {steps} by {shift:.0f}"] = scheduler.sigmas
    return found


def make_pictures() -> np.ndarray:
    """Two images of coloured squares, as small as the pipeline takes them to be edited."""
    squares = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    return squares.repeat(8, axis=1).repeat(8, axis=2)


def draw(pipeline: diffusers.Flux2KleinPipeline, height: int, width: int, **options) -> np.ndarray:
    """Images of prompts from made-up noise, 16 bits for each number."""
    rows, columns = height // 8, width // 8  # of tokens
    noise = given("noise", len(options["prompt"]), rows * columns, TRANSFORMER["in_channels"])
    images = pipeline(
        latents=noise.mT.reshape(len(noise), -1, rows, columns),
        height=height,
        width=width,
        num_inference_steps=STEPS,
        max_sequence_length=QWEN_LENGTH,
        text_encoder_out_layers=READ_LAYERS,
        output_type="np",
        **options,
    ).images
    return to_16_bits(images)


def draw_images(pipeline: diffusers.Flux2KleinPipeline) -> dict:
    """Images with guidance and without, with fixed times, and with reference images."""
    pictures = make_pictures()
    images = [PIL.Image.fromarray(picture) for picture in pictures]
    found = {"pictures": pictures}
    found["guided"] = draw(pipeline, 24, 40, prompt=PROMPTS, guidance_scale=4.0)
    found["edited"] = draw(pipeline, 64, 64, prompt=PROMPTS, image=images[:1], guidance_scale=2.5)
    # A model that is distilled takes no guidance.
    pipeline.register_to_config(is_distilled=True)
    found["distilled"] = draw(pipeline, 24, 40, prompt=PROMPTS, guidance_scale=4.0)
    found["two references"] = draw(pipeline, 64, 64, prompt=PROMPTS[:1], image=images)
    pipeline.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    found["shifted by 3"] = draw(pipeline, 24, 40, prompt=PROMPTS)
    return found


def main() -> None:
    folder = folder_to_write(__doc__)
    diffusers.logging.set_verbosity_error()
    made_by = versions(torch, diffusers, transformers)
    text = json.dumps({"versions": made_by, **name_parameters()}, indent=0)
    # A shape on the line of its name.
    text = re.sub(r"\[([^]]*)\]", lambda shape: f"[{' '.join(shape[1].split())}]", text)
    (folder / "flux2_names.json").write_text(text + "\n", encoding="utf-8")
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        pipeline = build_pipeline(Path(place))
        found = describe(Path(place))
        found |= run_transformer(pipeline) | run_text(pipeline) | run_vae(pipeline)
        found |= run_schedulers() | draw_images(pipeline)
    found = {name: np.asarray(value) for name, value in found.items()}
    np.savez_compressed(folder / "flux2_parts.npz", versions=json.dumps(made_by), **found)


if __name__ == "__main__":
    main()
