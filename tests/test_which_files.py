"""Which files are read: each kind in docs/which-files.toml, tried by the function of its name.

The files are made here of the bundled checkpoints, or were written by PEFT, diffusers and LyCORIS
(``python -m tests.makers.strangers`` and ``newest``).
"""

import dataclasses
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file
from transformers import CLIPTokenizer

import course.convert
import helpers.models
from course import flux2, sd
from course.flux2 import convert as flux2_convert
from course.flux2 import lora as flux2_lora
from course.model.files import stack_layers, to_files, unstack_layers
from course.model.lora import flat_name, save_pairs
from course.model.singles import Layout, to_single
from course.sd import convert, lora, words
from course.sd.clip import EMBEDDINGS
from helpers import bundled_checkpoint, find_model
from tests.makers import common
from tests.makers import files as make

SD = Path(bundled_checkpoint("shapes-sd").source)
XL = Path(bundled_checkpoint("shapes-sdxl").source)
STRANGERS = common.FIXTURES / "strangers"
NEWEST = common.FIXTURES / "newest"
KLEIN = common.FIXTURES / "klein"  # python -m tests.makers.klein
KOHYA = SD.parent / "loras" / "star-for-heart.safetensors"
PEFT = SD.parent / "loras" / "blue-for-red.safetensors"
UNET = "unet/diffusion_pytorch_model"
LIST = common.ROOT / "docs" / "which-files.toml"
KINDS = {}
for group in tomllib.loads(LIST.read_text(encoding="utf-8"))["groups"]:
    KINDS |= group["kinds"]


class Bench:
    """What a case works with: the models, the tensors of their single files, and a folder."""

    def __init__(self, models, singles, folder, small_flux2, flux2_folder, place):
        self.klein_params, self.klein_config, _ = small_flux2
        self.klein_folder = flux2_folder
        self.params, self.config, self.tokenize = models["shapes-sd"]
        self.xl_params, self.xl_config, self.xl_tokenize = models["shapes-sdxl"]
        self.sd2_config = dataclasses.replace(
            self.config, text=(dataclasses.replace(self.config.text[0], hidden_act="gelu"),)
        )
        self.singles = singles
        self.folder = folder
        self.place = place
        self.file = place / "model.safetensors"

    def single(self, tensors, config=None, expected=None, **others):
        """Read a single file with these tensors, and compare it with a model."""
        file = make.save(tensors, self.file)
        found = convert.read_single_file(file, config or self.config, **others)
        found = {part: stack_layers(values) for part, values in found.items()}
        assert make.is_same(found, self.params if expected is None else expected)

    def folder_copy(self):
        """A folder in diffusers' format, whose files are links."""
        copy = self.place / "folder"
        shutil.copytree(self.folder, copy, copy_function=os.link)
        return copy

    def lora(self, file, config=None, params=None):
        return lora.read_lora(file, params or self.params, config or self.config)

    def products(self, name, file):
        """Read a LoRA, and compare what it adds with what it adds on PyTorch."""
        recorded = json.loads((STRANGERS / "products.json").read_text(encoding="utf-8"))
        self.adds(file, recorded["products"][name])

    def adds(self, file, products):
        """Read a LoRA, and compare what its layers add to a vector of ones."""
        of_parts = {}
        for layer, expected in products.items():
            part = "text_encoder" if layer.startswith("text_model") else "unet"
            of_parts[f"{part}.{layer}"] = expected
        assert_adds(self.lora(file), of_parts)

    def klein_lora(self, file):
        return flux2.read_lora(file, self.klein_params, self.klein_config)

    def klein_files(self, layouts):
        """The tensors of files of FLUX.2, for each part."""
        found = {}
        for part, values in flux2.read_files(self.klein_folder, self.klein_config).items():
            found[part] = to_single(
                values, layouts[part], part, flux2_convert.NAMING, self.klein_config
            )
        return found

    def klein_single(self, tensors, **others):
        """Read a file of FLUX.2 with these tensors, and compare it with the model."""
        file = make.save(tensors, self.file)
        found = flux2.read_single_file(file, self.klein_config, **others)
        whole = flux2.read_files(self.klein_folder, self.klein_config)
        for part, values in whole.items():
            assert found[part].keys() == values.keys() - {"lm_head.weight"}
            for name, value in found[part].items():
                assert np.array_equal(value, values[name]), name

    def word(self, tensors, name="cat-toy.safetensors", xl=False, **options):
        """Read a file with a word, and return the model's tables, and a function for prompts."""
        file = make.save(tensors, self.place / name)
        if xl:
            model = self.xl_params, self.xl_config, self.xl_tokenize
        else:
            model = self.params, self.config, self.tokenize
        return words.read_embedding(file, *model, **options)


def assert_adds(found, products):
    """Compare what layers of a LoRA add to a vector of ones, by part and name, with PyTorch's."""
    of_layers = {}
    for part, pairs in found.items():
        for weight, pair in pairs.items():
            for name, product in unstack_layers({weight: pair.product}).items():
                of_layers[f"{part}.{name.removesuffix('.weight')}"] = product
    for layer, expected in products.items():
        added = np.asarray(of_layers[layer]).sum(axis=0)
        np.testing.assert_allclose(added, expected, rtol=1e-4, atol=1e-5)


def read_klein():
    return common.read_json("klein/recorded")


@pytest.fixture(scope="module")
def singles(models):
    """The tensors of single files."""
    found = {}
    for name, (params, config, _) in models.items():
        found[name] = make.single_file(params, config)
    return found


@pytest.fixture
def bench(models, singles, folder, small_flux2, flux2_folder, tmp_path):
    return Bench(models, singles, folder, small_flux2, flux2_folder, tmp_path)


def without(tensors, *beginnings):
    return {name: value for name, value in tensors.items() if not name.startswith(beginnings)}


# One file with a whole model.


def try_sd1(bench):
    bench.single(bench.singles["shapes-sd"])
    for dtype in (np.float16, jnp.bfloat16):
        expected = jax.tree.map(lambda x, dtype=dtype: np.asarray(x, dtype), bench.params)
        tensors = {name: value.astype(dtype) for name, value in bench.singles["shapes-sd"].items()}
        bench.single(tensors, expected=expected)


def try_ema(bench):
    bench.single(make.with_training(bench.singles["shapes-sd"]))


def try_short_text(bench):
    layouts = {"text_encoder": Layout(convert.TEXT_1, "short")}
    bench.single(make.single_file(bench.params, bench.config, layouts))


def try_sd2(bench):
    tensors = make.single_file(bench.params, bench.sd2_config)
    assert any(name.startswith("cond_stage_model.model.") for name in tensors)
    bench.single(tensors, bench.sd2_config)
    layouts = {"text_encoder": Layout("conditioner.embedders.0.model.", "open_clip")}
    bench.single(make.single_file(bench.params, bench.sd2_config, layouts), bench.sd2_config)


def wide_norms(tensors):
    """A Stable Diffusion 2 that predicts velocities, as one sees by its last norm."""
    name = max(
        name
        for name in tensors
        if name.startswith("model.diffusion_model.output_blocks.3")
        and name.endswith("transformer_blocks.0.norm1.bias")
    )
    return tensors | {name: np.linspace(-1, 1, tensors[name].size, dtype=np.float32)}


def try_sd2_v(bench):
    file = make.save(wide_norms(make.single_file(bench.params, bench.sd2_config)), bench.file)
    assert bench.sd2_config.schedule.prediction_type == "v_prediction"
    schedule = convert.guess_schedule(file, bench.sd2_config)
    assert schedule == bench.sd2_config.schedule
    base = like_base(bench.sd2_config)
    schedule = convert.guess_schedule(file, base, "v_prediction")
    assert schedule == bench.sd2_config.schedule


def like_base(config):
    schedule = dataclasses.replace(config.schedule, prediction_type="epsilon")
    return dataclasses.replace(config, schedule=schedule)


def try_sd2_v_like_base(bench):
    file = make.save(wide_norms(make.single_file(bench.params, bench.sd2_config)), bench.file)
    convert.guess_schedule(file, like_base(bench.sd2_config))


def try_xl(bench):
    bench.single(bench.singles["shapes-sdxl"], bench.xl_config, bench.xl_params)


def try_xl_v(bench):
    base = like_base(bench.xl_config)
    empty = np.zeros(0, np.float32)
    file = make.save(bench.singles["shapes-sdxl"] | {"v_pred": empty, "ztsnr": empty}, bench.file)
    schedule = convert.guess_schedule(file, base)
    assert schedule.prediction_type == "v_prediction"
    assert schedule.rescale_betas_zero_snr
    assert schedule.timestep_spacing == "trailing"
    file = make.save(bench.singles["shapes-sdxl"], file, {"modelspec.prediction_type": "v"})
    assert convert.guess_schedule(file, base).prediction_type == "v_prediction"
    # The command writes it into the folder, from where it is read again.
    source = bench.place / "like"
    shutil.copytree(XL, source)
    make.edit_json(
        source / "scheduler" / "scheduler_config.json",
        lambda options: options | {"prediction_type": "epsilon"},
    )
    make.save(bench.singles["shapes-sdxl"] | {"v_pred": empty, "ztsnr": empty}, file)
    assert course.convert.main([str(file), str(bench.place / "new"), "--like", str(source)]) == 0
    params, config, _ = sd.load(bench.place / "new")
    assert config.schedule == schedule
    assert make.is_same(params, bench.xl_params)


def try_diffusers_names(bench):
    layouts = {}
    for part in ("unet", "vae", "text_encoder"):
        layouts[part] = Layout(f"{part}.", "diffusers")
    bench.single(make.single_file(bench.params, bench.config, layouts))


def try_other_prefixes(bench):
    for model, params, config in (
        ("shapes-sd", bench.params, bench.config),
        ("shapes-sdxl", bench.xl_params, bench.xl_config),
    ):
        for part in params:
            alone = {part: params[part]}
            others = make.single_file(
                {other: values for other, values in params.items() if other != part}, config
            )
            for prefix, names in itertools.product(convert.PREFIXES[part], convert.NAMES[part]):
                layouts = {part: Layout(prefix, names)}
                tensors = others | make.single_file(alone, config, layouts)
                bench.single(tensors, config, params)
        for wrapper in ("module.", "_orig_mod.", "state_dict."):
            wrapped = {f"{wrapper}{name}": x for name, x in bench.singles[model].items()}
            bench.single(wrapped, config, params)


def try_other_vae(bench):
    zeros = jax.tree.map(np.zeros_like, bench.params["vae"])
    expected = bench.params | {"vae": zeros}
    for names in convert.NAMES["vae"]:
        layouts = {"vae": Layout("", names)}
        alone = make.single_file({"vae": zeros}, bench.config, layouts)
        file = make.save(alone, bench.place / "vae.safetensors")
        bench.single(bench.singles["shapes-sd"], expected=expected, vae=file)
        bench.single(without(bench.singles["shapes-sd"], convert.VAE), expected=expected, vae=file)
    bench.single(bench.singles["shapes-sd"], vae=bench.folder)
    bench.single(bench.singles["shapes-sd"], vae=bench.folder / "vae")


def try_other_text(bench):
    zeros = jax.tree.map(np.zeros_like, bench.params["text_encoder"])
    for names in convert.NAMES["text_encoder"]:
        layouts = {"text_encoder": Layout("", names)}
        alone = make.single_file({"text_encoder": zeros}, bench.config, layouts)
        file = make.save(alone, bench.place / "text.safetensors")
        expected = bench.params | {"text_encoder": zeros}
        bench.single(bench.singles["shapes-sd"], expected=expected, text_encoder=file)


def try_no_vae(bench):
    bench.single(without(bench.singles["shapes-sd"], convert.VAE))


def try_only_unet(bench):
    layouts = {"unet": Layout("", "diffusers")}
    alone = make.single_file({"unet": bench.params["unet"]}, bench.config, layouts)
    bench.single(alone, vae=bench.folder, text_encoder=bench.folder)
    bench.single(alone)


def try_wrong_kind(bench):
    name = "model.diffusion_model.middle_block.1.transformer_blocks.0.attn2.to_k.weight"
    bench.single(bench.singles["shapes-sd"] | {name: np.zeros((96, 2048), np.float32)})


def try_inpainting(bench):
    bench.single(make.for_inpainting(bench.singles["shapes-sd"]))


def try_edm(bench):
    bench.single(bench.singles["shapes-sdxl"] | {"edm_vpred.sigma_max": np.zeros(1, np.float32)})


def try_sd3_flux(bench):
    for name, kind in {
        "joint_blocks.0.x_block.attn.qkv.weight": "for Stable Diffusion 3",
        "double_blocks.0.img_mod.lin.weight": "for FLUX.1",
        "double_stream_modulation_img.lin.weight": "for FLUX.2",
        "model.diffusion_model.noise_refiner.0.attention.qkv.weight": "for Z-Image",
        "transformer_blocks.0.img_mod.1.weight": "for Qwen-Image",
        "lora_unet_mid_block_resnets_0_conv1.lora_down.weight": "a LoRA, which course.lora builds",
    }.items():
        with pytest.raises(ValueError, match=f"model.safetensors is {kind}"):
            bench.single({name: np.zeros((3, 3), np.float32)})
    bench.single({name: np.zeros((3, 3), np.float32)})


def try_fp8(bench):
    bench.single(make.in_8_bits(bench.singles["shapes-sd"]))


def try_nan(bench):
    bench.file = bench.place / "lora.safetensors"
    with pytest.raises(ValueError, match=r"in lora_te_.* that are infinite or NaN"):
        bench.lora(make.save(make.spoiled(load_file(KOHYA), "lora_up.weight", np.nan), bench.file))
    with pytest.raises(ValueError, match=r"in toy that are infinite or NaN"):
        bench.word({"toy": np.full((1, 64), np.inf, np.float32)})
    spoiled = make.spoiled(bench.singles["shapes-sd"], "out.2.bias", np.nan)
    file = make.save(spoiled, bench.place / "model.safetensors")
    sd.save(convert.read_single_file(file, bench.config), SD, bench.place / "new")


def try_message(bench):
    for text in (b'{"error":"Unauthorized","message":"log in"}', b"Invalid username or password."):
        bench.file.write_bytes(text)
        for read in (convert.read_single_file, convert.guess_schedule):
            with pytest.raises(ValueError, match="is the message of a site in place of the file"):
                read(bench.file, bench.config)
    folder = shutil.copytree(bundled_checkpoint("shapes-flux2").source, bench.place / "klein")
    (whole,) = (folder / "vae").glob("*.safetensors")
    whole.write_bytes(text)
    flux2.load(folder)


def try_gguf(bench):
    bench.file.write_bytes(b"GGUF\x03\0\0\0" + bytes(99))
    convert.read_single_file(bench.file, bench.config)


def try_pickle(bench):
    for name in ("model.ckpt", "model.pt", "model.pth", "model.bin"):
        with pytest.raises(ValueError, match="is a pickle"):
            convert.read_single_file(bench.place / name, bench.config)
    starts = [pickle.dumps({"a": [1]}, protocol) for protocol in range(6)]
    for start in (*starts, b"PK\x03\x04" + bytes(99)):  # which is PyTorch's archive
        bench.file.write_bytes(start)
        with pytest.raises(ValueError, match="is a pickle"):
            bench.lora(bench.file)
    convert.read_single_file(bench.file, bench.config)


def try_lfs(bench):
    bench.file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4\n")
    convert.read_single_file(bench.file, bench.config)


def try_page(bench):
    bench.file.write_bytes(b"\n<!DOCTYPE html><html>Log in, please</html>")
    convert.read_single_file(bench.file, bench.config)


# Folders.


def try_folder(bench):
    for dtype in (np.float32, np.float16, jnp.bfloat16):
        place = bench.place / jnp.dtype(dtype).name
        sd.save(bench.params, SD, place, dtype)
        expected = jax.tree.map(lambda x, dtype=dtype: np.float32(x.astype(dtype)), bench.params)
        assert make.is_same(sd.load(place)[0], expected)
    rounded = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), bench.params)
    assert make.is_same(sd.load(place, jnp.bfloat16)[0], rounded)
    assert make.is_same(sd.load(SD)[0], bench.params)  # which has Flax weights


def as_transformers_5(bench):
    """A folder whose tokenizer and text encoder are as transformers 5 saves them."""
    folder = bench.folder_copy()
    recorded = json.loads((NEWEST / "recorded.json").read_text(encoding="utf-8"))["text_encoder"]
    header, expected = recorded["model.safetensors"]
    file = folder / "text_encoder" / "model.safetensors"
    tensors = {name.removeprefix("text_model."): value for name, value in load_file(file).items()}
    file.unlink()
    make.write_by_header(file, header, tensors)
    assert hashlib.sha256(file.read_bytes()).hexdigest() == expected
    (folder / "text_encoder" / "config.json").unlink()
    (folder / "text_encoder" / "config.json").write_text(recorded["config.json"])
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(NEWEST / "tokenizer", folder / "tokenizer")
    return folder


def try_transformers_5(bench):
    folder = as_transformers_5(bench)
    params, config, tokenize = sd.load(folder)
    assert make.is_same(params, bench.params)
    assert config == sd.read_config(bench.folder)
    prompts = ["a small red heart", "naïve café 中文 it's WE'LL 12345 🙂"]
    assert np.array_equal(tokenize(prompts), bench.tokenize(prompts))
    file = make.save(bench.singles["shapes-sd"], bench.file)
    new = bench.place / "new"
    assert course.convert.main([str(file), str(new), "--like", str(folder)]) == 0
    params, _, tokenize = sd.load(new)
    assert make.is_same(params, bench.params)
    # Older versions of transformers read it, too.
    older = CLIPTokenizer.from_pretrained(new / "tokenizer")
    expected = older(prompts[:1], padding="max_length", max_length=77).input_ids
    assert np.array_equal(tokenize(prompts[:1])[:, 0], expected)
    bench.single(bench.singles["shapes-sd"], text_encoder=folder)
    alone = folder / "text_encoder" / "model.safetensors"
    bench.single(bench.singles["shapes-sd"], text_encoder=alone)


def try_variant(bench):
    folder = bench.folder_copy()
    for file in folder.rglob("*.safetensors"):
        file.rename(file.with_suffix(".fp16.safetensors"))
    assert make.is_same(sd.load(folder, variant="fp16")[0], bench.params)
    assert make.is_same(sd.load(folder)[0], bench.params)  # there is no other


def try_shards(bench):
    folder = bench.folder_copy()
    whole = folder / f"{UNET}.safetensors"
    make.save_in_parts(load_file(whole), whole.parent, "diffusion_pytorch_model", 2)
    whole.unlink()
    assert make.is_same(sd.load(folder)[0], bench.params)


def try_hub(bench):
    asked = []

    def give(hub_id, revision, **options):
        asked.append((hub_id, revision))
        return bench.folder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers.models, "snapshot_download", give)
        assert find_model("owner/name@fp16") == bench.folder
        assert find_model("owner/name") == bench.folder
    assert asked == [("owner/name", "fp16"), ("owner/name", None)]
    # Of a repository whose UNet has a variant alone, that is asked for.
    snapshot = bench.folder_copy()
    (snapshot / f"{UNET}.safetensors").unlink()
    patterns = []

    def give_some(hub_id, revision, allow_patterns, ignore_patterns):
        patterns.append(allow_patterns)
        return snapshot

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(helpers.models, "snapshot_download", give_some)
        assert find_model("owner/name") == snapshot
        assert find_model("owner/name", only=["tokenizer/*"]) == snapshot
    assert patterns[1:] == [["unet/*.safetensors"], ["tokenizer/*"]]
    assert find_model("shapes-sd") == SD
    assert find_model(bench.folder) == bench.folder


def try_schedulers(bench):
    found = {}
    for kind, options in {
        "UniPCMultistepScheduler": {"solver_type": "bh2", "predict_x0": True},
        "DEISMultistepScheduler": {"algorithm_type": "deis", "solver_type": "logrho"},
        "EulerAncestralDiscreteScheduler": {},
        "HeunDiscreteScheduler": {},
        "DDPMScheduler": {"variance_type": "fixed_small"},
        "LCMScheduler": {"original_inference_steps": 50, "timestep_scaling": 10.0},
        "TCDScheduler": {},
        "DPMSolverMultistepScheduler": {"use_karras_sigmas": True},
    }.items():
        folder = bench.place / kind
        shutil.copytree(bench.folder, folder, copy_function=os.link)
        make.edit_json(
            folder / "model_index.json",
            lambda index, kind=kind: index | {"scheduler": ["diffusers", kind]},
        )
        make.edit_json(
            folder / "scheduler" / "scheduler_config.json",
            lambda old, kind=kind, options=options: old | options | {"_class_name": kind},
        )
        with pytest.warns(UserWarning, match="draws in its place"):
            config = sd.read_config(folder)
        found[kind] = config.schedule.sampler
        assert config.schedule.prediction_type == "v_prediction"
    ddim = ["ddim"] * 3
    assert list(found.values()) == ["dpm++", "dpm++", "euler", "euler", *ddim, "dpm++"]
    # Options of other schedulers, which from_config leaves in a configuration.
    make.edit_json(
        bench.folder_copy() / "scheduler" / "scheduler_config.json",
        lambda old: old | {"solver_order": 3, "use_karras_sigmas": True, "variance_type": "fixed"},
    )
    assert sd.read_config(bench.place / "folder") == sd.read_config(bench.folder)


def try_flux2(bench):
    source = Path(bundled_checkpoint("shapes-flux2").source)
    params, _, _ = flux2.load(source)
    copy = shutil.copytree(source, bench.place / "klein")
    for part, values in params.items():
        (whole,) = (copy / part).glob("*.safetensors")
        whole.unlink()
        make.save_in_parts(to_files(values), copy / part, "model", 2)
    assert make.is_same(flux2.load(copy)[0], params)


def try_klein_files(bench):
    parts = bench.klein_files(flux2_convert.RELEASED)
    places = {part: make.save(parts[part], bench.place / part) for part in ("vae", "text_encoder")}
    bench.klein_single(parts["transformer"], **places)
    bench.klein_single(
        parts["transformer"], vae=bench.klein_folder, text_encoder=bench.klein_folder
    )
    own = {part: Layout(f"{part}.", "diffusers") for part in parts}
    for part, prefixes in flux2_convert.PREFIXES.items():
        for prefix, names in itertools.product(prefixes, flux2_convert.NAMES[part]):
            by_part = bench.klein_files(own | {part: Layout(prefix, names)})
            bench.klein_single(dict(itertools.chain(*(x.items() for x in by_part.values()))))


def try_klein_alone(bench):
    bench.klein_single(bench.klein_files(flux2_convert.RELEASED)["transformer"])


def try_klein_wrong(bench):
    name = "double_blocks.0.img_attn.qkv.weight"
    parts = bench.klein_files(flux2_convert.RELEASED)
    qkv = parts["transformer"][name]
    others = {"vae": bench.klein_folder, "text_encoder": bench.klein_folder}
    for tensors, message in (
        (bench.singles["shapes-sd"], "has no transformer in it"),
        ({"double_blocks.0.img_mod.lin.weight": np.zeros((3, 3))}, "is for FLUX.1: this model is"),
        (parts["transformer"] | {"single_blocks.3.linear1.weight": np.zeros(3)}, "1 names too"),
        (parts["transformer"] | {name: qkv[1:]}, f"has {name} as .*, and the model of transformer"),
        (parts["transformer"] | {name: np.zeros((*qkv.shape, 3, 3))}, f"has {name} as .*3, 3"),
        (parts["transformer"] | {f"module.{name}": qkv}, f"has {name} twice, as module.{name}"),
    ):
        with pytest.raises(ValueError, match=message):
            bench.klein_single(tensors, **others)
    bench.klein_single(parts["transformer"] | {name: np.zeros((12288, 4096), np.float16)}, **others)


def try_only_bin(bench):
    folder = bench.folder_copy()
    (folder / f"{UNET}.safetensors").rename(folder / f"{UNET}.bin")
    sd.load(folder)


def try_inpainting_folder(bench):
    folder = bench.folder_copy()
    make.edit_json(folder / "unet" / "config.json", lambda options: options | {"in_channels": 9})
    with pytest.raises(ValueError, match="9 channels in and 4 out, as for inpainting"):
        sd.load(folder)
    make.edit_json(
        folder / "model_index.json",
        lambda index: index | {"_class_name": "StableDiffusionInpaintPipeline"},
    )
    sd.load(folder)


def try_other_pipeline(bench):
    folder = bench.folder_copy()
    make.edit_json(
        folder / "model_index.json", lambda index: index | {"_class_name": "FluxPipeline"}
    )
    sd.load(folder)


# LoRA.


def try_kohya(bench):
    found = bench.lora(KOHYA)
    assert any("conv" in name for name in found["unet"])  # test_lora draws with it
    xl = common.FIXTURES / "lora-random-xl.safetensors"
    found = bench.lora(xl, bench.xl_config, bench.xl_params)
    assert found.keys() == {"unet", "text_encoder", "text_encoder_2"}


def try_peft(bench):
    assert bench.lora(PEFT).keys() == {"unet", "text_encoder"}  # test_lora draws with it


def try_pissa(bench):
    folder = shutil.copytree(STRANGERS / "peft", bench.place / "peft")
    file = folder / "adapter_model.safetensors"
    make.edit_json(folder / "adapter_config.json", lambda old: old | {"init_lora_weights": "eva"})
    bench.products("peft-bare", file)
    options = json.dumps({"unet.init_lora_weights": "olora", "unet.lora_alpha": 8})
    with pytest.raises(ValueError, match="was started by 'olora', which changes the weights"):
        bench.lora(make.save(load_file(PEFT), bench.file, {"lora_adapter_metadata": options}))
    make.edit_json(folder / "adapter_config.json", lambda old: old | {"init_lora_weights": "pissa"})
    bench.lora(file)


def try_adalora(bench):
    layer = "base_model.model.mid_block.resnets.0.time_emb_proj"
    tensors = {f"{layer}.lora_{half}": np.ones((2, 2), np.float32) for half in "ABE"}
    bench.lora(make.save(tensors, bench.file))


def try_peft_bare(bench):
    bench.products("peft-bare", STRANGERS / "peft" / "adapter_model.safetensors")


def try_no_prefix(bench):
    bench.products("no-prefix", STRANGERS / "no-prefix.safetensors")


# What programs call a part and its layers: kohya, LyCORIS, ComfyUI, OneTrainer, SimpleTuner,
# InvokeAI, PEFT and PyTorch around a model. "_" at the end means that the names have no dots.
PREFIXES = {
    "unet": (
        *("lora_unet_", "lycoris_", "lora_prior_unet_", "diffusion_model_", "lycoris_unet_"),
        *("unet.", "diffusion_model.", "model.diffusion_model.", "", "module.", "_orig_mod."),
        *("unet.base_model.model.", "base_model.model.unet.", "unet._orig_mod."),
    ),
    "text_encoder": (
        *("lora_te_", "lora_te1_", "lycoris_te_", "lora_clip_l_"),
        *("text_encoder.", "text_encoder.base_model.model.", "te1.", "clip_l.transformer."),
        *("text_encoders.clip_l.transformer.", "cond_stage_model.transformer."),
        "conditioner.embedders.0.transformer.",
    ),
    "text_encoder_2": (
        *("lora_te2_", "lycoris_te2_", "text_encoder_2.", "te2.", "clip_g.transformer."),
        *("text_encoders.clip_g.transformer.", "conditioner.embedders.1.model."),
    ),
}


def try_prefixes(bench):
    xl = common.FIXTURES / "lora-random-xl.safetensors"
    for file, params, config in (
        (KOHYA, bench.params, bench.config),
        (xl, bench.xl_params, bench.xl_config),
    ):
        expected = bench.lora(file, config, params)
        for part, pairs in expected.items():
            for prefix, is_other in itertools.product(PREFIXES[part], (False, True)):

                def name_layer(layer, prefix=prefix, is_other=is_other, config=config):
                    """With the name of the original layout, or without "text_model."."""
                    name = layer.file_name
                    if is_other and layer.part == "unet":
                        name = convert.name_unet(f"{name}.weight", config)[: -len(".weight")]
                    elif is_other:
                        name = name.removeprefix("text_model.")
                    name = name.replace(".", "_") if prefix.endswith("_") else name
                    return f"{prefix}{name}", None

                save_pairs(bench.file, {part: pairs}, name_layer, np.float32)
                assert make.is_same(bench.lora(bench.file, config, params), {part: pairs}), prefix


def try_flat_text(bench):
    recorded = json.loads((NEWEST / "recorded.json").read_text(encoding="utf-8"))["products"]
    assert {layer.split(".")[0] for layer in recorded} == {"unet", "text_encoder"}
    products = {}
    for layer, expected in recorded.items():
        part, name = layer.split(".", 1)
        products[name if part == "unet" else f"text_model.{name}"] = expected
    bench.adds(NEWEST / "lora.safetensors", products)


def try_expression(bench):
    options = {"lora_alpha": 8, "alpha_pattern": {r"mid_block.*to_[qk]": 4}}
    metadata = {"lora_adapter_metadata": json.dumps(options)}
    bench.lora(make.save(load_file(PEFT), bench.file, metadata))


def try_old_diffusers(bench):
    bench.products("old-diffusers", STRANGERS / "old-diffusers.safetensors")


def try_peft_no_config(bench):
    file = bench.place / "adapter_model.safetensors"
    shutil.copyfile(STRANGERS / "peft" / file.name, file)
    bench.lora(file)


def try_dora(bench):
    with pytest.raises(ValueError, match=r"is DoRA, as base_model.*lora_magnitude_vector"):
        bench.lora(STRANGERS / "peft-dora" / "adapter_model.safetensors")
    folder = shutil.copytree(STRANGERS / "peft-dora", bench.place / "lost")
    file = folder / "adapter_model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if "lora_magnitude" not in key}
    with pytest.raises(ValueError, match="is DoRA, as use_dora says"):
        bench.lora(make.save(tensors, file))
    bench.lora(STRANGERS / "dora.safetensors")


def try_loha(bench):
    bench.lora(STRANGERS / "loha.safetensors")


def try_lokr(bench):
    bench.lora(STRANGERS / "lokr.safetensors")


def try_tucker(bench):
    bench.lora(STRANGERS / "tucker.safetensors")


def try_diff(bench):
    bench.lora(STRANGERS / "diff.safetensors")


def try_bundle(bench):
    more = {"bundle_emb.toy.string_to_param.*": np.zeros((1, 64), np.float32)}
    bench.lora(make.save(load_file(KOHYA) | more, bench.file))


def try_other_model(bench):
    xl = common.FIXTURES / "lora-random-xl.safetensors"
    with pytest.raises(ValueError, match="was made for Stable Diffusion XL: get one"):
        bench.lora(xl)
    with pytest.raises(ValueError, match="was made for sd_v2: get one"):
        tensors = {"lora_unet_no_layer.alpha": np.ones((), np.float32)}
        bench.lora(make.save(tensors, bench.file, {"ss_base_model_version": "sd_v2"}))
    bench.lora(xl)


# LoRA for FLUX.2.


def try_klein_lora(bench):
    assert_adds(bench.klein_lora(KLEIN / "lora.safetensors"), read_klein()["products"])


# What diffusers, ComfyUI, ai-toolkit, OneTrainer, musubi-tuner, SimpleTuner, PEFT and PyTorch put
# in front of a layer's name. "_" at the end means that the names have no dots.
KLEIN_PREFIXES = {
    "transformer": (
        *("transformer.", "diffusion_model.", "model.diffusion_model.", "", "base_model.model."),
        *("lora_unet_", "lora_transformer_", "lycoris_", "transformer.base_model.model."),
        *("unet.", "module.", "_orig_mod."),
    ),
    "text_encoder": (
        *("text_encoder.", "text_encoders.qwen3_4b.transformer.", "lora_te_", "lora_te1_"),
        *("te1.", "base_model.model.", ""),
    ),
}


def try_klein_names(bench):
    expected = bench.klein_lora(KLEIN / "lora.safetensors")
    products = read_klein()["products"]
    for part, pairs in expected.items():
        of_part = {name: x for name, x in products.items() if name.startswith(part)}
        for prefix, is_other in itertools.product(KLEIN_PREFIXES[part], (False, True)):

            def name_layer(layer, prefix=prefix, is_other=is_other):
                """By the names of Black Forest Labs, or as transformers 5 has them."""
                name, rows = layer.file_name, None
                if is_other and layer.part == "transformer":
                    name, rows = flux2_convert.name_transformer(name)
                elif is_other:
                    name = name.removeprefix("model.")
                name = name.replace(".", "_") if prefix.endswith("_") else name
                return f"{prefix}{name}", rows

            save_pairs(bench.file, {part: pairs}, name_layer, np.float32)
            assert_adds(bench.klein_lora(bench.file), of_part)
    # All names that ComfyUI has, but those of layers that only FLUX.1 has.
    known = flux2_lora.name_layers(bench.klein_params, bench.klein_config)
    of_flux1 = re.compile(
        r"norm1|single_.*(norm_linear|proj_out|to_[qkv]$)|_net_|proj_mlp|linear1_qkv|_mod_lin|_scale$"
        r"|blocks_\d_modulation_lin|time_text_embed|controlnet|guidance|vector"
    )
    names = {flat_name(name) for name in read_klein()["comfyui"]}
    names = {name for name in names if not of_flux1.search(name)}
    assert len(names) > 100
    assert not sorted(names - known.keys())


def try_klein_no_alpha(bench):
    layers = bench.klein_lora(KLEIN / "lora.safetensors")["transformer"]

    def name_layer(layer):
        name, rows = flux2_convert.name_transformer(layer.file_name)
        return f"base_model.model.{name}", rows

    save_pairs(bench.file, {"transformer": layers}, name_layer, np.float32)
    tensors = {}
    for key, value in load_file(bench.file).items():  # where each alpha is the rank
        if not key.endswith(".alpha"):
            key = key.replace("lora_down", "lora_A").replace("lora_up", "lora_B")
            tensors[key] = value
    products = read_klein()["products"]
    products = {name: x for name, x in products.items() if name.startswith("transformer")}
    with pytest.warns(UserWarning, match="does not say its alpha: it is added as diffusers does"):
        assert_adds(bench.klein_lora(make.save(tensors, bench.file)), products)


def try_klein_both_names(bench):
    weight = bench.klein_params["transformer"]["norm_out.linear.weight"]
    tensors = {
        "norm_out.linear.lora_A.weight": np.ones((1, len(weight)), np.float32),
        "norm_out.linear.lora_B.weight": np.ones((weight.shape[1], 1), np.float32),
        # Where shift and scale are the other way round.
        "final_layer.adaLN_modulation.1.alpha": np.ones((), np.float32),
    }
    bench.klein_lora(make.save(tensors, bench.file))


def try_klein_unused(bench):
    # Of eight layers of the text encoder, the last two do nothing for an image.
    tensors = load_file(KLEIN / "lora.safetensors")
    more = {}
    for name, value in tensors.items():
        if name.startswith("text_encoder.model.layers.0."):
            more[name.replace("layers.0.", "layers.7.")] = value
    assert more
    with safetensors.safe_open(KLEIN / "lora.safetensors", "numpy") as opened:
        metadata = opened.metadata()
    file = make.save(tensors | more, bench.file, metadata)
    assert make.is_same(bench.klein_lora(file), bench.klein_lora(KLEIN / "lora.safetensors"))


# Some layers of a LoRA for other models: names, how much a layer reads, and how much it gives.
OTHER_LORAS = {
    "FLUX.1": [
        ("lora_unet_double_blocks_0_img_attn_qkv", 3072, 9216),
        ("lora_unet_double_blocks_0_img_mod_lin", 3072, 18432),
    ],
    "FLUX.2-klein-9B": [("diffusion_model.double_blocks.0.img_attn.qkv", 4096, 12288)],
    "FLUX.2-dev": [("transformer.single_transformer_blocks.0.attn.to_qkv_mlp_proj", 6144, 55296)],
    "Z-Image": [("diffusion_model.layers.0.attention.to_q", 3840, 3840)],
    "Stable Diffusion XL": [
        ("lora_unet_middle_block_1_transformer_blocks_0_attn2_to_k", 2048, 1280)
    ],
    "Stable Diffusion 1": [
        ("unet.mid_block.attentions.0.transformer_blocks.0.attn2.to_k", 768, 1280)
    ],
}


def save_other(file, model):
    tensors = {}
    for layer, inputs, outputs in OTHER_LORAS[model]:
        tensors[f"{layer}.lora_down.weight"] = np.ones((1, inputs), np.float16)
        tensors[f"{layer}.lora_up.weight"] = np.ones((outputs, 1), np.float16)
    return make.save(tensors, file)


def try_klein_other(bench):
    for model in OTHER_LORAS:
        with pytest.raises(ValueError, match=f"It was made for {model}: get one made for this"):
            bench.klein_lora(save_other(bench.file, model))
    for model in OTHER_LORAS:
        if model.startswith("FLUX"):
            with pytest.raises(ValueError, match=f"It was made for {model}: get one made for this"):
                bench.lora(save_other(bench.file, model))
    bench.lora(KLEIN / "lora.safetensors")


# New words.


def try_word(bench):
    vectors = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    for rows in (vectors[0], vectors[:1], vectors):
        params, config, tokenize = bench.word({"<cat-toy>": rows})
        number = rows.size // 64
        size = len(bench.params["text_encoder"][EMBEDDINGS])
        table = params["text_encoder"][EMBEDDINGS]
        assert np.array_equal(table[size:], rows.reshape(-1, 64))
        assert config.text[0].vocab_size == len(table)
        ids = tokenize(["a red <cat-toy> star"])[0, 0].tolist()
        plain = bench.tokenize(["a red star"])[0, 0].tolist()
        new = list(range(size, size + number))
        assert ids[: 5 + number] == [*plain[:3], *new, *plain[3:5]]


def try_emb_params(bench):
    _, _, tokenize = bench.word({"emb_params": np.ones((2, 64), np.float32)}, "toy.safetensors")
    size = len(bench.params["text_encoder"][EMBEDDINGS])
    assert tokenize(["toy"])[0, 0, 1:3].tolist() == [size, size + 1]


def try_xl_word(bench):
    first, second = (text.hidden_size for text in bench.xl_config.text)
    tensors = {
        "clip_l": np.ones((2, first), np.float32),
        "clip_g": np.zeros((2, second), np.float32),
    }
    params, config, tokenize = bench.word(tensors, xl=True, word="toy")
    sizes = [text.vocab_size for text in bench.xl_config.text]
    assert [text.vocab_size for text in config.text] == [size + 2 for size in sizes]
    assert (params["text_encoder"][EMBEDDINGS][-2:] == 1).all()
    assert (params["text_encoder_2"][EMBEDDINGS][-2:] == 0).all()
    ids = tokenize(["a toy"])[0]
    for row, size in zip(ids, sizes, strict=True):
        assert row[2:4].tolist() == [size, size + 1]


def try_onetrainer_word(bench):
    rows = np.arange(2 * 64, dtype=np.float32).reshape(2, 64)
    sentence = "which OneTrainer adds to the text encoder's answer: they are left out"
    for name in ("emb_params", "emp_params"):
        with pytest.warns(UserWarning, match=sentence):
            params, _, _ = bench.word({name: rows, f"{name}_out": rows + 1})
        assert np.array_equal(params["text_encoder"][EMBEDDINGS][-2:], rows)
    both = {"clip_l": rows, "clip_l_out": rows, "clip_g": rows + 1, "clip_g_out": rows}
    with pytest.warns(UserWarning, match=sentence):
        params, _, _ = bench.word(both, xl=True, word="toy")
    assert np.array_equal(params["text_encoder"][EMBEDDINGS][-2:], rows)
    assert np.array_equal(params["text_encoder_2"][EMBEDDINGS][-2:], rows + 1)
    with pytest.raises(ValueError, match="has 0 arrays with embeddings of words"):
        bench.word({"emb_params_out": rows})


def try_wrong_word(bench):
    with pytest.raises(ValueError, match="with text_encoder_2, and this one has text_encoder"):
        bench.word({"clip_g": np.ones((1, 64), np.float32)})
    with pytest.raises(ValueError, match="has a vector of"):
        bench.word({"toy": np.ones((1, 768), np.float32)})
    with pytest.raises(ValueError, match=r"has 78 vectors for a word, .* has room for 77 tokens"):
        bench.word({"toy": np.ones((78, 64), np.float32)})
    bench.word({"clip_l": np.ones((1, 64)), "clip_g": np.ones((1, 64))})


def try_pt_word(bench):
    words.read_embedding(bench.place / "toy.pt", bench.params, bench.config, bench.tokenize)


READERS = {
    "a LoRA": lambda bench: bench.lora(bench.file),
    "a LoRA for FLUX.2": lambda bench: bench.klein_lora(bench.file),
    "a model": lambda bench: convert.read_single_file(bench.file, bench.config),
    "a FLUX.2": lambda bench: flux2.read_single_file(bench.file, bench.klein_config),
    "a word": lambda bench: words.read_embedding(
        bench.file, bench.params, bench.config, bench.tokenize
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_far_too_large_is_refused_unread(bench, reader):
    """Such as a download that was given its size before its bytes: zeros, which take no disk."""
    make.save({"toy": np.ones((1, 64), np.float32)}, bench.file)
    for sentence in ("not fully covered", "damaged or no safetensors"):
        os.truncate(bench.file, 2**36)
        with pytest.raises(ValueError, match=sentence):
            READERS[reader](bench)
        bench.file.write_bytes(b"")  # from here on all of it is zeros


def test_a_word_of_more_vectors_than_memory_is_refused_unread(bench):
    header = {"toy": {"dtype": "F32", "shape": [2**30, 64], "data_offsets": [0, 2**38]}}
    text = json.dumps(header).encode()
    bench.file.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(bench.file, 8 + len(text) + 2**38)
    with pytest.raises(ValueError, match="has 1073741824 vectors for a word"):
        words.read_embedding(bench.file, bench.params, bench.config, bench.tokenize)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_of_file_reads_or_is_refused_by_a_sentence(bench, name):
    try_kind = globals()[f"try_{name.replace('-', '_')}"]
    sentence = KINDS[name].get("refused")
    if sentence is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is read with a warning that the list hides
            try_kind(bench)
        return
    with pytest.raises((FileNotFoundError, ValueError)) as refused:
        try_kind(bench)
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
