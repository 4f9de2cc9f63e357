"""LoRA files and names of FLUX.2: ``python -m tests.makers.klein COMFYUI MUSUBI [FOLDER]``.

For the small FLUX.2 with made-up parameters, PEFT makes a LoRA of random numbers, and diffusers
saves it, into tests/fixtures/klein. ``recorded.json.gz`` has what it adds to vectors of ones; which
rows of which array of a single file diffusers takes for each parameter; and what ComfyUI calls the
layers that a LoRA changes. ``trained.safetensors`` is a LoRA that ``course.finetune`` trains for
the bundled model, and ``trained.npz`` has what diffusers draws with it.

It compares as well, and prints how far apart the weights are: our sums with PEFT's, and with those
of diffusers for the files that are written here, by its readers for the names of kohya and of Black
Forest Labs. COMFYUI and MUSUBI are clones of ComfyUI and of kohya's musubi-tuner, whose functions
have to find every key.

It needs an environment of its own, with the newest diffusers, transformers, peft and torch.
"""

import argparse
import ast
import json
import shutil
import tempfile
import types
from dataclasses import replace
from pathlib import Path

import diffusers
import jax.numpy as jnp
import numpy as np
import peft
import torch
import transformers
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.loaders import single_file_utils
from peft import LoraConfig, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM

from course import flux2
from course.finetune.__main__ import main as fine_tune
from course.flux2.convert import name_in_layout, name_transformer
from course.model.files import to_files
from course.model.lora import merge, save_pairs
from course.model.singles import Layout
from course.shapes import scenes
from tests.makers.common import CHECKPOINTS, FIXTURES, made_up_input, to_16_bits, write_json
from tests.makers.pipelines import versions
from tests.makers.small import write_flux2

# For each part, layers of the LoRA, and what PEFT is told of ranks and alphas.
LAYERS = {
    "transformer": [
        "transformer_blocks.1.attn.to_q",
        "transformer_blocks.1.attn.to_k",
        "transformer_blocks.1.attn.to_v",
        "transformer_blocks.0.attn.add_k_proj",
        "transformer_blocks.0.attn.to_out.0",
        "transformer_blocks.0.ff.linear_in",
        "transformer_blocks.1.ff_context.linear_out",
        "single_transformer_blocks.0.attn.to_out",
        "single_transformer_blocks.2.attn.to_qkv_mlp_proj",
        "single_transformer_blocks.2.attn.to_out",
        "single_stream_modulation.linear",
        "norm_out.linear",
        "x_embedder",
    ],
    "text_encoder": ["model.layers.0.self_attn.q_proj", "model.layers.4.mlp.down_proj"],
}
RANKS = {"transformer_blocks.1.attn.to_k": 3, "single_transformer_blocks.0.attn.to_out": 1}
ALPHAS = {"transformer_blocks.1.attn.to_v": 5, "single_transformer_blocks.2.attn.to_out": 1}
# Layers for which diffusers' readers of other names have no name, or the wrong order of rows.
UNNAMED = ("single_stream_modulation.linear", "norm_out.linear")
SCALE = 0.7
CLOSE = 1e-5
# What is drawn with the LoRA that was trained, and how.
PROMPTS = ["a red bow on a white background", "a blue star on a yellow background"]
STEPS, GUIDANCE = 8, 3.0
OPTIONS = "--model shapes-flux2 --rank 2 --steps 60 --batch 8 --rate 5e-3"


def save_lora(modules: dict[str, torch.nn.Module], file: Path) -> dict[str, list[float]]:
    """Save a LoRA of random numbers, and return what each layer adds to a vector of ones."""
    torch.manual_seed(0)
    products = {}
    saved = {}
    for part, names in LAYERS.items():
        config = LoraConfig(
            r=2,
            lora_alpha=3,
            rank_pattern={name: rank for name, rank in RANKS.items() if name in names},
            alpha_pattern={name: alpha for name, alpha in ALPHAS.items() if name in names},
            init_lora_weights=False,
            target_modules=names,
        )
        peft.inject_adapter_in_model(config, modules[part])
        saved[part] = get_peft_model_state_dict(modules[part]), config.to_dict()
        for name in names:
            delta = modules[part].get_submodule(name).get_delta_weight("default")
            products[f"{part}.{name}"] = [float(f"{x:.7g}") for x in delta.sum(dim=1)]
    with tempfile.TemporaryDirectory() as place:
        layers, options = saved["transformer"]
        Flux2KleinPipeline.save_lora_weights(
            place, transformer_lora_layers=layers, transformer_lora_adapter_metadata=options
        )
        shutil.copyfile(Path(place) / "pytorch_lora_weights.safetensors", file)
    # The pipeline saves none of the text encoder; other programs train it.
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    options = json.loads(metadata["lora_adapter_metadata"])
    layers, more = saved["text_encoder"]
    more = json.loads(json.dumps(more, default=list))
    options |= {f"text_encoder.{name}": value for name, value in more.items()}
    metadata["lora_adapter_metadata"] = json.dumps(options)
    tensors = load_file(file) | {f"text_encoder.{name}": x for name, x in layers.items()}
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata)
    return products


def compare(what: str, merged: dict, params: dict, module: torch.nn.Module) -> None:
    """Compare the weights of a part, which a LoRA has changed, with PyTorch's."""
    theirs = {name.replace(".base_layer", ""): x for name, x in module.state_dict().items()}
    before = to_files(params)
    apart, changed = 0.0, 0.0
    for name, value in to_files(merged).items():
        apart = max(apart, np.abs(value - theirs[name].numpy()).max())
        changed = max(changed, np.abs(value - before[name]).max())
    print(f"Our sums and {what}: {apart:.2g}, where weights changed by up to {changed:.2g}")
    assert apart <= CLOSE < changed


def compare_sums(model: tuple, modules: dict[str, torch.nn.Module], file: Path) -> None:
    """Compare our sums with PEFT's."""
    params, config, _ = model
    merged = merge(params, flux2.read_lora(file, params, config), SCALE)
    for part, module in modules.items():
        for layer in module.modules():
            if isinstance(layer, peft.tuners.tuners_utils.BaseTunerLayer):
                layer.set_scale("default", SCALE)
                layer.merge()
        compare(f"PEFT's of {part}", merged[part], params[part], module)


def compare_written(model: tuple, folder: Path, file: Path, other: Path) -> None:
    """Compare our sums with those of diffusers, for a file that is written here."""
    params, config, _ = model
    lora = flux2.read_lora(file, params, config)["transformer"]
    lora = {name: pair for name, pair in lora.items() if not name.startswith(UNNAMED)}
    dotted = other.with_name("dotted.safetensors")
    flux2.save_lora(other, {"transformer": lora}, config, np.float32)
    save_pairs(
        dotted,
        {"transformer": lora},
        lambda layer: (
            f"diffusion_model.{name_transformer(layer.file_name)[0]}",
            name_transformer(layer.file_name)[1],
        ),
        np.float32,
    )
    tensors = {}  # as ai-toolkit has them, whose alphas are the ranks
    for name, value in load_file(dotted).items():
        if not name.endswith(".alpha"):
            tensors[name.replace("lora_down", "lora_A").replace("lora_up", "lora_B")] = value
    save_file(tensors, dotted)
    for kind, written in {"kohya": other, "Black Forest Labs": dotted}.items():
        merged = merge(params, flux2.read_lora(written, params, config), SCALE)
        module = Flux2Transformer2DModel.from_pretrained(folder / "transformer")
        state = Flux2KleinPipeline.lora_state_dict(load_file(written))
        module.load_lora_adapter(state, adapter_name="default")
        module.fuse_lora(lora_scale=SCALE)
        before = params["transformer"]
        compare(f"diffusers' by the names of {kind}", merged["transformer"], before, module)


def take_function(file: Path, *names: str, **known: object) -> list:
    """Functions of a program's file, without what the file imports."""
    tree = ast.parse(file.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    space = dict(known)
    for name in names:
        code = ast.unparse(found[name])
        exec(compile(f"from __future__ import annotations\n{code}", str(file), "exec"), space)
    return [space[name] for name in names]


class Anything:
    """Stands for a module: each of its names is a class that nothing is an instance of."""

    def __getattr__(self, name: str) -> type:
        return type(name, (), {})


def names_of_comfyui(comfyui: Path, config: flux2.TransformerConfig, theirs: dict) -> set[str]:
    """What ComfyUI calls the layers of a model, whose arrays have their names there."""
    (to_diffusers, _) = take_function(
        comfyui / "comfy" / "utils.py", "flux_to_diffusers", "swap_scale_shift"
    )
    to_diffusers.__globals__["swap_scale_shift"] = None
    bases = Anything()
    bases.Flux = type("Flux", (), {})
    utils = types.SimpleNamespace(flux_to_diffusers=to_diffusers, unet_to_diffusers=lambda _: {})
    (find_names,) = take_function(
        comfyui / "comfy" / "lora.py",
        "model_lora_keys_unet",
        comfy=types.SimpleNamespace(model_base=bases, utils=utils),
        model_base=bases,
        utils=utils,
    )
    model = bases.Flux()
    model.state_dict = lambda: {f"diffusion_model.{name}": None for name in theirs}
    sizes = {
        "depth": config.num_layers,
        "depth_single_blocks": config.num_single_layers,
        "hidden_size": config.width,
    }
    model.model_config = types.SimpleNamespace(unet_config=sizes)
    return set(find_names(model, {}))


def check_keys(file: Path, names: set[str], musubi: Path) -> None:
    """Make sure that ComfyUI and musubi-tuner find every key of a file."""
    keys = load_file(file)
    missing = {key.split(".")[0] for key in keys} - names
    assert not missing, missing
    (to_kohya,) = take_function(
        musubi / "src" / "musubi_tuner" / "convert_lora.py", "convert_from_diffusers", torch=torch
    )
    dotted = load_file(file.with_name("dotted.safetensors"))
    assert to_kohya("lora_unet_", dotted).keys() == keys.keys()
    print(f"ComfyUI and musubi-tuner find all {len(keys)} keys.")


def record_rows(config: flux2.Config, params: dict) -> dict[str, dict[str, list]]:
    """For each parameter, the array and the rows that diffusers takes it from.

    Of the rows there is the first, and the first of the second half.
    """
    readers = {
        "transformer": (
            "original",
            single_file_utils.convert_flux2_transformer_checkpoint_to_diffusers,
        ),
        "vae": (
            "comfy",
            lambda arrays: single_file_utils.convert_ldm_vae_checkpoint(
                arrays, {"down_block_types": [0] * 3, "up_block_types": [0] * 3}
            ),
        ),
    }
    recorded = {}
    for part, (names, read) in readers.items():
        layout = Layout("", names)
        arrays = {}
        for name, value in to_files(params[part]).items():
            theirs, rows = name_in_layout(layout, part, name, config)
            count = rows.whole(len(value)) if rows else len(value)
            number = len(arrays)
            if theirs not in arrays and not name.startswith("bn."):
                numbers = 1e6 * number + torch.arange(count, dtype=torch.float64)
                arrays[theirs] = numbers.reshape(-1, *[1] * (value.ndim - 1))
        order = list(arrays)
        recorded[part] = {}
        for name, value in read(dict(arrays)).items():
            first, second = value.flatten()[[0, len(value) // 2]].long().tolist()
            assert first // 10**6 == second // 10**6
            recorded[part][name] = [order[first // 10**6], first % 10**6, second % 10**6]
    return recorded


def train_lora(file: Path) -> None:
    """Train a LoRA as anybody does, by the command."""
    with tempfile.TemporaryDirectory() as place:
        bows = Path(place) / "bows"
        # The small model reads short captions only, so these say no size.
        examples = [replace(each, size=None) for each in scenes.new_examples("bowtie", 24)]
        scenes.write_folder(examples, bows)
        listed = bows / "metadata.jsonl"
        listed.write_text(listed.read_text().replace("bowtie", "bow"))
        trained = Path(place) / file.name
        status = fine_tune([str(bows), str(trained), *OPTIONS.split()])
        assert status == 0, status
        shutil.copyfile(trained, file)


def draw_trained(file: Path) -> np.ndarray:
    """Draw with a LoRA by diffusers' pipeline: images of 16 bits for each number."""
    folder = CHECKPOINTS / "shapes-flux2"
    config = flux2.read_config(folder)
    tokenize = flux2.load_tokenizer(folder, config)
    pipeline = Flux2KleinPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    rows = config.side // config.vae.pixels_per_token
    noise = made_up_input("noise", len(PROMPTS), rows**2, config.transformer.in_channels)
    images = pipeline(
        prompt=PROMPTS,
        latents=torch.from_numpy(noise).mT.reshape(len(noise), -1, rows, rows),
        height=config.side,
        width=config.side,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=tokenize.max_length,
        text_encoder_out_layers=config.text_encoder.read_layers,
        output_type="np",
    ).images
    return to_16_bits(images)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("musubi", type=Path)
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES / "klein")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / "lora.safetensors"
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        place = Path(place)
        folder = write_flux2(place / "model")
        modules = {
            "transformer": Flux2Transformer2DModel.from_pretrained(folder / "transformer"),
            "text_encoder": Qwen3ForCausalLM.from_pretrained(folder / "text_encoder"),
        }
        model = params, config, _ = flux2.load(folder, jnp.float32)
        products = save_lora(modules, file)
        compare_sums(model, modules, file)
        compare_written(model, folder, file, place / "kohya.safetensors")
        rows = record_rows(config, params)
        theirs = {name for name, _, _ in rows["transformer"].values()}
        names = names_of_comfyui(options.comfyui, config.transformer, theirs)
        check_keys(place / "kohya.safetensors", names, options.musubi)
    made_by = versions(torch, diffusers, transformers, peft)
    recorded = {"products": products, "rows": rows, "comfyui": sorted(names)}
    write_json(options.folder / "recorded.json.gz", made_by, recorded)
    trained = options.folder / "trained.safetensors"
    train_lora(trained)
    with torch.no_grad():
        images = draw_trained(trained)
    np.savez_compressed(
        trained.with_suffix(".npz"), versions=json.dumps(made_by), prompts=PROMPTS, images=images
    )


if __name__ == "__main__":
    main()
