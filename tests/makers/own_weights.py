"""What PyTorch makes of folders, LoRAs and images: ``python -m tests.makers.own_weights [FOLDER]``.

``pytorch-own-weights.npz`` has the images that diffusers' pipelines draw with the LoRAs that
``tests.makers.loras`` made, by image to image, and by inpainting. ``original-names.json.gz`` has
how diffusers translates the names of the original layout. ``pytorch-folders.json.gz`` has all but
the numbers of folders that diffusers saved: from it and the bundled weights the tests make the same
folders, byte for byte. Besides, diffusers saves folders of more kinds that we load, and loads those
that we save, and what came of it is printed.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import diffusers
import jax
import numpy as np
import peft
import torch
import transformers
from diffusers.loaders import single_file_utils
from safetensors.numpy import save_file

from course import sd
from course.sd import Config
from course.sd.convert import original_name
from course.shapes import scenes
from tests.makers import common, pipelines
from tests.makers.common import CHECKPOINTS, FIXTURES, GUIDANCE
from tests.makers.files import edit_json, single_file
from tests.makers.loras import FILES
from tests.makers.pipelines import build_pipeline, versions

STEPS = 10
PROMPTS = ["a large red heart on a white background", "a large blue heart on a yellow background"]


def draw(pipeline: diffusers.DiffusionPipeline, latents: np.ndarray) -> np.ndarray:
    """Images of the prompts, 16 bits for each number."""
    return pipelines.draw(pipeline, PROMPTS, latents, STEPS)


def load_lora(pipeline: diffusers.DiffusionPipeline, name: str) -> None:
    """Load one of the LoRAs under its name."""
    file = FILES[name]
    pipeline.load_lora_weights(file.parent, weight_name=file.name, adapter_name=name)


def draw_with_loras(latents: np.ndarray) -> dict:
    """Images of both architectures, without a LoRA and with some, at several scales."""
    pipeline = build_pipeline("shapes-sd")
    found = {"sd": draw(pipeline, latents)}
    load_lora(pipeline, "diffusers")
    load_lora(pipeline, "kohya")
    for scales in (
        {"diffusers": 1.0},
        {"diffusers": 0.5},
        {"kohya": 0.8},
        {"diffusers": 0.7, "kohya": 0.9},
    ):
        pipeline.set_adapters(list(scales), list(scales.values()))
        found[f"sd {json.dumps(scales)}"] = draw(pipeline, latents)
    pipeline = build_pipeline("shapes-sdxl")
    found["sdxl"] = draw(pipeline, latents)
    load_lora(pipeline, "xl")
    pipeline.set_adapters(["xl"], [1.0])
    found[f"sdxl {json.dumps({'xl': 1.0})}"] = draw(pipeline, latents)
    return found


# By which samplers images are drawn over, and at which strengths.
STRENGTHS = {
    "shapes-sd": {"ddim": 0.6, "euler": 0.8, "dpm++": 1.0},
    "shapes-sdxl": {"euler": 0.75},
}
FROM_IMAGES = {
    ("shapes-sd", "image to image"): diffusers.StableDiffusionImg2ImgPipeline,
    ("shapes-sd", "inpainting"): diffusers.StableDiffusionInpaintPipeline,
    ("shapes-sdxl", "image to image"): diffusers.StableDiffusionXLImg2ImgPipeline,
    ("shapes-sdxl", "inpainting"): diffusers.StableDiffusionXLInpaintPipeline,
}


def draw_from_images() -> dict:
    """What image to image and inpainting make of two rendered scenes."""
    pictures = np.stack(
        [
            scenes.render(scenes.Scene("large", "blue", "square", "white")),
            scenes.render(scenes.Scene("medium", "green", "circle", "pink")),
        ]
    )
    prompts = [
        "a large red square on a white background",
        "a medium green star on a pink background",
    ]
    mask = np.zeros((64, 64), np.float32)
    mask[12:52, 16:56] = 1
    noise = torch.randn((2, 4, 8, 8), generator=torch.Generator().manual_seed(3))
    found = {
        "pictures": pictures,
        "picture prompts": prompts,
        "mask": mask,
        "noise": noise.numpy(),
    }
    for (model, kind), pipeline_class in FROM_IMAGES.items():
        plain = build_pipeline(model)
        signed = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        latents = plain.vae.encode(signed).latent_dist.mean * plain.vae.config.scaling_factor
        found[f"{model} latents"] = latents.numpy()
        components = {name: part for name, part in plain.components.items() if part is not None}
        if model == "shapes-sd":
            components |= {"safety_checker": None, "feature_extractor": None}
        pipeline = pipeline_class(**components)
        pipeline.set_progress_bar_config(disable=True)
        options = {"image": latents}
        if kind == "inpainting":
            # A mask alone needs pixels in the same place. A UNet of 4 channels does not read them.
            options |= {
                "mask_image": torch.from_numpy(mask)[None, None].repeat(2, 1, 1, 1),
                "masked_image_latents": latents,
                "height": 64,
                "width": 64,
            }
        for sampler, strength in STRENGTHS[model].items():
            scheduler = getattr(diffusers, common.SCHEDULERS[sampler])
            pipeline.scheduler = scheduler.from_config(plain.scheduler.config)
            images = pipeline(
                prompts,
                strength=strength,
                num_inference_steps=20,
                guidance_scale=GUIDANCE,
                generator=torch.Generator().manual_seed(3),
                output_type="np",
                **options,
            ).images
            found[f"{model} {kind} {sampler} {strength}"] = common.to_16_bits(images)
    return found


def translate_names() -> dict:
    """For each model and part, what diffusers calls the arrays of a single file.

    Each of our names has a list: theirs, and which third of that array it is, or None.
    """
    models = common.read_json("pytorch-names")
    found = {}
    for model, recorded in models.items():
        configurations = recorded["configurations"]
        config = common.read_model(configurations)
        found[model] = {}
        for part, names in recorded["parameters"].items():
            found[model][part] = translate_part(part, names, configurations[part], config)
    return found


def translate_part(part: str, names: dict, options: dict, config: Config) -> dict[str, list]:
    """What diffusers calls the arrays of one part.

    It converts a file in which each array has its own number, and the thirds of an array that is
    three have that plus 0, 1 / 4 and 2 / 4. So what comes out says where it was.
    """
    keys = sorted({original_name(part, name, config)[0] for name in names})
    width = options.get("hidden_size", 1)
    marked = {}
    for number, key in enumerate(keys):
        if ".in_proj_" in key:
            thirds = torch.tensor([number, number + 1 / 4, number + 2 / 4])
            marked[key] = thirds.repeat_interleave(width)
            if key.endswith("weight"):
                marked[key] = marked[key][:, None]
        elif ".attn_1." in key:
            marked[key] = torch.full((1, 1, 1, 1), float(number))
        else:
            marked[key] = torch.full((1,), float(number))
    converted = convert_part(part, marked, options)
    if part == "text_encoder":  # diffusers also converts what this encoder does not have
        converted = {name: value for name, value in converted.items() if name in names}
    assert converted.keys() == names.keys(), sorted(converted.keys() ^ names.keys())[:5]
    rows = {}
    for name, value in converted.items():
        number = float(value.flatten()[0])
        key = keys[int(number)]
        third = int(4 * (number % 1)) if ".in_proj_" in key else None
        rows[name] = [key, third]
    return rows


def convert_part(part: str, tensors: dict, options: dict) -> dict:
    """What diffusers makes of the tensors of one part in the original layout."""
    if part == "unet":
        settings = {"layers_per_block": 2, "class_embed_type": None} | options
        if options.get("addition_embed_type"):
            settings["addition_embed_type"] = "text_time"
        return single_file_utils.convert_ldm_unet_checkpoint(tensors, settings)
    if part == "vae":
        return single_file_utils.convert_ldm_vae_checkpoint(tensors, options)
    first = next(iter(tensors))
    if ".model." not in first:
        prefix = first[: first.index("transformer.") + len("transformer.")]
        return single_file_utils.convert_ldm_clip_checkpoint(tensors, remove_prefix=prefix)
    prefix = first[: first.index(".model.") + len(".model.")]
    # The shape of the projection says where the thirds are cut.
    width = options["hidden_size"]
    key = f"{prefix}text_projection"
    number = tensors[key].item() if key in tensors else 0.0
    tensors = tensors | {key: torch.full((width, width), number)}
    encoder = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
    return single_file_utils.convert_open_clip_checkpoint(encoder, tensors, prefix=prefix)


# How diffusers may save a folder, and the variant that it is loaded by.
KINDS = {
    "one file": ({}, None),
    "several files": ({"max_shard_size": "2MB"}, None),
    "variant fp16": ({"variant": "fp16"}, "fp16"),
    "variant fp16 in several files": ({"variant": "fp16", "max_shard_size": "2MB"}, "fp16"),
}
RECORDED = ("one file", "variant fp16 in several files")


def describe_folder(folder: Path) -> dict:
    """All of a folder but the numbers.

    Text is as it is. Of safetensors there are the header, and what all of it hashes to.
    """
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            data = file.read_bytes()
            length = int.from_bytes(data[:8], "little")
            header = data[8 : 8 + length].decode()
            found[name] = [header, hashlib.sha256(data).hexdigest()]
        else:
            found[name] = file.read_text()
    return found


def save_folders(latents: np.ndarray) -> tuple[dict, dict]:
    """Let diffusers save folders of every kind, and load them.

    It returns what is in some of them, and images of the numbers that were rounded. All compute in
    float32: half precision is how numbers are stored, and reading is what is compared.
    """
    described = {}
    images = {}
    for name in ("shapes-sd", "shapes-sdxl"):
        expected, _, _ = sd.load(CHECKPOINTS / name)
        plain = draw(build_pipeline(name), latents)
        for kind, (options, variant) in KINDS.items():
            with tempfile.TemporaryDirectory() as place:
                pipeline = build_pipeline(name).to(torch.float16 if variant else torch.float32)
                pipeline.save_pretrained(place, **options)
                files = list(Path(place).rglob("*.safetensors*"))
                params, _, _ = sd.load(place, variant=variant)
                print(f"{name}, {kind}: {len(files)} files")
                dtype = np.float16 if variant else np.float32
                rounded = jax.tree.map(lambda x, dtype=dtype: np.asarray(x, dtype), expected)
                assert jax.tree.all(jax.tree.map(np.array_equal, params, rounded))
                if kind not in RECORDED:
                    continue
                described[f"{name} {kind}"] = describe_folder(Path(place))
                found = draw(load_folder(place, variant), latents)
                if variant:
                    images[f"{name.removeprefix('shapes-')} {kind}"] = found
                else:
                    assert np.array_equal(found, plain)
    return described, images


def load_folder(folder: str | Path, variant: str | None = None) -> diffusers.DiffusionPipeline:
    """diffusers' pipeline of a folder, in float32."""
    pipeline = diffusers.DiffusionPipeline.from_pretrained(
        folder, variant=variant, torch_dtype=torch.float32
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_what_we_save(latents: np.ndarray) -> None:
    """Let diffusers load folders that we save."""
    for name in ("shapes-sd", "shapes-sdxl"):
        source = CHECKPOINTS / name
        params, _, _ = sd.load(source)
        with tempfile.TemporaryDirectory() as place:
            sd.save(params, source, place)
            ours = load_folder(place)
        theirs = build_pipeline(name)
        kind = type(ours.scheduler).__name__
        print(f"{name}, saved by us and loaded by diffusers, with {kind}")
        ours.scheduler = theirs.scheduler
        assert np.array_equal(draw(ours, latents), draw(theirs, latents))


def like_sd2(source: Path, folder: Path) -> None:
    """Write a folder of a small Stable Diffusion 2, with the numbers of the bundled 1."""
    params, _, _ = sd.load(source)
    sd.save(params, source, folder)
    edit_json(folder / "text_encoder" / "config.json", lambda old: old | {"hidden_act": "gelu"})


def load_what_we_convert(latents: np.ndarray) -> None:
    """Let diffusers load folders that `course.convert` makes of single files, and draw by both.

    The files say that the model predicts velocities and was trained down to pure noise, and the
    folders behind --like say that it predicts noise.
    """
    marks = {"v_pred": np.zeros(0, np.float32), "ztsnr": np.zeros(0, np.float32)}
    for name in ("shapes-sd", "sd2", "shapes-sdxl"):
        with tempfile.TemporaryDirectory() as place:
            file, like, out = (Path(place, each) for each in ("model.safetensors", "like", "out"))
            if name == "sd2":
                like_sd2(CHECKPOINTS / "shapes-sd", like)
            else:
                sd.save(sd.load(CHECKPOINTS / name)[0], CHECKPOINTS / name, like)
            params, config, _ = sd.load(like)
            save_file(single_file(params, config) | marks, file)
            edit_json(
                like / "scheduler" / "scheduler_config.json",
                lambda old: old | {"prediction_type": "epsilon"},
            )
            command = [sys.executable, "-m", "course.convert", file, out, "--like", like]
            subprocess.run([*command, "--dtype", "float16"], check=True)
            expected = draw(load_folder(out), latents) / 65535
            params, config, tokenize = sd.load(out)
        negative_ids = None if config.is_xl else tokenize([""])
        inputs = tokenize(PROMPTS), jax.random.key(0), negative_ids, STEPS, GUIDANCE
        found = jax.jit(sd.generate, static_argnames=sd.STATIC)(
            params, config, *inputs, np.moveaxis(latents, 1, -1)
        )
        error = 255 * np.abs(found - expected).max()
        print(f"{name}, converted by us and loaded by diffusers: {error:.4f} of 255")
        assert error < 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=FIXTURES)
    folder = parser.parse_args().folder
    made_by = versions(torch, diffusers, transformers, peft)
    latents = np.random.default_rng(0).standard_normal((2, 4, 8, 8), np.float32)
    common.write_json(folder / "original-names.json.gz", made_by, translate_names())
    with torch.no_grad():
        folders, images = save_folders(latents)
        common.write_json(folder / "pytorch-folders.json.gz", made_by, folders)
        load_what_we_save(latents)
        load_what_we_convert(latents)
        images |= draw_with_loras(latents)
        images |= draw_from_images()
    np.savez_compressed(
        folder / "pytorch-own-weights.npz",
        versions=json.dumps(made_by),
        latents=latents,
        prompts=PROMPTS,
        **images,
    )


if __name__ == "__main__":
    main()
