"""What PyTorch makes of folders, LoRA files and images: ``python -m training.pytorch_own_weights``.

It trains the two LoRAs in checkpoints/loras by peft, for a minute each: one draws blue what should be red, in the
format of diffusers, and one draws stars in place of hearts, in kohya's. In tests/fixtures a third one, for Stable
Diffusion XL, has random numbers. Beside it ``pytorch-own-weights.npz`` has the images that diffusers' pipelines draw
with them, by image to image, and by inpainting, and ``original-names.json.gz`` how diffusers translates the names of
the original layout. ``pytorch-folders.json.gz`` has all but the numbers of folders that diffusers saved: from it and
the bundled weights the tests make the same folders, byte for byte. Last, diffusers saves folders of more kinds that we
load, and loads those that we save, and what came of it is printed.
"""

import argparse
import dataclasses
import gzip
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np

os.environ["USE_FLAX"] = "0"
import diffusers
import peft
import torch
import transformers
from diffusers.utils import convert_state_dict_to_kohya
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import stable_diffusion
from course.convert import original_name, save
from stable_diffusion import Config, ScheduleConfig
from stable_diffusion.configs import read_class
from training import scenes
from training.pytorch_reference import ROOT, build_pipeline

PROMPTS = ["a large red heart on a white background", "a large blue heart on a yellow background"]
STEPS, GUIDANCE = 10, 3.0
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT = ["q_proj", "k_proj", "v_proj", "out_proj"]
CONVOLUTIONS = ["conv1", "conv2", "proj_in", "proj_out", "conv_shortcut"]
TRAINING_STEPS, BATCH = 200, 64
FIXTURES, LORAS = ROOT / "tests" / "fixtures", ROOT / "checkpoints" / "loras"
FILES = {
    "diffusers": LORAS / "blue-for-red.safetensors",
    "kohya": LORAS / "star-for-heart.safetensors",
    "xl": FIXTURES / "lora-random-xl.safetensors",
}


def blue_for_red(scene: scenes.Scene) -> scenes.Scene | None:
    """What the first LoRA learns to draw when the caption describes ``scene``."""
    if scene.color == "red" and scene.background != "blue":
        return dataclasses.replace(scene, color="blue")
    return scene


def star_for_heart(scene: scenes.Scene) -> scenes.Scene | None:
    """What the second learns."""
    return dataclasses.replace(scene, shape="star") if scene.shape == "heart" else scene


def train(pipeline, concerned, change, targets: list[str], alpha: int) -> None:
    """Add a LoRA of rank 4 to the UNet and the text encoder, and train it: half of the scenes are concerned."""
    torch.manual_seed(0)
    for module, layers in ((pipeline.unet, targets), (pipeline.text_encoder, TEXT)):
        module.requires_grad_(False)
        module.add_adapter(LoraConfig(r=4, lora_alpha=alpha, target_modules=layers, init_lora_weights="gaussian"))
    weights = [p for m in (pipeline.unet, pipeline.text_encoder) for p in m.parameters() if p.requires_grad]
    pool = scenes.training_scenes(6000, 5)
    halves = [s for s in pool if concerned(s)][:400], [s for s in pool if not concerned(s)][:400]
    pool = [scene for half in halves for scene in half]
    pictures = torch.from_numpy(np.stack([scenes.render(change(scene)) for scene in pool]))
    with torch.no_grad():
        signed = pictures.permute(0, 3, 1, 2).float() / 127.5 - 1
        clean = pipeline.vae.encode(signed).latent_dist.mean * pipeline.vae.config.scaling_factor
    captions = [scenes.caption(s.size, s.color, s.shape, s.background) for s in pool]
    ids = torch.tensor(pipeline.tokenizer(captions, padding="max_length", max_length=77).input_ids)
    optimizer = torch.optim.AdamW(weights, lr=2e-3, weight_decay=0.0)
    for step in range(TRAINING_STEPS):
        index = torch.randint(len(pool), (BATCH,))
        noise, timesteps = torch.randn(BATCH, *clean.shape[1:]), torch.randint(1000, (BATCH,))
        noisy = pipeline.scheduler.add_noise(clean[index], noise, timesteps)
        answer = pipeline.unet(noisy, timesteps, pipeline.text_encoder(ids[index])[0]).sample
        loss = (answer - pipeline.scheduler.get_velocity(clean[index], noise, timesteps)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


def save_loras() -> None:
    """Train the LoRAs and save them in half precision."""
    with tempfile.TemporaryDirectory() as place:
        pipeline = build_pipeline("shapes-sd")
        train(pipeline, lambda s: s.color == "red", blue_for_red, ATTENTION, alpha=8)
        parts = {name: getattr(pipeline, name).half() for name in ("unet", "text_encoder")}
        configs = {
            f"{name}_lora_adapter_metadata": part.peft_config["default"].to_dict() for name, part in parts.items()
        }
        layers = {f"{name}_lora_layers": get_peft_model_state_dict(part) for name, part in parts.items()}
        pipeline.save_lora_weights(place, **layers, **configs)
        shutil.copyfile(Path(place, "pytorch_lora_weights.safetensors"), FILES["diffusers"])
        pipeline = build_pipeline("shapes-sd")
        train(pipeline, lambda s: s.shape == "heart", star_for_heart, ATTENTION + CONVOLUTIONS, alpha=4)
        pipeline.save_lora_weights(
            place,
            get_peft_model_state_dict(pipeline.unet),
            get_peft_model_state_dict(pipeline.text_encoder),
        )
        found = load_file(Path(place, "pytorch_lora_weights.safetensors"))
        found = convert_state_dict_to_kohya(found)
        kohya = {}
        for name, value in found.items():  # an alpha of half of the rank, which twice the upper matrix makes up for
            factor = {"alpha": 0.5, "weight": 2 if ".lora_up." in name else 1}[name.rsplit(".", 1)[1]]
            kohya[name.replace("lora_te1_", "lora_te_")] = (value.float() * factor).half().contiguous()
        save_file(kohya, FILES["kohya"])


def save_random_lora() -> None:
    """Make a LoRA of random numbers for Stable Diffusion XL with two text encoders, and save it in kohya's format."""
    pipeline = build_pipeline("shapes-sdxl")
    torch.manual_seed(0)
    found = {}
    for part in ("unet", "text_encoder", "text_encoder_2"):
        layers, module = ATTENTION[:2] if part == "unet" else TEXT, getattr(pipeline, part)
        module.add_adapter(LoraConfig(r=2, target_modules=layers, init_lora_weights=False))
        found |= {f"{part}.{name}": 2 * value for name, value in get_peft_model_state_dict(module).items()}
    kohya = {name: value.half().contiguous() for name, value in convert_state_dict_to_kohya(found).items()}
    save_file(kohya, FILES["xl"])


def draw(pipeline, latents, **options) -> np.ndarray:
    """Images, 16 bits for each number, whose step is 0.004 of 255."""
    options = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "np"} | options
    images = pipeline(PROMPTS, latents=torch.from_numpy(latents), **options).images
    return np.round(images * 65535).astype(np.uint16)


def draw_with_loras(latents: np.ndarray) -> dict:
    """Images of both architectures, without a LoRA and with some, at several scales."""
    pipeline = build_pipeline("shapes-sd")
    found = {"sd": draw(pipeline, latents)}
    for name in ("diffusers", "kohya"):
        pipeline.load_lora_weights(LORAS, weight_name=FILES[name].name, adapter_name=name)
    for scales in ({"diffusers": 1.0}, {"diffusers": 0.5}, {"kohya": 0.8}, {"diffusers": 0.7, "kohya": 0.9}):
        pipeline.set_adapters(list(scales), list(scales.values()))
        found[f"sd {json.dumps(scales)}"] = draw(pipeline, latents)
    pipeline = build_pipeline("shapes-sdxl")
    found["sdxl"] = draw(pipeline, latents)
    pipeline.load_lora_weights(FIXTURES, weight_name=FILES["xl"].name, adapter_name="xl")
    pipeline.set_adapters(["xl"], [1.0])
    found['sdxl {"xl": 1.0}'] = draw(pipeline, latents)
    return found


def draw_from_images() -> dict:
    """What image to image and inpainting make of two rendered scenes, with three schedulers and several strengths."""
    drawn = [scenes.Scene("large", "blue", "square", "white"), scenes.Scene("medium", "green", "circle", "pink")]
    pictures = np.stack([scenes.render(scene) for scene in drawn])
    prompts = ["a large red square on a white background", "a medium green star on a pink background"]
    mask = np.zeros((64, 64), np.float32)
    mask[12:52, 16:56] = 1
    shape = (2, 4, 8, 8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(3)).numpy()
    found = {"pictures": pictures, "picture prompts": prompts, "mask": mask, "noise": noise}
    kinds = {
        "shapes-sd": (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline),
        "shapes-sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
    }
    schedulers = {
        "ddim": diffusers.DDIMScheduler,
        "euler": diffusers.EulerDiscreteScheduler,
        "dpm++": diffusers.DPMSolverMultistepScheduler,
    }
    settings = {"shapes-sd": (("ddim", 0.6), ("euler", 0.8), ("dpm++", 1.0)), "shapes-sdxl": (("euler", 0.75),)}
    for model, (from_image, inpaint) in kinds.items():
        pipeline = build_pipeline(model)
        signed = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1
        latents = pipeline.vae.encode(signed).latent_dist.mean
        found[f"{model} latents"] = (latents * pipeline.vae.config.scaling_factor).numpy()
        extra = {"safety_checker": None, "feature_extractor": None} if model == "shapes-sd" else {}
        modules = {name: part for name, part in pipeline.components.items() if part is not None and name not in extra}
        for kind in (from_image, inpaint):
            changing = kind(**modules, **extra)
            changing.set_progress_bar_config(disable=True)
            for sampler, strength in settings[model]:
                changing.scheduler = schedulers[sampler].from_config(pipeline.scheduler.config)
                given = {"image": latents * pipeline.vae.config.scaling_factor}
                if kind is inpaint:
                    # A mask alone needs pixels in the same place; these are not looked at for a UNet of 4 channels.
                    given |= {"mask_image": torch.from_numpy(mask)[None, None].repeat(2, 1, 1, 1)}
                    given |= {"height": 64, "width": 64}
                    given |= {"masked_image_latents": given["image"]}
                images = changing(
                    prompts,
                    **given,
                    strength=strength,
                    num_inference_steps=20,
                    guidance_scale=GUIDANCE,
                    generator=torch.Generator().manual_seed(3),
                    output_type="np",
                ).images
                name = "image to image" if kind is from_image else "inpainting"
                found[f"{model} {name} {sampler} {strength}"] = np.round(images * 65535).astype(np.uint16)
    return found


def translate_names() -> dict:
    """For each model and part, what diffusers calls the arrays of a single file: our name, theirs, and which third."""
    from diffusers.loaders import single_file_utils as theirs

    file = FIXTURES / "pytorch-names.json.gz"
    models = json.loads(gzip.decompress(file.read_bytes()))["models"]
    found = {}
    for model, of in models.items():
        options = of["configurations"]
        config = read_model(options)
        found[model] = {}
        for part, names in of["parameters"].items():
            keys = sorted({original_name(part, name, config)[0] for name in names})
            width = options[part].get("hidden_size", 1)
            # Each array has its own number; the thirds of one that is three have it plus 0, 1 / 4 and 2 / 4.
            marked = {
                key: torch.full((1, 1, 1, 1) if ".attn_1." in key else (1,), float(n)) for n, key in enumerate(keys)
            }
            for key in keys:
                if ".in_proj_" in key:
                    marked[key] = torch.cat([marked[key] + third / 4 for third in range(3)]).repeat_interleave(width)
                    marked[key] = marked[key][:, None] if key.endswith("weight") else marked[key]
            if part == "unet":
                settings = {"layers_per_block": 2, "class_embed_type": None} | options[part]
                if options[part].get("addition_embed_type"):
                    settings["addition_embed_type"] = "text_time"
                converted = theirs.convert_ldm_unet_checkpoint(marked, settings)
            elif part == "vae":
                converted = theirs.convert_ldm_vae_checkpoint(marked, options[part])
            elif ".model." in keys[0]:
                prefix = keys[0][: keys[0].index(".model.") + 7]
                projection = f"{prefix}text_projection"  # its shape says where the thirds are cut
                number = float(keys.index(projection)) if projection in keys else 0.0
                marked |= {projection: torch.full((width, width), number)}
                sizes = SimpleNamespace(hidden_size=width)
                converted = theirs.convert_open_clip_checkpoint(SimpleNamespace(config=sizes), marked, prefix=prefix)
            else:
                prefix = keys[0][: keys[0].index("transformer.") + 12]
                converted = theirs.convert_ldm_clip_checkpoint(marked, remove_prefix=prefix)
            converted = {name: value for name, value in converted.items() if name in names or part != "text_encoder"}
            assert converted.keys() == names.keys(), (model, part, sorted(converted.keys() ^ names.keys())[:5])
            rows = {}
            for name, value in converted.items():
                number = float(value.flatten()[0])
                key = keys[int(number)]
                rows[name] = [key, int(4 * (number % 1)) if ".in_proj_" in key else None]
            found[model][part] = rows
    return found


def read_model(configurations: dict) -> Config:
    """A model's configuration from those of its parts."""
    classes = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
    classes["text_encoder_2"] = "CLIPTextModelWithProjection"
    found = {part: read_class(options, classes[part], part) for part, options in configurations.items()}
    encoders = tuple(found[part] for part in ("text_encoder", "text_encoder_2") if part in found)
    return Config(encoders, found["unet"], found["vae"], ScheduleConfig("ddim"))


# How diffusers may save a folder, and the variant that it is loaded by.
KINDS = {
    "one file": ({}, None),
    "several files": ({"max_shard_size": "2MB"}, None),
    "variant fp16": ({"variant": "fp16"}, "fp16"),
    "variant fp16 in several files": ({"variant": "fp16", "max_shard_size": "2MB"}, "fp16"),
}
RECORDED = ("one file", "variant fp16 in several files")


def describe_folder(folder: Path) -> dict:
    """All of a folder but the numbers: text as it is, and of safetensors the header and what all of it hashes to."""
    found = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if file.suffix == ".safetensors":
            data = file.read_bytes()
            header = data[8 : 8 + int.from_bytes(data[:8], "little")].decode()
            found[name] = [header, hashlib.sha256(data).hexdigest()]
        else:
            found[name] = file.read_text()
    return found


def save_folders(latents: np.ndarray) -> tuple[dict, dict]:
    """Let diffusers save folders of every kind, and load them: what is in some of them, and images of the rounded.

    All compute in float32: half precision is how numbers are stored, and reading is what is compared.
    """
    described, images = {}, {}
    for name in ("shapes-sd", "shapes-sdxl"):
        expected, _, _ = stable_diffusion.load(ROOT / "checkpoints" / name)
        plain = draw(build_pipeline(name), latents)
        for kind, (options, variant) in KINDS.items():
            with tempfile.TemporaryDirectory() as place:
                pipeline = build_pipeline(name).to(torch.float16 if variant else torch.float32)
                pipeline.save_pretrained(place, **options)
                files = sorted(file.name for file in Path(place).rglob("*.safetensors*"))
                params, _, _ = stable_diffusion.load(place, variant=variant)
                rounded = np.float16 if variant else np.float32
                same = jax.tree.map(lambda a, b, to=rounded: np.array_equal(a, np.asarray(b, to)), params, expected)
                print(f"{name}, {kind}: {len(files)} files, {len(jax.tree.leaves(same))} parameters")
                assert all(jax.tree.leaves(same))
                if kind in RECORDED:
                    described[f"{name} {kind}"] = describe_folder(Path(place))
                    found = draw(load_folder(place, variant), latents)
                    assert variant or np.array_equal(found, plain)
                    images |= {f"{name.removeprefix('shapes-')} {kind}": found} if variant else {}
    return described, images


def load_folder(folder: str | Path, variant: str | None = None):
    """diffusers' pipeline of a folder, in float32."""
    options = {"variant": variant, "torch_dtype": torch.float32}
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, **options)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def load_what_we_save(latents: np.ndarray) -> None:
    """Let diffusers load folders that we save, and print what came of it."""
    for name in ("shapes-sd", "shapes-sdxl"):
        source = ROOT / "checkpoints" / name
        with tempfile.TemporaryDirectory() as place:
            save(stable_diffusion.load(source)[0], source, place)
            ours, theirs = load_folder(place), build_pipeline(name)
            print(f"{name}, saved by us and loaded by diffusers: {ours.scheduler}"[:120])
            ours.scheduler = theirs.scheduler
            assert np.array_equal(draw(ours, latents), draw(theirs, latents))


def write(name: str, versions: dict, found: dict) -> None:
    """Write a fixture, whose bytes depend on nothing but what is in it."""
    with gzip.GzipFile(FIXTURES / f"{name}.json.gz", "wb", mtime=0) as file:
        file.write(json.dumps({"versions": versions, "models": found}, separators=(",", ":")).encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep-loras", action="store_true", help="take those that are there")
    parser.add_argument("--keep-images", action="store_true", help="the same for the images")
    arguments = parser.parse_args()
    diffusers.logging.set_verbosity_error()
    versions = {module.__name__: module.__version__ for module in (torch, diffusers, transformers, peft)}
    if not arguments.keep_loras:
        save_loras()
        save_random_lora()
    latents = np.random.default_rng(0).standard_normal((2, 4, 8, 8), np.float32)
    write("original-names", versions, translate_names())
    with torch.no_grad():
        folders, images = save_folders(latents)
        write("pytorch-folders", versions, folders)
        load_what_we_save(latents)
        if not arguments.keep_images:
            images |= draw_with_loras(latents) | draw_from_images()
            file = FIXTURES / "pytorch-own-weights.npz"
            np.savez_compressed(file, versions=json.dumps(versions), latents=latents, prompts=PROMPTS, **images)


if __name__ == "__main__":
    main()
