"""Safetensors and folders in diffusers' format: as PyTorch writes them, and spoiled.

``python -m tests.makers.own_weights`` recorded folders that diffusers saved.
"""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import stat
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from course import sd
from course.model.files import (
    Stored,
    check_finite,
    read_json,
    read_safetensors,
    to_files,
    write_json,
)
from course.sd import words
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
            make.write_by_header(file, header, to_files(bundled[file.parent.name]))
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
    with pytest.raises(ValueError, match=r"written as .*vae.* in encoder.conv_in.bias .* NaN"):
        sd.save(
            params | {"vae": large["vae"] | {f"encoder.{name}": jnp.full(32, jnp.nan)}},
            SD,
            tmp_path,
        )


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float32, np.float64])
def test_numbers_are_finite_or_not_in_all_dtypes(dtype):
    limits = jnp.finfo(dtype)
    check_finite("file", "name", np.array([limits.min, limits.tiny, 0, limits.max], dtype))
    check_finite("file", "name", np.zeros(0, dtype))
    for number in (np.nan, np.inf, -np.inf):
        with pytest.raises(ValueError, match="file has numbers in name that are infinite or NaN"):
            check_finite("file", "name", np.array([[0, number]], dtype))


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_are_written_with_the_mode_that_the_user_gives_new_files(models, tmp_path, mask):
    params, _, _ = models["shapes-sd"]
    before = os.umask(mask)
    try:
        sd.save(params, SD, tmp_path)
        words.save_word(tmp_path / "lora.safetensors", "toy", np.ones(64))
    finally:
        os.umask(before)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o666 & ~mask}


def test_what_is_written_replaces_what_was_there(models, tmp_path):
    """Flax' weights, other variants and several files, which would be read in its place."""
    params, _, _ = models["shapes-sd"]
    shutil.copytree(SD, tmp_path, dirs_exist_ok=True)
    unet = tmp_path / "unet"
    make.save_in_parts({"old": np.ones(3)}, unet, "diffusion_pytorch_model", 2)
    others = "diffusion_pytorch_model.bin", "diffusion_pytorch_model.fp16.safetensors", "notes.md"
    for name in others:
        (unet / name).write_bytes(b"old")
    (tmp_path / "tokenizer" / "added_tokens.json").write_text("{}")
    sd.save(params, SD, tmp_path)
    assert sorted(file.name for file in unet.iterdir()) == [
        "config.json",
        "diffusion_pytorch_model.safetensors",
        "notes.md",
    ]
    assert not list(tmp_path.rglob("*.msgpack"))
    assert not (tmp_path / "tokenizer" / "added_tokens.json").exists()


def with_another_part(name):
    """Let the index name one more part, whose folder is there."""

    def spoil(folder):
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "file.json").write_text("{}")
        part = {name: ["transformers", "CLIPTokenizer"]}
        make.edit_json(folder / "model_index.json", lambda index: index | part)

    return spoil


def with_a_link(name):
    """Put a link in place of a file or folder, to one outside of the folder."""

    def spoil(folder):
        outside = folder.with_name(f"{folder.name}-outside")
        shutil.rmtree(outside, ignore_errors=True)
        if (folder / name).exists():
            shutil.move(folder / name, outside)
        else:
            outside.write_text("{}")
        (folder / name).symlink_to(outside)

    return spoil


# What a stranger's folder may do to whoever copies it.
TRICKS = {
    "a part outside": (with_another_part("tokenizer/../../outside"), "small letters, digits and _"),
    "a part in a part": (with_another_part("tokenizer_2/x"), "small letters, digits and _"),
    "a part of other letters": (with_another_part("tokenizer_é"), "small letters, digits and _"),
    "a link among texts": (with_a_link("tokenizer/more.json"), "more.json' is outside of"),
    "a link to a part": (with_a_link("tokenizer"), "tokenizer' is outside of"),
    "a link to a configuration": (with_a_link("unet/config.json"), "config.json' is outside of"),
    "a link to the index": (with_a_link("model_index.json"), "model_index.json' is outside of"),
}


@pytest.mark.parametrize("how", TRICKS)
def test_a_folder_that_reaches_out_of_itself_is_not_copied(models, folder, tmp_path, how):
    trick, message = TRICKS[how]
    source = shutil.copytree(folder, tmp_path / "source", copy_function=os.link)
    trick(source)
    (tmp_path / "new").mkdir()
    before = set(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        sd.save(models["shapes-sd"][0], source, tmp_path / "new" / "model")
    new = set(tmp_path.rglob("*")) - before
    assert all(file.is_relative_to(tmp_path / "new" / "model") for file in new)


def test_a_text_that_is_far_too_large_is_not_copied(models, folder, tmp_path):
    source = shutil.copytree(folder, tmp_path / "source", copy_function=os.link)
    (source / "tokenizer" / "notes.txt").touch()
    os.truncate(source / "tokenizer" / "notes.txt", 2**36)
    with pytest.raises(ValueError, match=r"notes\.txt has 68719 MB, which no such text has"):
        sd.save(models["shapes-sd"][0], source, tmp_path / "new")


def test_a_full_disk_is_named_and_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    def fill(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = tmp_path / "a.json"
    write_json(file, {"is": "old"})
    monkeypatch.setattr(os, "fsync", fill)
    with pytest.raises(
        OSError, match=r"a\.json cannot be written \(No space left on device\): make room, or give"
    ):
        write_json(file, {"is": "new"})
    assert list(tmp_path.iterdir()) == [file]
    assert read_json(file) == {"is": "old"}


def test_links_in_the_folder_that_is_written_are_not_followed(models, tmp_path):
    params, _, _ = models["shapes-sd"]
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    for name in ("vocab.json", f"vocab.json.{os.getpid()}.unfinished"):
        (tmp_path / "new" / "tokenizer").mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / "tokenizer" / name).symlink_to(victim)
    sd.save(params, SD, tmp_path / "new")
    assert victim.read_text() == "as it was"
    shutil.rmtree(tmp_path / "new" / "unet")
    (tmp_path / "outside").mkdir()
    (tmp_path / "new" / "unet").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="unet' is outside of"):
        sd.save(params, SD, tmp_path / "new")
    assert not list((tmp_path / "outside").iterdir())


def to_the_hubs_cache(folder, cache):
    """Make a snapshot of links to blobs of a folder, as the Hub's client does."""
    snapshot = cache / "models--owner--name" / "snapshots" / "0123abc"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.rglob("*.*"))):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    return snapshot


def test_the_hubs_cache_is_read_and_copied_and_a_link_to_nothing_is_named(models, folder, tmp_path):
    snapshot = to_the_hubs_cache(folder, tmp_path)
    params, _, _ = sd.load(snapshot)
    assert make.is_same(params, models["shapes-sd"][0])
    sd.save(params, snapshot, tmp_path / "new")
    assert make.is_same(sd.load(tmp_path / "new")[0], params)
    for name in (UNET, "tokenizer/vocab.json", "model_index.json"):
        (snapshot / name).resolve().unlink()
        with pytest.raises(FileNotFoundError, match=r"is a link to .*, and nothing is there"):
            sd.load(snapshot)


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


def own_copy(file):
    """The same file, without a link to that of another folder."""
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data)
    return file


def without_end(name, size=10**9):
    """Let a file have zeros behind it, which take no room on the disk."""
    return lambda folder: os.truncate(own_copy(folder / name), size)


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


def with_shards_at(place):
    """Give the UNet an index whose files are there."""

    def spoil(folder):
        (folder / UNET).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"conv_in.bias": place}}))

    return spoil


def flax_weights(change):
    """Put Flax' weights in place of the UNet's, spoiled."""

    def spoil(folder):
        (folder / UNET).unlink()
        name = "unet/diffusion_flax_model.msgpack"
        (folder / name).write_bytes(change((SD / name).read_bytes()))

    return spoil


def with_option(name, **options):
    return lambda folder: make.edit_json(folder / name, lambda content: content | options)


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
    "noise of which nothing is left": (
        with_option("scheduler/scheduler_config.json", beta_end=2.0),
        r"whose noise goes from beta_start = .* to beta_end = 2\.0, which has to be more",
    ),
    "a pipe in place of weights": (
        lambda folder: [
            (folder / UNET).unlink(),
            os.mkfifo(folder / "unet" / "diffusion_flax_model.msgpack"),
        ],
        r"diffusion_flax_model\.msgpack is missing, or no file: download",
    ),
    "a text without end": (
        without_end("unet/config.json"),
        "unet/config.json has 1000 MB, which no such text has: get it again",
    ),
    "an index without end": (
        without_end("model_index.json"),
        "model_index.json has 1000 MB, which no such text has: get it again",
    ),
    "merges without end": (
        without_end("tokenizer/merges.txt"),
        "merges.txt has 1000 MB, which no such text has: get it again",
    ),
    "a file with zeros without end": (
        without_end(UNET, 2**36),
        "damaged or no safetensors: .* not fully covered",
    ),
    "no configuration": (missing("unet/config.json"), "unet/config.json is missing"),
    "no merges": (missing("tokenizer/merges.txt"), "merges.txt is missing: give a whole folder"),
    "a tokenizer without an end token": (
        replaced("tokenizer/tokenizer_config.json", lambda data: data.replace(b"eos_", b"old_")),
        "tokenizer_config.json does not say what eos_token is: download",
    ),
    "a tokenizer with a length that is null": (
        with_option("tokenizer/tokenizer_config.json", model_max_length=None),
        "has None for model_max_length, which is no number of tokens: download",
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
        "unet has no parameters that can be read, but nothing: download the folder again",
    ),
    "two variants": (
        lambda folder: (
            [
                shutil.copyfile(folder / UNET, (folder / UNET).with_suffix(f".{name}.safetensors"))
                for name in ("fp16", "bf16")
            ]
            and (folder / UNET).unlink()
        ),
        "but .*fp16.safetensors: give the variant in its files' names\\.",
    ),
    "no merge": (
        replaced("tokenizer/merges.txt", lambda data: b"#version: 0.2\n"),
        "tokenizer holds no tokenizer of CLIP: it has no merges, .* Get it again",
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
    "a file that is outside": (with_a_link(UNET), "is outside of .*, which may only use files of"),
    "a configuration that is outside": (with_a_link("vae/config.json"), "is outside of"),
    "a part that is outside": (with_a_link("text_encoder"), "is outside of"),
    "shards above": (with_shards_at("../x.safetensors"), "names '../x.safetensors', .* beside it"),
    "shards anywhere": (with_shards_at("/x.safetensors"), "names '/x.safetensors', .* beside it"),
    "shards without names": (with_shards_at(3), "index.json names 3, which is no file beside it"),
    "shards of nothing": (with_shards_at(""), "index.json names '', which is no file beside it"),
    "no number": (
        rewritten(UNET, lambda tensors: make.spoiled(tensors, BIAS, np.nan)),
        f"{UNET} has numbers in .*bias that are infinite or NaN",
    ),
    "half Flax' weights": (flax_weights(lambda data: data[:5000]), "holds no parameters of Flax"),
    "a web page for Flax' weights": (flax_weights(lambda data: b"<html>"), "is a web page"),
    "zeros in place of Flax' weights": (
        flax_weights(lambda data: b"\0" * len(data)),
        "holds no parameters of Flax",
    ),
    "zeros without end behind Flax' weights": (
        lambda folder: [
            flax_weights(lambda data: data)(folder),
            os.truncate(folder / "unet" / "diffusion_flax_model.msgpack", 2**36),
        ],
        r"has 68719\.5 MB, and its configuration means at most \d+\.\d MB: get both from the same",
    ),
    "text in place of Flax' weights": (
        flax_weights(lambda data: msgpack_serialize({"conv": {"kernel": "x"}})),
        "holds no parameters of Flax",
    ),
    "whole numbers": (
        rewritten(UNET, lambda tensors: tensors | {BIAS: tensors[BIAS].astype(np.int8)}),
        "numbers as I8: get float32",
    ),
}


# Options that no model has, or that would fill the memory.
UNET_CONFIG, TEXT_CONFIG = "unet/config.json", "text_encoder/config.json"
OPTIONS = [
    (UNET_CONFIG, {"layers_per_block": 10**7}, "layers_per_block = 10000000, which"),
    (UNET_CONFIG, {"layers_per_block": 0}, "layers_per_block = 0, which"),
    (UNET_CONFIG, {"layers_per_block": 1.5}, "layers_per_block = 1.5, which"),
    (UNET_CONFIG, {"layers_per_block": "2"}, "layers_per_block = '2', which"),
    (UNET_CONFIG, {"norm_eps": float("inf")}, "norm_eps = inf, which"),
    (UNET_CONFIG, {"block_out_channels": [8] * 10**6}, r"\[8, 8, 8, 8, 8, 8, \.\.\.\], which"),
    (UNET_CONFIG, {"block_out_channels": []}, r"block_out_channels = \[\], which"),
    (UNET_CONFIG, {"down_block_types": ["DownBlock2D"]}, "does not fit widths of 96"),
    (UNET_CONFIG, {"norm_num_groups": 7}, "norm_num_groups = 7, which does not fit widths"),
    (UNET_CONFIG, {"attention_head_dim": [5, 5]}, "attention_head_dim = .* does not fit widths"),
    (TEXT_CONFIG, {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000, which"),
    (TEXT_CONFIG, {"vocab_size": True}, "vocab_size = True, which"),
    (TEXT_CONFIG, {"vocab_size": 100}, "tokens up to number 597, .* means 100 of them"),
    (TEXT_CONFIG, {"num_attention_heads": 7}, "num_attention_heads = 7, which does not fit"),
    ("vae/config.json", {"scaling_factor": float("nan")}, "scaling_factor = nan, which"),
    ("vae/config.json", {"scaling_factor": 0}, "scaling_factor = 0, which"),
    ("scheduler/scheduler_config.json", {"num_train_timesteps": 10**12}, "1000000000000, which"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": -3}, "which is no number of tokens"),
    ("tokenizer/tokenizer_config.json", {"model_max_length": np.nan}, "which is no number of"),
]


@pytest.mark.parametrize(("name", "options", "message"), OPTIONS, ids=lambda x: str(x)[:40])
def test_options_that_no_model_has_are_refused(folder, tmp_path, name, options, message):
    shutil.copytree(folder, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    with_option(name, **options)(tmp_path)
    with pytest.raises(ValueError, match=message):
        sd.load(tmp_path)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "\u202eweight", "a" * 501])
def test_a_name_that_would_spoil_a_message_is_refused(tmp_path, name):
    file = make.save({name: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"has an array called .*, which is no name") as refused:
        read_safetensors(file)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_more_arrays_than_a_model_has_are_refused(tmp_path):
    """To read a header takes a while for each, even of those without numbers."""
    nothing = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"name{n}": nothing for n in range(20_001)}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match="has 20001 arrays, which no model here has"):
        read_safetensors(file)
    file.write_bytes((10**8).to_bytes(8, "little") + b"{")
    os.truncate(file, 2 * 10**8)
    with pytest.raises(ValueError, match="has a header of 100 MB, which no model here has"):
        read_safetensors(file)


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
