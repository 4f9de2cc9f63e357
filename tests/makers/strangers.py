"""Files as others write them, for the tests: ``python -m tests.makers.strangers [FOLDER]``.

It writes small LoRAs by peft and diffusers, and by lycoris-lora those kinds that the course refuses
(DoRA, LoHa, LoKr, three matrices, whole differences), into tests/fixtures/strangers. What PyTorch
adds to a vector by those that are read is in ``products.json``. ``pytorch-zero-snr.npz`` has what
diffusers draws by schedules that end in pure noise.

lycoris-lora is no requirement of the course: install it beside the packages for training, without
its dependencies, and einops and toml with it.
"""

import argparse
import json
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

import diffusers
import lycoris.kohya
import numpy as np
import peft
import torch
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from tests.makers import common
from tests.makers.common import FIXTURES
from tests.makers.own_weights import STEPS, draw
from tests.makers.pipelines import build_pipeline, versions

BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
LAYERS = [f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn2.to_v"]
TEXT_LAYER = "text_model.encoder.layers.1.self_attn.q_proj"
# Of the layers, one has an alpha of its own.
OPTIONS = {
    "r": 2,
    "lora_alpha": 3,
    "alpha_pattern": {LAYERS[1]: 5},
    "init_lora_weights": False,
    "target_modules": LAYERS,
}


def add_product(module: torch.nn.Module, name: str) -> list[float]:
    """What a layer's LoRA adds to its answer to a vector of ones."""
    layer = module.get_submodule(name)
    delta = layer.get_delta_weight("default")
    return delta.sum(dim=1).tolist()


def save_by_peft(folder: Path, use_dora: bool = False) -> dict:
    """Save what PEFT saves: names of its own, and the options in a second file."""
    torch.manual_seed(0)
    unet = get_peft_model(
        build_pipeline("shapes-sd").unet, LoraConfig(**OPTIONS, use_dora=use_dora)
    )
    unet.save_pretrained(folder)
    (folder / "README.md").unlink()
    if use_dora:
        return {}
    return {name: add_product(unet.base_model.model, name) for name in LAYERS}


def save_without_part(file: Path) -> dict:
    """Save what a UNet of diffusers saves, whose names do not say that it is the UNet."""
    torch.manual_seed(1)
    unet = build_pipeline("shapes-sd").unet
    unet.add_adapter(LoraConfig(**OPTIONS))
    with tempfile.TemporaryDirectory() as place:
        unet.save_lora_adapter(place)
        shutil.copyfile(Path(place) / "pytorch_lora_weights.safetensors", file)
    return {name: add_product(unet, name) for name in LAYERS}


def save_old_names(file: Path) -> dict:
    """Save the names that diffusers had before it used PEFT; it still reads them.

    Those of the text encoder are made by diffusers itself. Alpha was the rank then.
    """
    torch.manual_seed(2)
    pipeline = build_pipeline("shapes-sd")
    options = OPTIONS | {"lora_alpha": 2, "alpha_pattern": {}}
    pipeline.unet.add_adapter(LoraConfig(**options))
    pipeline.text_encoder.add_adapter(LoraConfig(**options | {"target_modules": [TEXT_LAYER]}))
    tensors = {}
    for name, value in get_peft_model_state_dict(pipeline.unet).items():
        layer, half, _ = name.rsplit(".", 2)
        way = {"lora_A": "down", "lora_B": "up"}[half]
        block, last = layer.rsplit(".", 1)
        tensors[f"unet.{block}.processor.{last}_lora.{way}.weight"] = value
    found = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipeline.text_encoder))
    tensors |= {f"text_encoder.{name}": value for name, value in found.items()}
    save_file({name: value.detach().contiguous() for name, value in tensors.items()}, file)
    products = {name: add_product(pipeline.unet, name) for name in LAYERS}
    return products | {TEXT_LAYER: add_product(pipeline.text_encoder, TEXT_LAYER)}


# What LyCORIS is asked for, by the names of the files.
LYCORIS = {
    "loha": {"network_module": "loha"},
    "lokr": {"network_module": "lokr", "factor": 8},
    "dora": {"network_module": "locon", "weight_decompose": True},
    "tucker": {"network_module": "locon", "use_tucker": True},
    "diff": {"network_module": "full"},
}


def save_by_lycoris(file: Path, options: dict) -> None:
    """Save a layer as LyCORIS does in kohya's scripts."""
    torch.manual_seed(3)
    pipeline = build_pipeline("shapes-sd")
    lycoris.kohya.LycorisNetworkKohya.apply_preset(
        {
            "enable_conv": True,
            "unet_target_module": [],
            "unet_target_name": ["conv_out"] if "use_tucker" in options else LAYERS[:1],
            "text_encoder_target_module": [],
            "text_encoder_target_name": [],
        }
    )
    network = lycoris.kohya.LycorisNetworkKohya(
        pipeline.text_encoder,
        pipeline.unet,
        lora_dim=2,
        conv_lora_dim=2,
        alpha=1,
        conv_alpha=1,
        **options,
    )
    network.apply_to(pipeline.text_encoder, pipeline.unet, False, True)
    network.save_weights(str(file), torch.float16, {})
    print(file.name, sorted(load_file(file)))


def draw_down_to_noise() -> dict:
    """What samplers draw whose first step is at pure noise."""
    latents = np.random.default_rng(0).standard_normal((2, 4, 8, 8), np.float32)
    found = {"latents": latents}
    for sampler in ("ddim", "euler", "dpm++"):
        pipeline = build_pipeline("shapes-sd")
        scheduler = getattr(diffusers, common.SCHEDULERS[sampler])
        pipeline.scheduler = scheduler.from_config(
            pipeline.scheduler.config,
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        )
        assert pipeline.scheduler.config.prediction_type == "v_prediction"
        found[sampler] = draw(pipeline, latents)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    fixtures = parser.parse_args().folder
    folder = fixtures / "strangers"
    folder.mkdir(parents=True, exist_ok=True)
    made_by = versions(torch, diffusers, peft)
    made_by["lycoris-lora"] = metadata.version("lycoris-lora")
    products = {
        "peft-bare": save_by_peft(folder / "peft"),
        "no-prefix": save_without_part(folder / "no-prefix.safetensors"),
        "old-diffusers": save_old_names(folder / "old-diffusers.safetensors"),
    }
    save_by_peft(folder / "peft-dora", use_dora=True)
    for name, options in LYCORIS.items():
        save_by_lycoris(folder / f"{name}.safetensors", options)
    content = {"versions": made_by, "products": products}
    (folder / "products.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with torch.no_grad():
        np.savez_compressed(
            fixtures / "pytorch-zero-snr.npz",
            versions=json.dumps(made_by),
            steps=STEPS,
            **draw_down_to_noise(),
        )


if __name__ == "__main__":
    main()
