"""LoRA files, merged and beside the weights, as on PyTorch, and with bad input.

``python -m tests.makers.own_weights`` made what PyTorch draws, with the LoRAs of
``tests.makers.loras``.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import course.lora
from course import flux2, sd
from course.model.files import to_channels_first, unstack_layers
from course.model.lora import attach, merge
from course.sd import convert, lora
from helpers import bundled_checkpoint
from tests.makers import common
from tests.makers import files as make

SOURCES = {name: Path(bundled_checkpoint(name).source) for name in ("shapes-sd", "shapes-sdxl")}
SD = SOURCES["shapes-sd"]
UNET = "unet/diffusion_pytorch_model.safetensors"
BIAS = "conv_in.bias"
BUNDLED = SD.parent / "loras"
LORAS = {
    "diffusers": BUNDLED / "blue-for-red.safetensors",
    "kohya": BUNDLED / "star-for-heart.safetensors",
    "xl": common.FIXTURES / "lora-random-xl.safetensors",
    "klein": common.FIXTURES / "klein" / "lora.safetensors",  # python -m tests.makers.klein
}
ARCHITECTURES = {
    "diffusers": "shapes-sd",
    "kohya": "shapes-sd",
    "xl": "shapes-sdxl",
    "klein": "small-flux2",
}
# With which of these diffusers drew, at which scales.
BOTH = {"diffusers": 0.7, "kohya": 0.9}
MIXTURES = [{"diffusers": 1.0}, {"diffusers": 0.5}, {"kohya": 0.8}, BOTH, {"xl": 1.0}]


@pytest.fixture(scope="module")
def recorded():
    return np.load(common.FIXTURES / "pytorch-own-weights.npz")


@pytest.fixture(scope="module")
def all_models(models, small_flux2):
    return models | {"small-flux2": small_flux2}


def code_of(name):
    """The code for the model of a LoRA."""
    return flux2 if name == "klein" else sd


@pytest.fixture(scope="module")
def loras(all_models):
    found = {}
    for name, file in LORAS.items():
        params, config, _ = all_models[ARCHITECTURES[name]]
        found[name] = code_of(name).read_lora(file, params, config)
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
    make.assert_same_image(draw(model, merged), expected)
    make.assert_same_image(draw(model, params, scales), expected)
    without = recorded[key]
    assert np.abs(expected / 257 - without / 257).max() > 50, "one cannot see the LoRA"


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_is_taken_out_again_to_rounding(all_models, loras, name):
    params = all_models[ARCHITECTURES[name]][0]
    back = merge(merge(params, loras[name], 0.8), loras[name], -0.8)
    for value, before in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
        assert np.abs(value - before).max() <= 2e-7 * max(1, np.abs(before).max())


@pytest.mark.parametrize("name", LORAS)
def test_a_lora_that_is_saved_is_read_again(all_models, loras, name, tmp_path):
    params, config, _ = all_models[ARCHITECTURES[name]]
    code = code_of(name)
    code.save_lora(tmp_path / "new" / "lora.safetensors", loras[name], config, np.float32)
    found = code.read_lora(tmp_path / "new" / "lora.safetensors", params, config)
    assert make.is_same(found, loras[name])


def test_diffusers_draws_the_same_with_a_lora_that_was_trained_here_for_flux2():
    recorded = np.load(common.FIXTURES / "klein" / "trained.npz")
    params, config, tokenize = flux2.load(bundled_checkpoint("shapes-flux2").source, "float32")
    pairs = flux2.read_lora(common.FIXTURES / "klein" / "trained.safetensors", params, config)
    prompts = [str(prompt) for prompt in recorded["prompts"]]
    run = jax.jit(flux2.generate, static_argnames=flux2.STATIC)

    def draw(params):
        ids, mask = tokenize(prompts)
        noise = common.made_up_input("noise", 2, 16, config.transformer.in_channels)
        empty = tokenize([""])
        return 255 * run(params, config, ids, mask, noise, 64, 64, 8, 3.0, empty)

    drawn = draw(merge(params, pairs))
    assert np.abs(drawn - recorded["images"] / np.float32(257)).max() < 0.02
    assert np.abs(drawn - draw(params)).max() > 20


def test_loras_for_flux2_are_merged_and_beside_the_weights_together(all_models, loras):
    params, config, tokenize = all_models["small-flux2"]
    pairs = loras["klein"]
    run = jax.jit(flux2.generate, static_argnames=flux2.STATIC)

    def draw(params):
        noise = common.made_up_input("noise", 1, 15, 32)
        return 255 * run(params, config, *tokenize(["a star"]), noise, 24, 40, steps=2)

    without = draw(params)
    merged = draw(merge(merge(params, pairs, 0.5), pairs, -0.2))
    assert np.abs(merged - without).max() > 1, "one cannot see the LoRA"
    assert np.abs(draw(attach(attach(params, pairs, 0.5), pairs, -0.2)) - merged).max() < 0.01


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
    assert make.is_same(lora.read_lora(tmp_path / "lora.safetensors", params, config), loras["xl"])


def run_command(*arguments):
    assert course.lora.main([*map(str, arguments)]) == 0


def test_the_command_merges_files_into_a_folder_of_flux2(
    all_models, loras, flux2_folder, tmp_path, capsys
):
    run_command(flux2_folder, tmp_path, f"{LORAS['klein']}=0.7", f"{LORAS['klein']}=-0.2")
    said = capsys.readouterr().out
    assert "-0.2 times, to 2 weights of text_encoder and 12 weights of transformer" in said
    params, config, _ = all_models["small-flux2"]
    expected = merge(merge(params, loras["klein"], 0.7), loras["klein"], -0.2)
    found, new_config, _ = flux2.load(tmp_path, np.float32)
    assert new_config == config
    for value, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(value - other).max() < 1e-6
    # What no image depends on is there as before, for programs that want it.
    before = flux2.read_files(flux2_folder, config)
    after = flux2.read_files(tmp_path, config)
    for part, values in before.items():
        assert after[part].keys() == values.keys()
    unused = "model.layers.7.mlp.up_proj.weight"
    assert np.array_equal(before["text_encoder"][unused], after["text_encoder"][unused])


def test_the_command_merges_files_into_a_folder(models, loras, folder, tmp_path, capsys):
    files = [f"{LORAS[name]}={scale}" for name, scale in BOTH.items()]
    run_command(folder, tmp_path, *files)
    said = capsys.readouterr().out
    expected = models["shapes-sd"][0]
    for name, scale in BOTH.items():
        assert f"Added {LORAS[name]}, {scale} times" in said
        expected = merge(expected, loras[name], scale)
    assert make.is_same(sd.load(tmp_path)[0], expected)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_the_command_keeps_the_dtype_of_the_files(models, loras, tmp_path, dtype):
    params, _, _ = models["shapes-sd"]
    source = tmp_path / "source"
    sd.save(params, SD, source, dtype)
    for file in source.rglob("*.safetensors"):
        file.rename(file.with_suffix(".half.safetensors"))
    inputs = source, tmp_path / "new", f"{LORAS['kohya']}=0.5", "--variant", "half"
    run_command(*inputs)
    found = load_file(tmp_path / "new" / UNET)
    assert {value.dtype for value in found.values()} == {jnp.dtype(dtype)}
    rounded, _, _ = sd.load(source, variant="half")
    expected = merge(rounded, loras["kohya"], 0.5)["unet"]["conv_in.weight"]
    assert np.array_equal(
        found["conv_in.weight"], to_channels_first("conv_in.weight", expected.astype(dtype))
    )
    inputs = source, tmp_path / "new", LORAS["kohya"], "--variant", "half"  # at the scale of 1
    run_command(*inputs, "--dtype", "float32")
    expected = merge(rounded, loras["kohya"], 1)["unet"]["conv_in.weight"]
    found = load_file(tmp_path / "new" / UNET)
    assert np.array_equal(found["conv_in.weight"], to_channels_first("conv_in.weight", expected))


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


REFUSALS = {
    "half of a pair": (without_some_halves, "to_q.lora_A.weight without its other half"),
    "no LoRA": (lambda tensors: {BIAS: np.zeros(3, np.float32)}, "fit nothing .*: conv_in.bias"),
    "of a model with other widths": (
        other_widths,
        r"lora_A.weight and its other half for .*\. Get one made for it",
    ),
    "halves that do not fit each other": (
        only_first_halves_cut,
        "lora_A.weight as .* of two ranks: get it again",
    ),
    "a half that is a row": (
        lambda tensors: {
            name: value[:, 0] if "lora_B" in name else value for name, value in tensors.items()
        },
        r"lora_A.weight as .*, and its other half as \(\d+,\), of two ranks: get it again",
    ),
    "an alpha that is not one number": (
        with_more("alpha", np.ones(2, np.float32)),
        "fit nothing in this model: .*alpha",
    ),
    "an alpha that is NaN": (
        with_more("alpha", np.float32([np.nan])),
        "numbers in .*alpha that are infinite or NaN",
    ),
    "half that is NaN": (
        lambda tensors: make.spoiled(tensors, "lora_B.weight", np.nan),
        "numbers in .*lora_B.weight that are infinite or NaN",
    ),
    "products that are infinite": (
        lambda tensors: make.spoiled(
            with_more("alpha", np.float32([3e38]))(tensors), "lora_B.weight", 1000
        ),
        "numbers in .*alpha / rank times, that are infinite or NaN",
    ),
    "no rank": (
        lambda tensors: {
            name: value[..., :0] if "lora_B" in name else value[:0]
            for name, value in tensors.items()
        },
        "of two ranks: get it again",
    ),
    "a rank above all sizes of the weight": (
        lambda tensors: {
            name: np.concatenate([value] * 300, axis=-1 if "lora_B" in name else 0)
            for name, value in tensors.items()
        },
        r"of rank \d+, for a weight of .*, which is no LoRA's: get it from a source",
    ),
    "two adapters": (
        lambda tensors: (
            tensors
            | {name.replace(".weight", ".second.weight"): value for name, value in tensors.items()}
        ),
        "which are for the same weight: take one LoRA for each file",
    ),
}


# Options of PEFT, and the sentence by which they are refused.
LAYER = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
BAD_OPTIONS = {
    "a list": ([], "is no object with names and values"),
    "nothing": (None, "is no object with names and values"),
    "a text for an alpha": ({"lora_alpha": "8"}, "'8' for an alpha, which is no number"),
    "an alpha that is NaN": ({"lora_alpha": np.nan}, "nan for an alpha, which is no number"),
    "an alpha for a float of no size": ({"lora_alpha": 10**400}, "for an alpha, which is no"),
    "alphas that are a list": ({"alpha_pattern": [1]}, r"\[1\] for alpha_pattern: get it again"),
    "an alpha of a layer that is a list": (
        {"alpha_pattern": {"to_q": [1]}},
        r"\[1\] for an alpha, which is no number",
    ),
    "an expression": ({"alpha_pattern": {".*to_q": 1}}, "reads names of layers alone"),
    "half an expression": ({"alpha_pattern": {"(": 1}}, "reads names of layers alone"),
    "an expression without end": (
        {"alpha_pattern": {"(([a-z_0-9.]+)+)+!": 1}},
        "reads names of layers alone",
    ),
}


@pytest.mark.parametrize("how", BAD_OPTIONS)
def test_options_that_are_damaged_are_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    options, message = BAD_OPTIONS[how]
    metadata = {"lora_adapter_metadata": json.dumps(options)}
    file = make.save(load_file(LORAS["diffusers"]), tmp_path / "lora.safetensors", metadata)
    with pytest.raises(ValueError, match=message):
        lora.read_lora(file, params, config)


@pytest.mark.parametrize("name", [LAYER, f"^{LAYER}$", "to_q", "attn1.to_q", r"^.*to_v|to_k", "_q"])
def test_alphas_of_layers_go_by_their_names(models, tmp_path, name):
    params, config, _ = models["shapes-sd"]
    halves = {"lora_A": np.ones((4, 96)), "lora_B": np.ones((96, 4))}
    tensors = {f"unet.{LAYER}.{half}.weight": np.float32(x) for half, x in halves.items()}
    metadata = {
        "lora_adapter_metadata": json.dumps({"unet.lora_alpha": 4, "unet.alpha_pattern": {name: 8}})
    }
    file = make.save(tensors, tmp_path / "lora.safetensors", metadata)
    if "|" in name:
        with pytest.raises(ValueError, match="reads names of layers alone"):
            lora.read_lora(file, params, config)
        return
    (pair,) = lora.read_lora(file, params, config)["unet"].values()
    assert (pair.product[0] == (4 if name == "_q" else 8)).all()


@pytest.mark.parametrize("scale", [np.nan, np.inf, 1e39, jnp.float32(-np.inf)])
def test_a_scale_that_is_no_number_is_refused(models, loras, scale):
    params, _, _ = models["shapes-sd"]
    for add in (merge, attach):
        with pytest.raises(ValueError, match=r"The scale of a LoRA is .*: give a number"):
            add(params, loras["kohya"], scale)


@pytest.mark.parametrize("how", REFUSALS)
def test_a_lora_that_does_not_fit_is_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    change, message = REFUSALS[how]
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
        "options.safetensors": "options.safetensors, in PEFT's options, is damaged, or no JSON",
    }.items():
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            lora.read_lora(tmp_path / name, params, config)
