"""Files as transformers 5 and its diffusers write them: ``python -m tests.makers.newest [FOLDER]``.

Of shapes-sd it saves the tokenizer, as it is and with one word more, a LoRA, and the text encoder,
into tests/fixtures/newest. Of the text encoder only the header of its file stays, and what all of
the file hashes to. ``recorded.json`` has what PyTorch makes of the others: what the LoRA adds to a
vector of ones, and the ids of prompts.

It needs an environment of its own, with the newest diffusers, transformers, peft and torch.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import diffusers
import peft
import torch
import transformers
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from peft import LoraConfig, get_peft_model_state_dict
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from course.model.files import read_part, to_channels_first
from tests.makers.common import CHECKPOINTS, FIXTURES
from tests.makers.own_weights import describe_folder
from tests.makers.pipelines import versions, without_flax

SOURCE = CHECKPOINTS / "shapes-sd"
WORD = "<cat-toy>"
PROMPTS = [
    "a small red heart",
    f"a red {WORD} star",
    "a <|endoftext|> b <|ENDOFTEXT|>",
    "naïve café 中文 it's WE'LL 12345 🙂",
]
# For each part, layers of the LoRA, and one of them with an alpha of its own.
BLOCK = "mid_block.attentions.0.transformer_blocks.0"
LAYERS = {
    "unet": [f"{BLOCK}.attn1.to_q", f"{BLOCK}.ff.net.2"],
    "text_encoder": ["encoder.layers.0.self_attn.q_proj", "encoder.layers.1.mlp.fc1"],
}


def build_modules() -> dict[str, torch.nn.Module]:
    """The UNet and the text encoder, whose names have no "text_model." here."""
    options = {}
    for part in LAYERS:
        options[part] = json.loads((SOURCE / part / "config.json").read_text())
    modules = {
        "unet": UNet2DConditionModel(**without_flax(options["unet"])),
        "text_encoder": CLIPTextModel(CLIPTextConfig(**options["text_encoder"])),
    }
    for part, module in modules.items():
        parameters = {}
        for name, value in read_part(SOURCE / part).items():
            name = name.removeprefix("text_model.")
            parameters[name] = torch.from_numpy(to_channels_first(name, value))
        module.load_state_dict(parameters)
    return modules


def save_lora(modules: dict[str, torch.nn.Module], file: Path) -> dict[str, list[float]]:
    """Save a LoRA of random numbers, and return what each layer adds to a vector of ones."""
    torch.manual_seed(0)
    saved = {}
    products = {}
    for part, names in LAYERS.items():
        config = LoraConfig(
            r=2,
            lora_alpha=3,
            alpha_pattern={names[1]: 5},
            init_lora_weights=False,
            target_modules=names,
        )
        # transformers wants a newer peft than there is, so peft does it by itself.
        peft.inject_adapter_in_model(config, modules[part])
        saved[f"{part}_lora_layers"] = get_peft_model_state_dict(modules[part])
        saved[f"{part}_lora_adapter_metadata"] = config.to_dict()
        for name in names:
            delta = modules[part].get_submodule(name).get_delta_weight("default")
            products[f"{part}.{name}"] = delta.sum(dim=1).tolist()
    with tempfile.TemporaryDirectory() as place:
        StableDiffusionPipeline.save_lora_weights(place, **saved)
        shutil.copyfile(Path(place) / "pytorch_lora_weights.safetensors", file)
    return products


def save_tokenizer(folder: Path, words: list[str]) -> list[list[int]]:
    """Save the tokenizer with words more, and return the ids of the prompts."""
    tokenizer = CLIPTokenizer.from_pretrained(SOURCE / "tokenizer")
    tokenizer.add_tokens(words)
    tokenizer.save_pretrained(folder)
    return tokenizer(PROMPTS, padding="max_length", max_length=77).input_ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES / "newest")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    modules = build_modules()
    with tempfile.TemporaryDirectory() as place:
        modules["text_encoder"].save_pretrained(place)
        text_encoder = describe_folder(Path(place))
    recorded = {
        "versions": versions(torch, diffusers, transformers, peft),
        "text_encoder": text_encoder,
        "prompts": PROMPTS,
        "ids": {
            "tokenizer": save_tokenizer(folder / "tokenizer", []),
            "tokenizer-with-word": save_tokenizer(folder / "tokenizer-with-word", [WORD]),
        },
        "products": save_lora(modules, folder / "lora.safetensors"),
    }
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    (folder / "recorded.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
