"""Weights from anywhere, LoRA files, and drawing from an image: against PyTorch's, and with bad input.

``python -m training.pytorch_own_weights`` made what PyTorch says. It is compared without PyTorch.
"""

import functools
import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import nbformat
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

import stable_diffusion as sd
from course import convert, lora
from helpers import bundled_checkpoint
from stable_diffusion import configs, samplers, vae
from stable_diffusion.weights import DTYPES

FIXTURES = Path(__file__).parent / "fixtures"
CLASSES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
CLASSES["text_encoder_2"] = "CLIPTextModelWithProjection"
SOURCES = {name: Path(bundled_checkpoint(name).source) for name in ("shapes-sd", "shapes-sdxl")}
STEMS = {"unet": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model"}
# How diffusers saved the bundled models, and the numbers' dtype.
KINDS = {"one file": np.float32, "variant fp16 in several files": np.float16}


@pytest.fixture(scope="module")
def recorded():
    return np.load(FIXTURES / "pytorch-own-weights.npz")


@pytest.fixture(scope="module")
def saved_by_pytorch():
    """All but the numbers of folders that diffusers saved: text, or the header and the hash of safetensors."""
    return json.loads(gzip.decompress((FIXTURES / "pytorch-folders.json.gz").read_bytes()))["models"]


@pytest.fixture(scope="module")
def models():
    """Both bundled models: parameters, configuration, tokenizer."""
    return {name: sd.load(source) for name, source in SOURCES.items()}


@pytest.fixture(scope="module")
def folder(models, tmp_path_factory):
    """What `save` makes of the bundled checkpoint of Stable Diffusion 1."""
    folder = tmp_path_factory.mktemp("saved")
    convert.save(models["shapes-sd"][0], SOURCES["shapes-sd"], folder)
    return folder


def same(params, others):
    return jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and np.array_equal(a, b), params, others))


def weights(folder, part, variant=None):
    word = f".{variant}" if variant else ""
    return folder / part / f"{STEMS.get(part, 'model')}{word}.safetensors"


def copy(folder, to):
    """The same folder, without the bytes: what is replaced in the copy stays as it is in the original."""
    shutil.copytree(folder, to, copy_function=os.link, dirs_exist_ok=True)
    return to


def rewrite(file, change):
    """Replace a file by what `change` makes of its tensors."""
    tensors = change(load_file(file))
    file.unlink()
    save_file(tensors, file, metadata={"format": "pt"})


def split_up(file, pieces):
    """Put the tensors of a file into several, as diffusers does, with an index of the same name."""
    tensors, stem = load_file(file), file.name.split(".")[0]
    word = file.name.removeprefix(stem).removesuffix(".safetensors")  # of the variant
    names, places = sorted(tensors), {}
    for n in range(pieces):
        piece = f"{stem}{word}-{n + 1:05}-of-{pieces:05}.safetensors"
        save_file({name: tensors[name] for name in names[n::pieces]}, file.with_name(piece), metadata={"format": "pt"})
        places |= dict.fromkeys(names[n::pieces], piece)
    index = {"metadata": {"total_size": sum(value.nbytes for value in tensors.values())}, "weight_map": places}
    file.with_name(f"{stem}.safetensors.index{word}.json").write_text(json.dumps(index))
    file.unlink()


@pytest.mark.parametrize("name", SOURCES)
def test_what_is_saved_is_what_pytorch_saves_and_is_read_again(models, saved_by_pytorch, name, tmp_path):
    params, config, _ = models[name]
    convert.save(params, SOURCES[name], tmp_path)
    for place, content in saved_by_pytorch[f"{name} one file"].items():
        if place.endswith(".safetensors"):
            assert hashlib.sha256((tmp_path / place).read_bytes()).hexdigest() == content[1]
    again, its_config, _ = sd.load(tmp_path)
    assert its_config == config
    assert same(again, params)
    names = " ".join(file.read_text() for file in tmp_path.rglob("*.json"))
    assert '"Flax' not in names


@pytest.fixture(scope="module", params=[f"{name} {kind}" for name in SOURCES for kind in KINDS])
def theirs(request, models, saved_by_pytorch, tmp_path_factory):
    """A folder that diffusers saved, made anew from all but the numbers: whose it is, its kind, and where it lies."""
    name, kind = request.param.split(" ", 1)
    folder, params = tmp_path_factory.mktemp("theirs"), models[name][0]
    for place, content in saved_by_pytorch[request.param].items():
        file = folder / place
        file.parent.mkdir(exist_ok=True)
        if isinstance(content, str):
            file.write_text(content)
            continue
        header, checksum = content
        entries = [(key, of) for key, of in json.loads(header).items() if key != "__metadata__"]
        data = [len(header).to_bytes(8, "little"), header.encode()]
        for key, of in sorted(entries, key=lambda entry: entry[1]["data_offsets"]):
            data.append(convert.turn_back(key, params[file.parent.name][key]).astype(DTYPES[of["dtype"]]))
        file.write_bytes(b"".join(data))
        assert hashlib.sha256(file.read_bytes()).hexdigest() == checksum
    return name, kind, folder


def test_a_folder_that_pytorch_saved_gives_its_image(models, theirs, draw, recorded):
    name, kind, folder = theirs
    variant = kind.split()[1] if kind.startswith("variant") else None
    params, config, _ = sd.load(folder, variant=variant)
    rounded = jax.tree.map(lambda value: np.asarray(value, KINDS[kind]).astype(np.float32), models[name][0])
    assert same(params, rounded)
    assert config.unet == models[name][1].unet
    key = name.removeprefix("shapes-")
    assert_same_image(draw(name, params, {}), recorded, f"{key} {kind}" if variant else key)


def test_files_in_bfloat16_are_read_as_they_are(models, folder, tmp_path):
    params = jax.tree.map(lambda value: np.asarray(value, jnp.bfloat16), models["shapes-sd"][0])
    convert.save(params, folder, tmp_path)
    assert same(sd.load(tmp_path, jnp.bfloat16)[0], params)


def test_parameters_go_where_a_sharding_says(folder):
    mesh = jax.make_mesh((jax.device_count(),), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def place(name, shape):
        split = name.endswith("weight") and shape[-1] % jax.device_count() == 0
        return NamedSharding(mesh, P(*[None] * (len(shape) - 1), "model" if split else None))

    unet = sd.load(folder, sharding=place)[0]["unet"]
    for name, value in unet.items():
        assert value.sharding.is_equivalent_to(place(name, value.shape), value.ndim)
    weight = unet["conv_in.weight"]
    assert weight.addressable_shards[0].data.nbytes * jax.device_count() == weight.nbytes
    everywhere = NamedSharding(mesh, P())
    assert all(x.sharding == everywhere for x in jax.tree.leaves(sd.load(folder, sharding=everywhere)[0]))


@pytest.fixture(scope="module")
def translated():
    return json.loads(gzip.decompress((FIXTURES / "original-names.json.gz").read_bytes()))["models"]


def configuration(model):
    options = json.loads(gzip.decompress((FIXTURES / "pytorch-names.json.gz").read_bytes()))["models"][model]
    found = {part: configs.read_class(of, CLASSES[part], part) for part, of in options["configurations"].items()}
    encoders = tuple(found[part] for part in CLASSES if part.startswith("text_encoder") and part in found)
    return sd.Config(encoders, found["unet"], found["vae"], sd.ScheduleConfig("ddim"))


@pytest.mark.parametrize("model", ["sd", "sd21", "sdxl"])
def test_names_of_the_original_layout_are_those_that_diffusers_reads(translated, model):
    config = configuration(model)
    for part, names in translated[model].items():
        assert {name: list(convert.original_name(part, name, config)) for name in names} == names


def single_file(params, config, file):
    """Save parameters in the original layout, with the numbers in it that training leaves there."""
    tensors, thirds = {"model_ema.decay": np.ones(1, np.float32)}, {}
    for part, of in params.items():
        for name, value in of.items():
            theirs, third = convert.original_name(part, name, config)
            value = convert.turn_back(name, value)
            if theirs.endswith("text_projection"):
                value = np.ascontiguousarray(value.T)
            if ".attn_1." in theirs and value.ndim == 2:
                value = value[:, :, None, None]
            if third is None:
                tensors[theirs] = value
            else:
                thirds.setdefault(theirs, {})[third] = value
    tensors |= {name: np.concatenate([of[n] for n in range(3)]) for name, of in thirds.items()}
    save_file(tensors, file)


@pytest.mark.parametrize("name", SOURCES)
def test_a_single_file_in_the_original_layout_is_converted(models, name, tmp_path, monkeypatch, capsys):
    params, config, _ = models[name]
    single_file(params, config, tmp_path / "model.safetensors")
    arguments = [tmp_path / "model.safetensors", tmp_path / "folder", "--like", SOURCES[name]]
    monkeypatch.setattr("sys.argv", ["convert", *map(str, arguments)])
    convert.main()
    assert f"unet {len(params['unet'])}" in capsys.readouterr().out
    assert same(sd.load(tmp_path / "folder")[0], params)


BUNDLED = SOURCES["shapes-sd"].parent / "loras"
LORAS = {
    "diffusers": BUNDLED / "blue-for-red.safetensors",
    "kohya": BUNDLED / "star-for-heart.safetensors",
    "xl": FIXTURES / "lora-random-xl.safetensors",
}
ARCHITECTURES = {"diffusers": "shapes-sd", "kohya": "shapes-sd", "xl": "shapes-sdxl"}
# With which of these diffusers drew, at which scales.
MIXTURES = [{"diffusers": 1.0}, {"diffusers": 0.5}, {"kohya": 0.8}, {"diffusers": 0.7, "kohya": 0.9}, {"xl": 1.0}]


@pytest.fixture(scope="module")
def loras(models):
    return {name: lora.read_lora(LORAS[name], *models[ARCHITECTURES[name]][:2]) for name in LORAS}


@pytest.fixture(scope="module")
def draw(models, loras, recorded):
    """A function that draws the recorded prompts with all LoRAs beside the weights, by scales that may be 0."""

    def program(params, config, loras, scales, ids, empty, latents):
        for name, pairs in loras.items():
            params = lora.attach(params, pairs, scales[name])
        key = jax.random.key(0)
        return sd.generate(params, config, ids, key, empty, 10, 3.0, latents, sampler="ddim")

    compiled = jax.jit(program, static_argnums=1)

    def draw(model, params, scales):
        _, config, tokenize = models[model]
        prompts = [str(prompt) for prompt in recorded["prompts"]]
        # Stable Diffusion XL does without a negative prompt, as its pipeline does.
        empty = None if model == "shapes-sdxl" else tokenize([""])
        its = {name: pairs for name, pairs in loras.items() if ARCHITECTURES[name] == model}
        scales = dict.fromkeys(its, 0.0) | scales
        return compiled(params, config, its, scales, tokenize(prompts), empty, np.moveaxis(recorded["latents"], 1, -1))

    return draw


def assert_same_image(found, recorded, key):
    """Within 1 / 255 of what was recorded."""
    assert 255 * np.abs(np.asarray(found) - recorded[key] / np.float32(65535)).max() < 1


@pytest.mark.parametrize("scales", MIXTURES, ids=str)
def test_loras_give_pytorchs_image_merged_and_beside_the_weights(models, loras, draw, recorded, scales):
    model = ARCHITECTURES[next(iter(scales))]
    params = merged = models[model][0]
    for name, scale in scales.items():
        merged = lora.merge(merged, loras[name], scale)
    key = model.removeprefix("shapes-")
    for found in (draw(model, merged, {}), draw(model, params, scales)):
        assert_same_image(found, recorded, f"{key} {json.dumps(scales)}")
    assert np.abs(recorded[f"{key} {json.dumps(scales)}"] / 257 - recorded[key] / 257).max() > 50  # which one can see


def test_a_lora_for_xl_changes_both_text_encoders(loras):
    assert loras["xl"].keys() == {"unet", "text_encoder", "text_encoder_2"}


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_is_taken_out_again_to_rounding(models, loras, name):
    params = models["shapes-sdxl" if name == "xl" else "shapes-sd"][0]
    back = lora.merge(lora.merge(params, loras[name], 0.8), loras[name], -0.8)
    for value, before in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert np.abs(value - before).max() <= 2e-7 * max(1, np.abs(before).max())


def test_kohyas_files_for_xl_may_name_the_unet_as_the_original_layout_does(models, loras, tmp_path):
    params, config, _ = models["shapes-sdxl"]
    names = {name.removesuffix(".weight"): convert.name_unet(name, config) for name in params["unet"]}
    names = {f"lora_unet_{ours}".replace(".", "_"): f"lora_unet_{theirs}" for ours, theirs in names.items()}
    tensors = {}
    for name, value in load_file(LORAS["xl"]).items():
        layer, kind = name.split(".", 1)
        renamed = names[layer].removesuffix(".weight").replace(".", "_") if layer in names else layer
        tensors[f"{renamed}.{kind}"] = value
    assert any(name.startswith("lora_unet_input_blocks_") for name in tensors)
    save_file(tensors, tmp_path / "lora.safetensors")
    assert same(lora.read_lora(tmp_path / "lora.safetensors", params, config), loras["xl"])


def test_the_command_merges_files_into_a_folder(models, loras, folder, tmp_path, monkeypatch, capsys):
    files = [f"{LORAS[name]}={scale}" for name, scale in MIXTURES[-2].items()]
    monkeypatch.setattr("sys.argv", ["lora", str(folder), str(tmp_path), *files])
    lora.main()
    said = capsys.readouterr().out
    assert all(f"Added {LORAS[name]}, {scale} times" in said for name, scale in MIXTURES[-2].items())
    expected = models["shapes-sd"][0]
    for name, scale in MIXTURES[-2].items():
        expected = lora.merge(expected, loras[name], scale)
    assert same(sd.load(tmp_path)[0], expected)


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (convert, ["model.ckpt", "out", "--like", SOURCES["shapes-sd"]], "model.ckpt is a pickle"),
        (convert, ["model.safetensors", "out", "--like", "nowhere"], "nowhere"),
        (lora, [SOURCES["shapes-sd"], "out", "lora.bin=1"], "lora.bin is a pickle"),
        (lora, [SOURCES["shapes-sd"], "out", "lora.safetensors"], "^2$"),
    ],
)
def test_a_command_that_is_given_the_wrong_files_ends_in_a_sentence(
    command, arguments, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["command", *map(str, arguments)])
    with pytest.raises(SystemExit, match=message):
        command.main()
    if message == "^2$":
        assert "argument FILE=SCALE: invalid file_and_scale value: 'lora.safetensors'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def chapter():
    """What chapter 13's cells define to draw over pictures, for a configuration."""
    cells = nbformat.read(Path(__file__).parents[1] / "notebooks" / "13_own_weights.ipynb", as_version=4).cells
    names = {"jnp": jnp, "np": np, "sd": sd, "samplers": samplers, "vae": vae}
    for start in ("def redraw(", "def check("):
        (source,) = [cell.source for cell in cells if cell.source.startswith(start)]
        exec(source.split("\n\n\n")[0], names)  # the function, and not what the cell does with it
    return names


# What diffusers drew over the pictures: by which samplers, at which strengths.
CAN_START_LATE = ("ddim", "euler", "dpm++")
STRENGTHS = {"shapes-sd": {"ddim": 0.6, "euler": 0.8, "dpm++": 1.0}, "shapes-sdxl": {"euler": 0.75}}
DRAWN_OVER = [
    (model, kind, sampler, strength)
    for model, strengths in STRENGTHS.items()
    for kind in ("image to image", "inpainting")
    for sampler, strength in strengths.items()
]


@pytest.fixture(scope="module")
def draw_over(chapter, models, recorded, any_sampler):
    """A function that draws over the recorded pictures, with one program for all samplers and strengths."""

    def program(params, config, which, *inputs, **settings):
        with any_sampler(which, CAN_START_LATE):
            return chapter["redraw"](params, config, *inputs, sampler="any", **settings)

    compiled = jax.jit(program, static_argnums=1)

    def draw_over(model, kind, sampler, strength):
        params, config, tokenize = models[model]
        ids = tokenize([str(prompt) for prompt in recorded["picture prompts"]])
        empty = None if model == "shapes-sdxl" else tokenize([""])
        mask = recorded["mask"] if kind == "inpainting" else None
        pictures = recorded["pictures"] / np.float32(255)
        chapter["check"].__globals__["config"] = config
        chapter["check"](pictures, strength, mask)
        settings = {"mask": mask, "latents": np.moveaxis(recorded["noise"], 1, -1)}
        which, key = CAN_START_LATE.index(sampler), jax.random.key(0)
        return compiled(params, config, which, ids, key, empty, pictures, strength, 20, 3.0, **settings)

    return draw_over


@functools.partial(jax.jit, static_argnums=1)
def there_and_back(params, config, pictures):
    return vae.decode(params, config, vae.encode(params, config, pictures)[0])


@pytest.mark.parametrize(("model", "kind", "sampler", "strength"), DRAWN_OVER)
def test_drawing_over_an_image_gives_pytorchs_image(draw_over, models, recorded, model, kind, sampler, strength):
    found = draw_over(model, kind, sampler, strength)
    assert_same_image(found, recorded, f"{model} {kind} {sampler} {strength}")
    if kind == "inpainting":
        # Further than a latent from what is drawn, it is the picture, but for the VAE's own error.
        pictures = recorded["pictures"] / np.float32(255)
        back = there_and_back(models[model][0]["vae"], models[model][1].vae, pictures)
        drawn = np.pad(recorded["mask"][::8, ::8], 1)
        near = np.max([np.roll(drawn, (y, x), (0, 1)) for y in (-1, 0, 1) for x in (-1, 0, 1)], axis=0)[1:-1, 1:-1]
        far = near.repeat(8, axis=0).repeat(8, axis=1) == 0
        assert far.mean() > 0.15
        found, own = (255 * np.abs(x - pictures)[:, far].mean() for x in (found, back))
        assert found < own + 0.5


def missing(*names):
    def spoil(folder):
        for name in names:
            (folder / name).unlink()

    return spoil


def replaced(name, change):
    """Another content, in a new file, as the old one may be linked to."""

    def spoil(folder):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(change(data))

    return spoil


def tensors(name, change):
    return lambda folder: rewrite(folder / name, change)


def without_a_shard(folder):
    split_up(folder / UNET, 3)
    (folder / UNET).with_name("diffusion_pytorch_model-00002-of-00003.safetensors").unlink()


def with_half_an_index(folder):
    split_up(folder / UNET, 2)
    index = (folder / UNET).with_name("diffusion_pytorch_model.safetensors.index.json")
    places = json.loads(index.read_text())["weight_map"]
    only = {name: place for name, place in places.items() if "00001-of" in place}
    index.write_text(json.dumps({"weight_map": only}))


def with_a_damaged_index(folder):
    split_up(folder / UNET, 2)
    index = (folder / UNET).with_name("diffusion_pytorch_model.safetensors.index.json")
    index.write_text(index.read_text()[:99])


def only_a_pickle(folder):
    (folder / UNET).rename((folder / UNET).with_suffix(".bin"))


def only_a_variant(folder):
    (folder / UNET).rename(weights(folder, "unet", "fp16"))


UNET, TEXT = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
BIAS = "conv_in.bias"
BAD_FOLDERS = {
    "no index": (missing("model_index.json"), "not all of a folder.*model_index"),
    "an index that is no JSON": (replaced("model_index.json", lambda data: data[:50]), "not all of a folder"),
    "an index without a unet": (replaced("model_index.json", lambda data: data.replace(b"unet", b"net")), "'unet'"),
    "a different pipeline": (
        replaced("model_index.json", lambda data: data.replace(b"StableDiffusionPipeline", b"FluxPipeline")),
        "is for FluxPipeline: this model reads",
    ),
    "no configuration": (missing("unet/config.json"), "not all of a folder.*unet/config.json"),
    "no vocabulary": (missing("tokenizer/vocab.json"), "not all of a folder.*vocab.json"),
    "no file": (missing(UNET), "unet has no parameters that can be read, but nothing: get safetensors"),
    "only a pickle": (only_a_pickle, "model.bin: get safetensors; .* a pickle, which can run any program"),
    "only a variant": (only_a_variant, "but .*fp16.safetensors: give the variant"),
    "half a file": (replaced(UNET, lambda data: data[: len(data) // 2]), "damaged or no safetensors"),
    "a page in place of a file": (replaced(TEXT, lambda data: b"<html>Log in, please</html>"), "no safetensors"),
    "an empty file": (replaced(UNET, lambda data: b""), "no safetensors"),
    "a wrong header": (replaced(UNET, lambda data: data[:8] + b"#" + data[9:]), "no safetensors"),
    "a missing shard": (without_a_shard, "00002-of-00003.safetensors is missing"),
    "half an index of shards": (with_half_an_index, "unet has nothing for .*, and its configuration means"),
    "a damaged index of shards": (with_a_damaged_index, "unet has nothing for .*, and its configuration means"),
    "a parameter too many": (tensors(UNET, lambda of: of | {"more": of[BIAS]}), "for more, and .* means nothing"),
    "a parameter too few": (
        tensors(UNET, lambda of: {name: value for name, value in of.items() if name != BIAS}),
        "has nothing for conv_in.bias",
    ),
    "a different shape": (tensors(UNET, lambda of: of | {BIAS: of[BIAS][:-1]}), r"has \(95,\) for conv_in.bias"),
    "a different architecture": (
        tensors(UNET, lambda of: of | {"add_embedding.linear_1.bias": of[BIAS]}),
        r"has \(96,\) for add_embedding.linear_1.bias, and its configuration means nothing",
    ),
    "a configuration of a different architecture": (
        replaced("unet/config.json", lambda data: (SOURCES["shapes-sdxl"] / "unet" / "config.json").read_bytes()),
        "not all of a folder.*text_encoder_2",
    ),
    "a part that is not there": (
        replaced("model_index.json", lambda data: data.replace(b'"UNet2DConditionModel"', b"null")),
        "not all of a folder",
    ),
    "a different part": (replaced(UNET, lambda data: weights(SAVED[0], "vae").read_bytes()), "unet has"),
    "whole numbers": (tensors(UNET, lambda of: of | {BIAS: of[BIAS].astype(np.int8)}), "numbers as I8: get float32"),
}
SAVED = []


@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_a_sentence(folder, tmp_path, how):
    SAVED[:] = [folder]
    spoil, message = BAD_FOLDERS[how]
    spoil(copy(folder, tmp_path / "copy"))
    with pytest.raises((FileNotFoundError, ValueError), match=message) as refused:
        sd.load(tmp_path / "copy")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"variant": "fp16"}, "give the variant .*, which is fp16 now"), ({"dtype": jnp.float16}, "dtype is float16")],
    ids=str,
)
def test_a_bad_choice_is_refused_in_a_sentence(folder, options, message):
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        sd.load(folder, **options)


BAD_LORAS = {
    "a pickle": ("lora.pt", None, "is a pickle"),
    "no file": ("lora.safetensors", None, "is missing"),
    "of a different model": (
        "lora.safetensors",
        lambda of: load_file(LORAS["xl"]),
        "fit nothing in this model: lora_te1",
    ),
    "half of a pair": (
        "lora.safetensors",
        lambda of: {name: value for name, value in of.items() if "attn1.to_q.lora_B" not in name},
        "of which only one half is there",
    ),
    "no LoRA": (
        "lora.safetensors",
        lambda of: {"conv_in.bias": np.zeros(3, np.float32)},
        "fit nothing .*: conv_in.bias",
    ),
    "of a model with other widths": (
        "lora.safetensors",
        lambda of: {name: value[:, :-1] if "lora_A" in name else value for name, value in of.items()},
        "get one made for it",
    ),
    "halves that do not fit each other": (
        "lora.safetensors",
        lambda of: {name: value[:2] if "lora_A" in name else value for name, value in of.items()},
        "of two ranks: get it again",
    ),
    "an alpha that is not one number": (
        "lora.safetensors",
        lambda of: of | {f"{next(iter(of)).split('.lora')[0]}.alpha": np.ones(2, np.float32)},
        "fit nothing in this model: .*alpha",
    ),
    "a scale that is not one number": (
        "lora.safetensors",
        lambda of: of | {f"{next(iter(of)).split('.lora')[0]}.dora_scale": np.ones((1, 4), np.float32)},
        "dora_scale",
    ),
}


@pytest.mark.parametrize("how", BAD_LORAS)
def test_a_bad_lora_is_refused_in_a_sentence(models, tmp_path, how):
    name, change, message = BAD_LORAS[how]
    if change:
        save_file({key: value.copy() for key, value in change(load_file(LORAS["diffusers"])).items()}, tmp_path / name)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        lora.read_lora(tmp_path / name, *models["shapes-sd"][:2])


def test_a_lora_that_is_damaged_is_refused_in_a_sentence(models, tmp_path):
    data = LORAS["diffusers"].read_bytes()
    (tmp_path / "half.safetensors").write_bytes(data[: len(data) // 2])
    save_file(load_file(LORAS["diffusers"]), tmp_path / "options.safetensors", metadata={"lora_adapter_metadata": "{"})
    for name, message in (("half", "damaged or no safetensors"), ("options", "options of PEFT that are damaged")):
        with pytest.raises(ValueError, match=message):
            lora.read_lora(tmp_path / f"{name}.safetensors", *models["shapes-sd"][:2])


BAD_SINGLE_FILES = {
    "a pickle": ("model.ckpt", None, "is a pickle"),
    "a part of it": (
        "model.safetensors",
        lambda of: {name: of[name] for name in of if "first_stage" not in name},
        "no vae",
    ),
    "of a larger model": (
        "model.safetensors",
        lambda of: of | {"model.diffusion_model.input_blocks.99.0.op.bias": np.zeros(3, np.float32)},
        "1 names too many",
    ),
    "with other widths": (
        "model.safetensors",
        lambda of: of | {"model.diffusion_model.out.2.bias": np.zeros(3, np.float32)},
        "and the model of unet has",
    ),
}


@pytest.mark.parametrize("how", BAD_SINGLE_FILES)
def test_a_bad_single_file_is_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    name, change, message = BAD_SINGLE_FILES[how]
    if change:
        single_file(params, config, tmp_path / "whole.safetensors")
        save_file(change(load_file(tmp_path / "whole.safetensors")), tmp_path / name)
    with pytest.raises((FileNotFoundError, ValueError), match=message):
        convert.read_single_file(tmp_path / name, config)


PICTURE = np.full((1, 64, 64, 3), 0.5, np.float32)
BAD_INPUTS = {
    "an odd size": ({"pictures": PICTURE[:, 1:]}, "has 63 × 64 pixels: resize it to multiples of 16"),
    "bytes": ({"pictures": PICTURE * 255}, "divide bytes by 255"),
    "with a channel for opacity": ({"pictures": np.ones((1, 64, 64, 4))}, r"pictures have the shape \(1, 64, 64, 4\)"),
    "one without a batch": ({"pictures": PICTURE[0]}, r"pictures have the shape \(64, 64, 3\)"),
    "too much strength": ({"strength": 1.5}, "strength is 1.5: choose 0 to 1"),
    "a negative strength": ({"strength": -0.1}, "strength is -0.1"),
    "a strength that is no number": ({"strength": float("nan")}, "strength is nan"),
    "a mask of another size": ({"mask": np.ones((32, 32))}, r"mask has the shape \(32, 32\)"),
}


@pytest.mark.parametrize("how", BAD_INPUTS)
def test_a_picture_or_mask_that_does_not_fit_is_refused_in_a_sentence(chapter, models, how):
    chapter["check"].__globals__["config"] = models["shapes-sd"][1]
    options, message = BAD_INPUTS[how]
    with pytest.raises(ValueError, match=message):
        chapter["check"](**{"pictures": PICTURE, "strength": 0.5} | options)


def test_pndm_does_not_start_in_the_middle(models):
    _, config, _ = models["shapes-sd"]
    with pytest.raises(ValueError, match="'pndm' cannot start from an image: choose ddim"):
        samplers.sample(None, config.schedule, jnp.zeros((1, 8, 8, 4)), 5, "pndm", image=jnp.zeros((1, 8, 8, 4)))
