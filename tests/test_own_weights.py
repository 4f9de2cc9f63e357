"""Weights from anywhere, LoRA files, and drawing over images: as in PyTorch, and with bad input.

``python -m tests.makers.own_weights`` made what PyTorch says, with the LoRAs of
``tests.makers.loras``. It is compared without PyTorch.
"""

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import course.convert
import course.lora
import helpers.models
from course import sd
from course.model.files import FLOATS, Stored, read_safetensors, to_channels_first, unstack_layers
from course.model.lora import attach, merge
from course.sd import convert, edit, lora, samplers, vae
from helpers import bundled_checkpoint
from tests.makers import common
from tests.makers import files as make

SOURCES = {name: Path(bundled_checkpoint(name).source) for name in ("shapes-sd", "shapes-sdxl")}
SD = SOURCES["shapes-sd"]
UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"
TEXT = "text_encoder/model.safetensors"


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-own-weights.npz")


@pytest.fixture(scope="module")
def models():
    """Both bundled models: parameters, configuration, tokenizer."""
    return {name: sd.load(source) for name, source in SOURCES.items()}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """What `save` makes of the bundled checkpoint of Stable Diffusion 1."""
    folder = tmp_path_factory.mktemp("saved")
    sd.save(models["shapes-sd"][0], SD, folder)
    return folder


def same(params, others):
    """Whether two trees have the same numbers in the same dtypes."""

    def is_same(one, other):
        return one.dtype == other.dtype and np.array_equal(one, other)

    return jax.tree.all(jax.tree.map(is_same, params, others))


def assert_same_image(found, recorded):
    """Within 1 / 255 of what was recorded."""
    assert 255 * np.abs(np.asarray(found) - recorded / np.float32(65535)).max() < 1


# Folders.


@pytest.fixture(scope="module")
def saved_by_pytorch():
    """All but the numbers of folders that diffusers saved, by their files.

    Text is as it is. Of safetensors there are the header, and what all of it hashes to.
    """
    return common.read_json("pytorch-folders")


def hash_of(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_saved_is_what_pytorch_saves_and_is_read_again(
    models, saved_by_pytorch, name, tmp_path
):
    params, config, _ = models[name]
    sd.save(params, SOURCES[name], tmp_path)
    for place, content in saved_by_pytorch[f"{name} one file"].items():
        if place.endswith(".safetensors"):
            _, expected = content
            assert hash_of(tmp_path / place) == expected
    again, its_config, _ = sd.load(tmp_path)
    assert its_config == config
    assert same(again, params)
    assert not any('"Flax' in file.read_text() for file in tmp_path.rglob("*config.json"))


def test_what_is_saved_keeps_options_and_texts(models, folder, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folder, source, copy_function=os.link)
    options = {"add_watermarker": None, "requires_safety_checker": False}
    make.edit_json(source / "model_index.json", lambda index: index | options)
    words = {"Flaxfeld": 600, "grün": 601}
    make.edit_json(source / "tokenizer" / "vocab.json", lambda known: known | words)
    sd.save(models["shapes-sd"][0], source, tmp_path / "new")
    for name in ("model_index.json", "tokenizer/vocab.json", "scheduler/scheduler_config.json"):
        texts = [(place / name).read_text(encoding="utf-8") for place in (source, tmp_path / "new")]
        found, expected = map(json.loads, texts)
        assert found == expected


# How diffusers saved the bundled models: the dtype of the numbers, and the variant.
KINDS = {
    "one file": (np.float32, None),
    "variant fp16 in several files": (np.float16, "fp16"),
}


def write_safetensors(file, header, params):
    """Write a file anew from its header and the numbers."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little"))
        opened.write(header.encode())
        by_name = unstack_layers(params)
        for name in sorted(entries, key=lambda name: entries[name]["data_offsets"]):
            value = to_channels_first(name, by_name[name])
            opened.write(value.astype(FLOATS[entries[name]["dtype"]]).tobytes())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SOURCES)
def test_a_folder_that_pytorch_saved_gives_its_image(
    models, saved_by_pytorch, draw, recorded, name, kind, tmp_path
):
    bundled, bundled_config, _ = models[name]
    for place, content in saved_by_pytorch[f"{name} {kind}"].items():
        file = tmp_path / place
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            file.write_text(content)
        else:
            header, expected = content
            write_safetensors(file, header, bundled[file.parent.name])
            assert hash_of(file) == expected
    dtype, variant = KINDS[kind]
    params, config, _ = sd.load(tmp_path, variant=variant)
    rounded = jax.tree.map(lambda x: np.asarray(x, dtype).astype(np.float32), bundled)
    assert same(params, rounded)
    assert config.unet == bundled_config.unet
    key = name.removeprefix("shapes-")
    assert_same_image(draw(name, params), recorded[f"{key} {kind}" if variant else key])


def test_files_in_bfloat16_are_read_as_they_are(models, folder, tmp_path):
    params = jax.tree.map(lambda x: np.asarray(x, jnp.bfloat16), models["shapes-sd"][0])
    sd.save(params, folder, tmp_path)
    assert same(sd.load(tmp_path, jnp.bfloat16)[0], params)


def test_parameters_go_where_rules_say(folder):
    devices = jax.device_count()
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    places = sd.shardings(sd.read_config(folder), mesh, sd.FULLY_SHARDED)
    params, _, _ = sd.load(folder, sharding=places)
    for value, place in zip(jax.tree.leaves(params), jax.tree.leaves(places), strict=True):
        assert value.sharding.is_equivalent_to(place, value.ndim)
    weight = params["unet"]["conv_in.weight"]
    assert weight.addressable_shards[0].data.nbytes * devices == weight.nbytes
    held = sum(value.addressable_shards[0].data.nbytes for value in jax.tree.leaves(params))
    assert held < 1.1 / devices * sum(value.nbytes for value in jax.tree.leaves(params))
    everywhere = NamedSharding(mesh, P())
    params, _, _ = sd.load(folder, sharding=everywhere)
    assert all(value.sharding == everywhere for value in jax.tree.leaves(params))


def test_rules_that_do_not_fit_are_answered_by_a_sentence(folder):
    config = sd.read_config(folder)
    mesh = jax.make_mesh((5,), ("data",), devices=jax.devices()[:5])
    with pytest.raises(ValueError, match="no axis 'model': choose one of data"):
        sd.shardings(config, mesh, sd.TENSOR_PARALLEL)
    with pytest.raises(ValueError, match=r"and 5 devices do not divide \d+: choose another number"):
        sd.shardings(config, mesh, sd.FULLY_SHARDED)


def test_arrays_of_safetensors_stay_on_disk_and_metadata_comes_with_them(tmp_path):
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    save_file({"layer.weight": numbers}, tmp_path / "file.safetensors", metadata={"a": "b"})
    arrays, metadata = read_safetensors(tmp_path / "file.safetensors")
    assert metadata == {"a": "b"}
    assert isinstance(arrays["layer.weight"], Stored)
    assert arrays["layer.weight"].shape == (2, 3)
    assert np.array_equal(arrays["layer.weight"], numbers)


# The original layout.


@pytest.fixture(scope="module")
def configurations():
    found = {}
    for model, content in common.read_json("pytorch-names").items():
        found[model] = common.read_model(content["configurations"])
    return found


@pytest.mark.parametrize("model", ["sd", "sd21", "sdxl"])
def test_names_of_the_original_layout_are_those_that_diffusers_reads(configurations, model):
    for part, names in common.read_json("original-names")[model].items():
        for name, expected in names.items():
            assert list(convert.original_name(part, name, configurations[model])) == expected


def write_single_file(params, config, file):
    """Save parameters in the original layout."""
    return make.save(make.single_file(params, config), file)


def run_command(command, *arguments, status=0):
    assert command.main([*map(str, arguments)]) == status


@pytest.mark.parametrize("name", SOURCES)
def test_a_single_file_in_the_original_layout_is_converted(models, name, tmp_path, capsys):
    params, config, _ = models[name]
    file = tmp_path / "model.safetensors"
    write_single_file(params, config, file)
    run_command(course.convert, file, tmp_path / "new", "--like", SOURCES[name])
    assert f"unet {len(params['unet'])}" in capsys.readouterr().out
    assert same(sd.load(tmp_path / "new")[0], params)


# LoRAs.

BUNDLED = SD.parent / "loras"
LORAS = {
    "diffusers": BUNDLED / "blue-for-red.safetensors",
    "kohya": BUNDLED / "star-for-heart.safetensors",
    "xl": common.FIXTURES / "lora-random-xl.safetensors",
}
ARCHITECTURES = {"diffusers": "shapes-sd", "kohya": "shapes-sd", "xl": "shapes-sdxl"}
# With which of these diffusers drew, at which scales.
BOTH = {"diffusers": 0.7, "kohya": 0.9}
MIXTURES = [{"diffusers": 1.0}, {"diffusers": 0.5}, {"kohya": 0.8}, BOTH, {"xl": 1.0}]


@pytest.fixture(scope="module")
def loras(models):
    found = {}
    for name, file in LORAS.items():
        params, config, _ = models[ARCHITECTURES[name]]
        found[name] = lora.read_lora(file, params, config)
    return found


@pytest.fixture(scope="module")
def draw(models, loras, recorded):
    """A function that draws the recorded prompts, with LoRAs beside the weights at some scales."""
    latents = np.moveaxis(recorded["latents"], 1, -1)

    @functools.partial(jax.jit, static_argnames="config")
    def draw_with(params, config, loras, scales, ids, negative_ids):
        for name, pairs in loras.items():
            params = attach(params, pairs, scales[name])
        key = jax.random.key(0)
        inputs = ids, key, negative_ids, 10, 3.0, latents
        return sd.generate(params, config, *inputs, sampler="ddim")

    def draw(model, params, scales=None):
        _, config, tokenize = models[model]
        ids = tokenize([str(prompt) for prompt in recorded["prompts"]])
        # Stable Diffusion XL does without a negative prompt, as its pipeline does.
        negative_ids = None if config.is_xl else tokenize([""])
        its = {name: pairs for name, pairs in loras.items() if ARCHITECTURES[name] == model}
        scales = dict.fromkeys(its, 0.0) | (scales or {})
        return draw_with(params, config, its, scales, ids, negative_ids)

    return draw


@pytest.mark.parametrize("scales", MIXTURES, ids=str)
def test_loras_give_pytorchs_image_merged_and_beside_the_weights(
    models, loras, draw, recorded, scales
):
    model = ARCHITECTURES[next(iter(scales))]
    params = merged = models[model][0]
    for name, scale in scales.items():
        merged = merge(merged, loras[name], scale)
    key = model.removeprefix("shapes-")
    expected = recorded[f"{key} {json.dumps(scales)}"]
    assert_same_image(draw(model, merged), expected)
    assert_same_image(draw(model, params, scales), expected)
    without = recorded[key]
    assert np.abs(expected / 257 - without / 257).max() > 50, "one cannot see the LoRA"


def test_a_lora_for_xl_changes_both_text_encoders(loras):
    assert loras["xl"].keys() == {"unet", "text_encoder", "text_encoder_2"}


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_is_taken_out_again_to_rounding(models, loras, name):
    params = models[ARCHITECTURES[name]][0]
    back = merge(merge(params, loras[name], 0.8), loras[name], -0.8)
    for value, before in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert np.abs(value - before).max() <= 2e-7 * max(1, np.abs(before).max())


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_that_is_saved_is_read_again(models, loras, name, tmp_path):
    params, config, _ = models[ARCHITECTURES[name]]
    lora.save_lora(tmp_path / "new" / "lora.safetensors", loras[name], config, np.float32)
    assert same(lora.read_lora(tmp_path / "new" / "lora.safetensors", params, config), loras[name])


def test_kohyas_files_for_xl_may_name_the_unet_as_the_original_layout_does(models, loras, tmp_path):
    params, config, _ = models["shapes-sdxl"]
    theirs = {}
    for name in unstack_layers(params["unet"]):
        ours = name.removesuffix(".weight").replace(".", "_")
        original = convert.name_unet(name, config).removesuffix(".weight").replace(".", "_")
        theirs[f"lora_unet_{ours}"] = f"lora_unet_{original}"
    tensors = {}
    for name, value in load_file(LORAS["xl"]).items():
        layer, ending = name.split(".", 1)
        tensors[f"{theirs.get(layer, layer)}.{ending}"] = value
    assert any(name.startswith("lora_unet_input_blocks_") for name in tensors)
    save_file(tensors, tmp_path / "lora.safetensors")
    assert same(lora.read_lora(tmp_path / "lora.safetensors", params, config), loras["xl"])


def test_the_command_merges_files_into_a_folder(models, loras, folder, tmp_path, capsys):
    files = [f"{LORAS[name]}={scale}" for name, scale in BOTH.items()]
    run_command(course.lora, folder, tmp_path, *files)
    said = capsys.readouterr().out
    expected = models["shapes-sd"][0]
    for name, scale in BOTH.items():
        assert f"Added {LORAS[name]}, {scale} times" in said
        expected = merge(expected, loras[name], scale)
    assert same(sd.load(tmp_path)[0], expected)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_the_command_keeps_the_dtype_of_the_files(models, loras, tmp_path, monkeypatch, dtype):
    params, _, _ = models["shapes-sd"]
    source = tmp_path / "source"
    sd.save(params, SD, source, dtype)
    for file in source.rglob("*.safetensors"):
        file.rename(file.with_suffix(".half.safetensors"))
    inputs = source, tmp_path / "new", f"{LORAS['kohya']}=0.5", "--variant", "half"
    run_command(course.lora, *inputs)
    found = load_file(tmp_path / "new" / UNET)
    assert {value.dtype for value in found.values()} == {jnp.dtype(dtype)}
    rounded, _, _ = sd.load(source, variant="half")
    expected = merge(rounded, loras["kohya"], 0.5)["unet"]["conv_in.weight"]
    assert np.array_equal(
        found["conv_in.weight"], to_channels_first("conv_in.weight", expected.astype(dtype))
    )
    inputs = source, tmp_path / "new", LORAS["kohya"], "--variant", "half"  # at the scale of 1
    run_command(course.lora, *inputs, "--dtype", "float32")
    expected = merge(rounded, loras["kohya"], 1)["unet"]["conv_in.weight"]
    found = load_file(tmp_path / "new" / UNET)
    assert np.array_equal(found["conv_in.weight"], to_channels_first("conv_in.weight", expected))


def test_numbers_that_float16_does_not_have_are_not_saved_in_it(models, tmp_path):
    params, _, _ = models["shapes-sd"]
    name = "conv_in.bias"
    large = params | {"vae": params["vae"] | {f"encoder.{name}": jnp.full(32, 1e6)}}
    with pytest.raises(
        ValueError, match=r"encoder.conv_in.bias has numbers up to 1e\+06, too large"
    ):
        sd.save(large, SD, tmp_path, np.float16)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (course.convert, ["model.ckpt", "out", "--like", SD], "model.ckpt is a pickle"),
        (
            course.convert,
            ["model.safetensors", "out", "--like", "nowhere"],
            "nowhere is no folder, no Hub id",
        ),
        (course.lora, [SD, "out", "lora.bin=1"], "lora.bin is a pickle"),
    ],
)
def test_a_command_that_is_given_the_wrong_files_ends_in_a_sentence(
    command, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run_command(command, *arguments, status=1)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network"), OSError()])
def test_without_a_network_a_hub_id_ends_in_a_sentence(error, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(helpers.models, "snapshot_download", fail)
    message = "owner/name cannot be had, as the Hugging Face Hub cannot be reached"
    run_command(course.lora, "owner/name", "out", "lora.safetensors=1", status=1)
    assert message in capsys.readouterr().err
    run_command(course.convert, "file", "out", "--like", "owner/name", status=1)
    assert message in capsys.readouterr().err


def test_a_scale_that_is_no_number_is_refused_by_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command(course.lora, SD, "out", "lora.safetensors=much")
    assert "the scale of lora.safetensors is 'much': give a number" in capsys.readouterr().err


# Schedules that end in pure noise.


def test_a_schedule_that_ends_in_pure_noise_gives_pytorchs_image(models, recorded, any_sampler):
    params, config, tokenize = models["shapes-sd"]
    zero_snr = np.load(common.FIXTURES / "pytorch-zero-snr.npz")
    schedule = dataclasses.replace(
        config.schedule, rescale_betas_zero_snr=True, timestep_spacing="trailing"
    )
    config = dataclasses.replace(config, schedule=schedule)
    ids = tokenize([str(prompt) for prompt in recorded["prompts"]])
    latents = np.moveaxis(zero_snr["latents"], 1, -1)
    names = ["ddim", "euler", "dpm++"]

    @jax.jit
    def draw(params, which):
        inputs = ids, jax.random.key(0), tokenize([""]), int(zero_snr["steps"]), 3.0, latents
        with any_sampler(which, names):
            return sd.generate(params, config, *inputs, sampler="any")

    for which, name in enumerate(names):
        found = draw(params, which)
        expected = zero_snr[name] / np.float32(65535)
        assert 255 * np.abs(found - expected).max() < 0.05, name


# Drawing over images. By which samplers diffusers did it, and at which strengths:
STRENGTHS = {"shapes-sd": {"ddim": 0.6, "euler": 0.8, "dpm++": 1.0}, "shapes-sdxl": {"euler": 0.75}}
CAN_START_LATE = list(STRENGTHS["shapes-sd"])
DRAWN_OVER = [
    (model, sampler, strength)
    for model, strengths in STRENGTHS.items()
    for sampler, strength in strengths.items()
]


@pytest.fixture(scope="module")
def pictures(recorded):
    return recorded["pictures"] / np.float32(255)


@pytest.fixture(scope="module")
def draw_over(models, recorded, pictures, any_sampler):
    """A function that draws over the recorded pictures, by one program for all samplers."""
    latents = np.moveaxis(recorded["noise"], 1, -1)

    @functools.partial(jax.jit, static_argnames="config")
    def program(params, config, which, ids, negative_ids, strength, mask):
        inputs = params, config, ids, jax.random.key(0), negative_ids, pictures
        with any_sampler(which, CAN_START_LATE):
            options = {"sampler": "any", "latents": latents}
            if mask is None:
                return edit.image_to_image(*inputs, strength, 20, 3.0, **options)
            return edit.inpaint(*inputs, mask, strength, 20, 3.0, **options)

    def draw_over(model, sampler, strength, mask=None):
        params, config, tokenize = models[model]
        edit.check_inputs(config, pictures, strength, mask)
        ids = tokenize([str(prompt) for prompt in recorded["picture prompts"]])
        negative_ids = None if config.is_xl else tokenize([""])
        which = CAN_START_LATE.index(sampler)
        return program(params, config, which, ids, negative_ids, strength, mask)

    return draw_over


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_image_to_image_gives_pytorchs_image(draw_over, recorded, model, sampler, strength):
    found = draw_over(model, sampler, strength)
    assert_same_image(found, recorded[f"{model} image to image {sampler} {strength}"])


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_inpainting_gives_pytorchs_image(draw_over, recorded, model, sampler, strength):
    found = draw_over(model, sampler, strength, recorded["mask"])
    assert_same_image(found, recorded[f"{model} inpainting {sampler} {strength}"])


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(p, config, images):
    mean, _ = vae.encode(p, config, images)
    return vae.decode(p, config, mean)


@pytest.mark.parametrize(("model", "sampler", "strength"), DRAWN_OVER)
def test_far_from_the_mask_inpainting_leaves_the_picture(
    draw_over, models, recorded, pictures, model, sampler, strength
):
    params, config, _ = models[model]
    found = draw_over(model, sampler, strength, recorded["mask"])
    by_the_vae_alone = there_and_back(params["vae"], config.vae, pictures)
    far = np.ones((64, 64), bool)
    far[8:, 8:] = False  # pixels 16 to 56 are drawn, in whole latents; and one latent around
    error = 255 * np.abs(found - pictures)[:, far].mean()
    own_error = 255 * np.abs(by_the_vae_alone - pictures)[:, far].mean()
    assert error < own_error + 0.5


IMAGES = np.full((1, 64, 64, 3), 0.5, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": IMAGES[:, 1:]}, "has 63 × 64 pixels: resize it to multiples of 16"),
        ({"images": IMAGES * 255}, "divide bytes by 255"),
        ({"images": IMAGES * np.nan}, "go from nan to nan"),
        ({"images": np.ones((1, 64, 64, 4))}, r"images have the shape \(1, 64, 64, 4\)"),
        ({"images": IMAGES[0]}, r"images have the shape \(64, 64, 3\)"),
        ({"strength": 1.5}, "strength is 1.5: choose 0 to 1"),
        ({"strength": -0.1}, "strength is -0.1"),
        ({"strength": float("nan")}, "strength is nan"),
        ({"mask": np.ones((32, 32))}, r"mask has the shape \(32, 32\)"),
    ],
)
def test_what_cannot_be_drawn_over_is_refused_in_a_sentence(models, changes, message):
    _, config, _ = models["shapes-sd"]
    inputs = {"images": IMAGES, "strength": 0.5} | changes
    with pytest.raises(ValueError, match=message):
        edit.check_inputs(config, **inputs)


def test_pndm_does_not_start_in_the_middle(models):
    _, config, _ = models["shapes-sd"]
    latents = jnp.zeros((1, 8, 8, 4))
    with pytest.raises(ValueError, match="'pndm' cannot start from an image: choose ddim"):
        samplers.sample(None, config.schedule, latents, 5, "pndm", image=latents)


# Bad files. Each of these functions spoils a folder whose files are links: it replaces them.


def missing(name):
    return lambda folder: (folder / name).unlink()


def replaced(name, change):
    """Replace a file by what ``change`` makes of its bytes."""

    def spoil(folder):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(change(data))

    return spoil


def rewritten(name, change):
    """Replace a file by what ``change`` makes of its tensors."""

    def spoil(folder):
        tensors = change(load_file(folder / name))
        (folder / name).unlink()
        save_file(tensors, folder / name)

    return spoil


def renamed(name, new_name):
    return lambda folder: (folder / name).rename((folder / name).with_name(new_name))


INDEX = "diffusion_pytorch_model.safetensors.index.json"
SHARDS = [f"diffusion_pytorch_model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def split_up(folder):
    """Put the UNet's tensors into three files, with an index, as diffusers does."""
    tensors = load_file(folder / UNET)
    names = sorted(tensors)
    places = {}
    for n, shard in enumerate(SHARDS):
        part = names[n::3]
        save_file({name: tensors[name] for name in part}, folder / "unet" / shard)
        places |= dict.fromkeys(part, shard)
    (folder / "unet" / INDEX).write_text(json.dumps({"weight_map": places}))
    (folder / UNET).unlink()


def without_a_shard(folder):
    split_up(folder)
    (folder / "unet" / SHARDS[1]).unlink()


def with_half_an_index(folder):
    split_up(folder)
    index = folder / "unet" / INDEX
    places = json.loads(index.read_text())["weight_map"]
    only_first = {name: shard for name, shard in places.items() if shard == SHARDS[0]}
    index.write_text(json.dumps({"weight_map": only_first}))


def with_a_damaged_index(folder):
    split_up(folder)
    index = folder / "unet" / INDEX
    index.write_text(index.read_text()[:99])


def with_a_different_part(folder):
    shutil.copyfile(folder / VAE, folder / "copy")
    (folder / "copy").replace(folder / UNET)


def with_two_arrays_in_one_place(data):
    """A safetensors file whose first array is in its header under a second name, too."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["again"] = next(entry for name, entry in header.items() if name != "__metadata__")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def test_a_folder_with_several_files_is_read(models, folder, tmp_path):
    shutil.copytree(folder, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    split_up(tmp_path)
    assert same(sd.load(tmp_path)[0], models["shapes-sd"][0])


BIAS = "conv_in.bias"
XL_UNET_CONFIG = (SOURCES["shapes-sdxl"] / "unet" / "config.json").read_bytes()
BAD_FOLDERS = {
    "no index": (
        missing("model_index.json"),
        "model_index.json is missing: give a whole folder",
    ),
    "an index that is no JSON": (
        replaced("model_index.json", lambda data: data[:50]),
        "model_index.json is damaged, or no JSON: .* Get it again",
    ),
    "an index that is no UTF-8": (
        replaced("model_index.json", lambda data: b"{\xff}"),
        "model_index.json is damaged, or no text",
    ),
    "an index that is a list": (
        replaced("model_index.json", lambda data: b"[]"),
        "model_index.json is no object with names and values",
    ),
    "an index without a unet": (
        replaced("model_index.json", lambda data: data.replace(b"unet", b"net")),
        "not a whole folder.*names no class for 'unet'",
    ),
    "an index with a part that is null": (
        replaced("model_index.json", lambda data: data.replace(b'"UNet2DConditionModel"', b"null")),
        "not a whole folder",
    ),
    "a different pipeline": (
        replaced(
            "model_index.json",
            lambda data: data.replace(b"StableDiffusionPipeline", b"FluxPipeline"),
        ),
        "is for FluxPipeline: this model reads",
    ),
    "no configuration": (missing("unet/config.json"), "unet/config.json is missing"),
    "no merges": (missing("tokenizer/merges.txt"), "merges.txt is missing: give a whole folder"),
    "a tokenizer without an end token": (
        replaced("tokenizer/tokenizer_config.json", lambda data: data.replace(b"eos_", b"old_")),
        "tokenizer_config.json does not say what eos_token is: download",
    ),
    "no vocabulary": (missing("tokenizer/vocab.json"), "vocab.json is missing"),
    "no file": (
        missing(UNET),
        "unet has no parameters that can be read, but nothing: get safetensors",
    ),
    "only a pickle": (
        renamed(UNET, "diffusion_pytorch_model.bin"),
        "model.bin: get safetensors; .* a pickle, which can run any program",
    ),
    "only a variant": (
        renamed(UNET, "diffusion_pytorch_model.fp16.safetensors"),
        "but .*fp16.safetensors: give the variant",
    ),
    "half a file": (
        replaced(UNET, lambda data: data[: len(data) // 2]),
        "damaged or no safetensors: .* file not fully covered",
    ),
    "a page in place of a file": (
        replaced(TEXT, lambda data: b"<html>Log in, please</html>"),
        "is a web page, as sites give it",
    ),
    "more bytes than arrays": (
        replaced(UNET, lambda data: data + b"more"),
        "damaged or no safetensors: .* file not fully covered",
    ),
    "two arrays in one place": (
        replaced(UNET, with_two_arrays_in_one_place),
        "damaged or no safetensors: .* invalid offset",
    ),
    "an empty file": (replaced(UNET, lambda data: b""), "no safetensors"),
    "a wrong header": (replaced(UNET, lambda data: data[:8] + b"#" + data[9:]), "no safetensors"),
    "a missing shard": (without_a_shard, "00002-of-00003.safetensors is missing"),
    "half an index of shards": (
        with_half_an_index,
        "unet has nothing for .*, and its configuration means",
    ),
    "a damaged index of shards": (
        with_a_damaged_index,
        "index.json is damaged, or no JSON",
    ),
    "a parameter too many": (
        rewritten(UNET, lambda tensors: tensors | {"more": tensors[BIAS]}),
        "for more, and .* means nothing",
    ),
    "a parameter too few": (
        rewritten(UNET, lambda tensors: {name: tensors[name] for name in tensors.keys() - {BIAS}}),
        "has nothing for conv_in.bias",
    ),
    "a different shape": (
        rewritten(UNET, lambda tensors: tensors | {BIAS: tensors[BIAS][:-1]}),
        r"has \(95,\) for conv_in.bias, and its configuration means \(96,\)",
    ),
    "a configuration of a different architecture": (
        replaced("unet/config.json", lambda data: XL_UNET_CONFIG),
        "not a whole folder.*text_encoder_2",
    ),
    "a different part": (with_a_different_part, "unet has"),
    "whole numbers": (
        rewritten(UNET, lambda tensors: tensors | {BIAS: tensors[BIAS].astype(np.int8)}),
        "numbers as I8: get float32",
    ),
}


@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_a_sentence(folder, tmp_path, how):
    spoil, message = BAD_FOLDERS[how]
    shutil.copytree(folder, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    spoil(tmp_path)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as refused:
        sd.load(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "fp16"}, "give the variant .*, which is fp16 now"),
        ({"dtype": jnp.float16}, "The dtype is float16: choose float32, or bfloat16"),
    ],
    ids=str,
)
def test_a_bad_choice_is_refused_in_a_sentence(folder, options, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        sd.load(folder, **options)


def only_first_halves_cut(tensors):
    """Of each pair, the first matrix with a row less."""
    return {name: value[:2] if "lora_A" in name else value for name, value in tensors.items()}


def other_widths(tensors):
    return {name: value[:, :-1] if "lora_A" in name else value for name, value in tensors.items()}


def without_some_halves(tensors):
    return {name: value for name, value in tensors.items() if "attn1.to_q.lora_B" not in name}


def with_more(ending, value):
    """Give one layer another array."""

    def change(tensors):
        layer = next(iter(tensors)).split(".lora")[0]
        return tensors | {f"{layer}.{ending}": value}

    return change


BAD_LORAS = {
    "of a different model": (
        lambda tensors: load_file(LORAS["xl"]),
        "fit nothing in this model: lora_te1",
    ),
    "half of a pair": (without_some_halves, "of which only one half is there"),
    "no LoRA": (lambda tensors: {BIAS: np.zeros(3, np.float32)}, "fit nothing .*: conv_in.bias"),
    "of a model with other widths": (other_widths, "get one made for it"),
    "halves that do not fit each other": (only_first_halves_cut, "of two ranks: get it again"),
    "an alpha that is not one number": (
        with_more("alpha", np.ones(2, np.float32)),
        "fit nothing in this model: .*alpha",
    ),
    "a scale of DoRA": (with_more("dora_scale", np.ones((1, 4), np.float32)), "dora_scale"),
}


@pytest.mark.parametrize("how", BAD_LORAS)
def test_a_lora_that_does_not_fit_is_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    change, message = BAD_LORAS[how]
    tensors = change(load_file(LORAS["diffusers"]))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(tensors, tmp_path / "lora.safetensors")
    with pytest.raises(ValueError, match=message):
        lora.read_lora(tmp_path / "lora.safetensors", params, config)


def test_a_file_that_is_no_whole_lora_is_refused_in_a_sentence(models, tmp_path):
    params, config, _ = models["shapes-sd"]
    data = LORAS["diffusers"].read_bytes()
    (tmp_path / "half.safetensors").write_bytes(data[: len(data) // 2])
    tensors = load_file(LORAS["diffusers"])
    options = {"lora_adapter_metadata": "{"}
    save_file(tensors, tmp_path / "options.safetensors", metadata=options)
    for name, message in {
        "lora.pt": "is a pickle",
        "nothing.safetensors": "is missing",
        "half.safetensors": "damaged or no safetensors",
        "options.safetensors": "options of PEFT that are damaged",
    }.items():
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            lora.read_lora(tmp_path / name, params, config)


BAD_SINGLE_FILES = {
    "a part of it": (
        lambda tensors: {name: tensors[name] for name in tensors if "first_stage" not in name},
        "no vae",
    ),
    "of a larger model": (
        lambda tensors: (
            tensors | {"model.diffusion_model.input_blocks.99.0.op.bias": np.zeros(3, np.float32)}
        ),
        "1 names too many",
    ),
    "with other widths": (
        lambda tensors: tensors | {"model.diffusion_model.out.2.bias": np.zeros(3, np.float32)},
        "and the model of unet has",
    ),
}


@pytest.mark.parametrize("how", BAD_SINGLE_FILES)
def test_a_bad_single_file_is_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    change, message = BAD_SINGLE_FILES[how]
    file = tmp_path / "model.safetensors"
    write_single_file(params, config, file)
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=message):
        convert.read_single_file(file, config)
