"""Safetensors and folders in diffusers' format: as PyTorch writes them, and spoiled.

``python -m tests.makers.own_weights`` recorded folders that diffusers saved.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from course import sd
from course.model.files import FLOATS, Stored, read_safetensors, to_channels_first, unstack_layers
from helpers import bundled_checkpoint
from tests.makers import common
from tests.makers import files as make

SOURCES = {name: Path(bundled_checkpoint(name).source) for name in ("shapes-sd", "shapes-sdxl")}
SD = SOURCES["shapes-sd"]
UNET = "unet/diffusion_pytorch_model.safetensors"
VAE = "vae/diffusion_pytorch_model.safetensors"


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
    assert make.is_same(again, params)
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
def test_a_folder_that_pytorch_saved_is_read_to_the_last_bit(
    models, saved_by_pytorch, name, kind, tmp_path
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
    assert make.is_same(params, rounded)
    schedule = dataclasses.replace(bundled_config.schedule, sampler="ddim")  # which they drew with
    assert config == dataclasses.replace(bundled_config, schedule=schedule)


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


def test_numbers_that_float16_does_not_have_are_not_saved_in_it(models, tmp_path):
    params, _, _ = models["shapes-sd"]
    name = "conv_in.bias"
    large = params | {"vae": params["vae"] | {f"encoder.{name}": jnp.full(32, 1e6)}}
    with pytest.raises(
        ValueError, match=r"encoder.conv_in.bias has numbers up to 1e\+06, too large"
    ):
        sd.save(large, SD, tmp_path, np.float16)


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


def without_a_length(folder):
    file = folder / "tokenizer" / "tokenizer_config.json"
    make.edit_json(file, lambda settings: settings | {"model_max_length": None})


def renamed(name, new_name):
    return lambda folder: (folder / name).rename((folder / name).with_name(new_name))


SHARD = "diffusion_pytorch_model-0000{}-of-00003.safetensors"
INDEX = f"{UNET}.index.json"


def split_up(folder):
    """Put the UNet's tensors into three files, with an index, as diffusers does."""
    make.save_in_parts(load_file(folder / UNET), folder / "unet", "diffusion_pytorch_model", 3)
    (folder / UNET).unlink()


def without_a_shard(folder):
    split_up(folder)
    (folder / "unet" / SHARD.format(2)).unlink()


def without_an_index(folder):
    split_up(folder)
    (folder / INDEX).unlink()


def with_half_an_index(folder):
    split_up(folder)
    index = folder / INDEX
    places = json.loads(index.read_text())["weight_map"]
    only_first = {name: shard for name, shard in places.items() if shard == SHARD.format(1)}
    index.write_text(json.dumps({"weight_map": only_first}))


def with_a_damaged_index(folder):
    split_up(folder)
    index = folder / INDEX
    index.write_text(index.read_text()[:99])


def with_a_different_part(folder):
    shutil.copyfile(folder / VAE, folder / "copy")
    (folder / "copy").replace(folder / UNET)


BIAS = "conv_in.bias"
XL_UNET_CONFIG = (SOURCES["shapes-sdxl"] / "unet" / "config.json").read_bytes()
REFUSALS = {
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
    "an index without a pipeline": (
        replaced("model_index.json", lambda data: data.replace(b"_class_name", b"_name")),
        "not a whole folder.*does not say for which pipeline it is",
    ),
    "an index with a part that is null": (
        replaced("model_index.json", lambda data: data.replace(b'"UNet2DConditionModel"', b"null")),
        "not a whole folder",
    ),
    "no configuration": (missing("unet/config.json"), "unet/config.json is missing"),
    "no merges": (missing("tokenizer/merges.txt"), "merges.txt is missing: give a whole folder"),
    "a tokenizer without an end token": (
        replaced("tokenizer/tokenizer_config.json", lambda data: data.replace(b"eos_", b"old_")),
        "tokenizer_config.json does not say what eos_token is: download",
    ),
    "a tokenizer with a length that is null": (
        without_a_length,
        "tokenizer_config.json has None for model_max_length, which is no number: download",
    ),
    "merges of one word": (
        replaced("tokenizer/merges.txt", lambda data: data + b"one\n"),
        "tokenizer holds no tokenizer of CLIP: .*merges.* Get it again",
    ),
    "merges of three words": (
        replaced("tokenizer/merges.txt", lambda data: data + b"one two three\n"),
        "tokenizer holds no tokenizer of CLIP: .*merges.* Get it again",
    ),
    "a vocabulary without numbers": (
        replaced("tokenizer/vocab.json", lambda data: b'{"a": "b"}'),
        "tokenizer holds no tokenizer of CLIP: .*vocab.* Get it again",
    ),
    "no vocabulary": (missing("tokenizer/vocab.json"), "vocab.json is missing"),
    "no file": (
        missing(UNET),
        "unet has no parameters that can be read, but nothing: get safetensors",
    ),
    "only a variant": (
        renamed(UNET, "diffusion_pytorch_model.fp16.safetensors"),
        "but .*fp16.safetensors: give the variant in its files' names\\.",
    ),
    "half a file": (
        replaced(UNET, lambda data: data[: len(data) // 2]),
        "damaged or no safetensors: .* file not fully covered",
    ),
    "an empty file": (replaced(UNET, lambda data: b""), "no safetensors"),
    "a missing shard": (without_a_shard, "00002-of-00003.safetensors is missing"),
    "no index of shards": (
        without_an_index,
        "but .*00003-of-00003.safetensors: their index .* is missing, so download the folder again",
    ),
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


@pytest.mark.parametrize("how", REFUSALS)
def test_a_bad_folder_is_refused_in_a_sentence(folder, tmp_path, how):
    spoil, message = REFUSALS[how]
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
