"""The parts of stable_diffusion/ against PyTorch's: names, small modules, schedulers, tokens."""

import gzip
import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from transformers import CLIPTokenizerFast

import stable_diffusion
from course.convert import turn_back
from helpers import bundled_checkpoint
from stable_diffusion import ScheduleConfig, configs, layers, samplers, text, tokenizer, unet, vae
from stable_diffusion.weights import read_part, turn
from training import pytorch_reference as reference

FIXTURES = Path(__file__).parent / "fixtures"
CLASSES = {"unet": "UNet2DConditionModel", "vae": "AutoencoderKL", "text_encoder": "CLIPTextModel"}
CLASSES["text_encoder_2"] = "CLIPTextModelWithProjection"


@pytest.fixture(scope="module")
def recorded():
    return np.load(FIXTURES / "pytorch-model.npz")


@pytest.fixture(scope="module")
def names():
    return json.loads(gzip.decompress((FIXTURES / "pytorch-names.json.gz").read_bytes()))["models"]


def close(found, recorded, key, to=1e-5):
    """Whether the largest difference is this small, measured by the largest number."""
    expected = recorded[key]
    assert found.shape == expected.shape
    return np.abs(np.asarray(found) - expected).max() <= to * max(1, np.abs(expected).max())


def channels_last(x):
    return np.moveaxis(x, 1, -1)


def read(options, part):
    return configs.read_class(options, CLASSES[part], part)


@pytest.mark.parametrize("model", ["sd", "sd21", "sdxl"])
def test_names_and_shapes_are_those_of_pytorchs_modules(names, model):
    found = {part: read(options, part) for part, options in names[model]["configurations"].items()}
    encoders = tuple(found[part] for part in CLASSES if part.startswith("text_encoder") and part in found)
    config = stable_diffusion.Config(encoders, found["unet"], found["vae"], ScheduleConfig("ddim"))
    shapes = stable_diffusion.parameter_shapes(config)
    assert shapes.keys() == names[model]["parameters"].keys()
    for part, expected in names[model]["parameters"].items():
        turned = {name: turn(name, np.broadcast_to(0, shape)).shape for name, shape in expected.items()}
        assert {name: found.shape for name, found in shapes[part].items()} == turned


def test_the_recorded_unets_have_as_many_numbers_as_those_on_the_hub(names):
    numbers = {model: sum(map(np.prod, of["parameters"]["unet"].values())) for model, of in names.items()}
    assert numbers == {"sd": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684}


def made_up(function, *inputs):
    """Call a function of parameters with the made-up ones that it asks for."""
    noted = layers.Shapes()
    jax.eval_shape(lambda: function(noted, *inputs))
    parameters = {}
    for name, shape in noted.items():
        axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(len(shape))
        in_pytorch = shape if axes is None or name.endswith("embedding.weight") else tuple(shape[a] for a in axes)
        parameters[name] = turn(name, reference.made_up(name, in_pytorch))
    return jax.jit(function)(parameters, *inputs)


def test_a_text_encoder_gives_what_pytorchs_gives(recorded):
    config = read(reference.SMALL_TEXT, "text_encoder_2")
    hidden, _, pooled = made_up(lambda p, ids: text.encode_text(p, config, ids), recorded["ids"])
    assert close(hidden[-2], recorded, "text hidden")
    assert close(pooled, recorded, "pooled")


@pytest.mark.parametrize("model", reference.SMALL_UNETS)
def test_a_unet_gives_what_pytorchs_gives(recorded, model):
    config = read(reference.SMALL_UNETS[model], "unet")
    given = reference.made_up_input
    latents, context, pooled = given("latents", 2, 4, 8, 12), given("context", 2, 7, 32), given("pooled", 2, 24)

    def run(p, latents, timestep, context, pooled, sizes):
        condition = unet.read_text(p, config, context, pooled, sizes)
        return unet.unet(p, config, latents, timestep, condition)

    sizes = jnp.float32(reference.SIZES)
    output = made_up(run, channels_last(latents), jnp.float32([10, 700]), context, pooled, sizes)
    assert close(np.moveaxis(output, -1, 1), recorded, f"unet {model}")


@pytest.mark.parametrize("attention", stable_diffusion.ATTENTION)
def test_every_attention_is_softmax_of_scores_times_values(attention):
    given = reference.made_up_input
    query, key, value = given("query", 2, 5, 3, 8), given("key", 2, 7, 3, 8), given("value", 2, 7, 3, 8)
    weights = np.exp(np.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(8))
    expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), value)
    assert np.abs(stable_diffusion.ATTENTION[attention](query, key, value) - expected).max() < 1e-5


def test_a_vae_gives_what_pytorchs_gives(recorded):
    config = read(reference.SMALL_VAE, "vae")
    given = reference.made_up_input
    image = 1 / (1 + np.exp(-channels_last(given("image", 1, 3, 8, 12))))
    latents = channels_last(given("latents of an image", 1, 4, 4, 6))

    def run(p, image, latents):
        return *vae.encode(p, config, image), vae.decode(p, config, latents)

    for found, key in zip(made_up(run, image, latents), ("mean", "deviation", "decoded"), strict=True):
        assert close(np.moveaxis(found, -1, 1), recorded, key)


@pytest.mark.parametrize("sampler", stable_diffusion.SAMPLERS)
@pytest.mark.parametrize("spacing", reference.SPACINGS)
@pytest.mark.parametrize("prediction", reference.PREDICTIONS)
def test_a_sampler_ends_where_pytorchs_scheduler_ends(recorded, sampler, spacing, prediction):
    kind = reference.CLASSES[sampler]
    options = {**reference.BETAS, "timestep_spacing": spacing, "prediction_type": prediction}
    options |= {"set_alpha_to_one": False, "skip_prk_steps": True, "clip_sample": False}
    schedule = configs.read_class(options, kind, "made up")
    run = jax.jit(lambda noise, steps: samplers.sample(reference.stand_in, schedule, noise, steps))
    ends = np.stack([run(jnp.linspace(-2, 2, 8), steps) for steps in reference.COUNTS])
    assert close(ends, recorded, f"{sampler} {spacing} {prediction}", to=1e-4)


def test_safetensors_in_pytorchs_format_hold_what_flax_files_hold(tmp_path):
    source = Path(bundled_checkpoint("shapes-sd").source)
    for file in source.rglob("*.[jt][sx][ot]*"):  # JSON and merges.txt
        copy = tmp_path / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text().replace("Flax", ""))
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for part in ("unet", "vae", "text_encoder"):
        tensors = {name: turn_back(name, value) for name, value in read_part(source / part).items()}
        if part == "vae":
            pattern = re.compile(rf"({'|'.join(map(re.escape, old))})(?=\.(weight|bias))")
            tensors = {pattern.sub(lambda match: old[match[1]], name): value for name, value in tensors.items()}
            assert any("query" in name for name in tensors)
        if part == "text_encoder":
            tensors["text_model.embeddings.position_ids"] = np.arange(77)[None]
        kind = "model" if part == "text_encoder" else "diffusion_pytorch_model"
        save_file(tensors, tmp_path / part / f"{kind}.safetensors")
    params, config, tokenize = stable_diffusion.load(tmp_path)
    expected, expected_config, expected_tokenize = stable_diffusion.load(source)
    assert config == expected_config
    assert jax.tree.all(jax.tree.map(np.array_equal, params, expected))
    assert np.array_equal(tokenize(["a red star", ""]), expected_tokenize(["a red star", ""]))


def odd_texts():
    """Texts that are easy to take apart wrongly, and 1,200 of random signs."""
    alphabet = [
        *"aäßéñçøİıΩжя中日本한ไทย",
        *"0123456789½²",
        *"'’s.,;:!?-_/#<|>",
        *" \t\n\u00a0\u3000\u200b",
        "🙂",
        "e\u0301",
    ]
    pieces = [
        *alphabet,
        "🙂",
        "e\u0301",
        "'s",
        "'LL",
        "<|endoftext|>",
        "<|startoftext|>",
        "<|ENDOFTEXT|>",
        "heart",
        "Red",
        "isn't",
    ]
    random = np.random.default_rng(0)
    known = [
        "",
        " ",
        "a small red heart",
        "A  SMALL\nred heart!!",
        "it's we'll I'd",
        "12345",
        "a" * 200,
        "naïve café",
        "…",
    ]
    return known + ["".join(random.choice(pieces, random.integers(1, 60))) for _ in range(1200)]


def test_tokens_are_those_of_clips_fast_tokenizer():
    folder = Path(bundled_checkpoint("shapes-sd").source) / "tokenizer"
    theirs = CLIPTokenizerFast.from_pretrained(folder)
    ours = tokenizer.read_tokenizer(folder)
    texts = odd_texts()
    settings = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "np"}
    with pytest.warns(UserWarning, match="are read: not"):
        found = ours(texts)
    assert np.array_equal(found, theirs(texts, **settings).input_ids)


def test_a_sign_that_fills_up_is_a_special_token_in_a_prompt_as_well(tmp_path):
    """The second tokenizer of Stable Diffusion XL fills up with exclamation marks."""
    folder = shutil.copytree(Path(bundled_checkpoint("shapes-sd").source) / "tokenizer", tmp_path / "tokenizer")
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        settings = json.loads((folder / file).read_text()) | {"pad_token": "!"}
        (folder / file).write_text(json.dumps(settings))
    texts = ["wow!", "a red! heart", "!", "a heart"]
    settings = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "np"}
    theirs = CLIPTokenizerFast.from_pretrained(folder)(texts, **settings).input_ids
    assert np.array_equal(tokenizer.read_tokenizer(folder)(texts), theirs)
