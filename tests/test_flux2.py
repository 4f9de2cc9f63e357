"""flux2/ against PyTorch's classes, part by part and as a whole, and its files and devices.

``python -m tests.makers.flux2_parts`` recorded what diffusers' and transformers' classes say: of
FLUX.2-klein-4B the names and shapes, and of a small checkpoint with made-up parameters the numbers.
"""

import json
import shutil
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from course import flux2
from course.flux2 import in_turn, offload, transformer, vae
from course.model.files import to_channels_last, to_files, unstack_layers
from course.model.quantize import quantize
from tests.makers import files as make
from tests.makers.common import FIXTURES, made_up_input

TOLERANCE = 2e-5  # for numbers of order 1
STEPS = 3
PARTS = ("transformer", "text_encoder", "vae")


@pytest.fixture(scope="module")
def recorded():
    return np.load(FIXTURES / "flux2_parts.npz")


@pytest.fixture(scope="module")
def folder(flux2_folder):
    return flux2_folder


@pytest.fixture(scope="module")
def model(small_flux2):
    return small_flux2


@pytest.fixture(scope="module")
def prompts(recorded):
    return recorded["prompts"].tolist()


def farthest(found, expected):
    """The largest difference of any two numbers."""
    assert found.shape == expected.shape
    return np.abs(np.asarray(found, np.float32) - np.asarray(expected, np.float32)).max()


def channels_last(x):
    return np.moveaxis(x, 1, -1)


# Names and shapes.


def read_names(part):
    """Names and shapes of a part of FLUX.2-klein-4B in files, each block by its number."""
    names = json.loads((FIXTURES / "flux2_names.json").read_text())[part]
    found = {}
    for name, shape in names.items():
        before, _, rest = name.partition("{")
        count, _, after = rest.partition("}")
        for number in range(int(count or 1)):
            found[f"{before}{number}{after}" if count else name] = tuple(shape)
    return found


def declared(part):
    """Names and shapes of the same part here, each block by its number."""
    shapes = flux2.parameter_shapes(flux2.Config())[part]
    return {name: value.shape for name, value in unstack_layers(shapes).items()}


@pytest.mark.parametrize("part", PARTS)
def test_names_and_shapes_are_those_of_flux2_klein_4b(part):
    expected = read_names(part)
    for name, shape in declared(part).items():
        turned = to_channels_last(name, np.broadcast_to(0, expected[name]))
        assert shape == turned.shape, name


def test_all_is_read_but_the_text_encoders_last_quarter_and_its_head():
    unread = {part: read_names(part).keys() - declared(part).keys() for part in PARTS}
    assert unread["transformer"] == set()
    assert unread["vae"] == {"bn.num_batches_tracked"}
    layers = {name for name in unread["text_encoder"] if name.startswith("model.layers.")}
    assert unread["text_encoder"] - layers == {"model.norm.weight", "lm_head.weight"}
    assert {int(name.split(".")[2]) for name in layers} == set(range(27, 36))
    assert len(layers) == 9 * 11, "all of each layer"


# Parts.


@pytest.mark.parametrize(
    ("name", "rows", "columns", "texts", "references"),
    [("small", 3, 5, 7, 0), ("with references", 4, 2, 11, 2)],
)
def test_a_velocity_is_that_of_pytorchs_transformer(
    model, recorded, name, rows, columns, texts, references
):
    params, config, _ = model
    places = [flux2.positions(rows, columns, number) for number in range(references + 1)]
    places = np.concatenate(places)

    @jax.jit
    def run(p, image, text, time):
        where = flux2.text_positions(texts)
        return flux2.velocity(p, config.transformer, image, text, time, places, where)

    found = run(
        params["transformer"],
        made_up_input(f"image {name}", 2, len(places), 32),
        made_up_input(f"text {name}", 2, texts, 120),
        jnp.float32([1.0, 0.3]),
    )
    assert farthest(found, recorded[f"velocity {name}"]) <= TOLERANCE


def test_a_velocity_takes_the_attention_that_is_given(model):
    params, config, _ = model
    heads = config.transformer.num_attention_heads, config.transformer.attention_head_dim
    seen = []

    def spy(query, key, value, score_dtype):
        seen.append((query.shape, score_dtype))
        return value

    def run(attend):
        image, text = made_up_input("image", 2, 15, 32), made_up_input("text", 2, 7, 120)
        places = flux2.positions(3, 5), flux2.text_positions(7)
        arguments = params["transformer"], config.transformer, image, text, jnp.ones(2), *places
        return jax.eval_shape(lambda: flux2.velocity(*arguments, attend=attend))

    run(spy)
    assert seen == [((2, 22, *heads), jnp.float32)] * 2  # in blocks of two streams, and of one
    with pytest.raises(ValueError, match="The splash kernel runs on TPUs only, and this is a cpu"):
        run("splash")
    with pytest.raises(ValueError, match="no attention 'flash': choose one of automatic, splash,"):
        run("flash")


@pytest.fixture(scope="module")
def flow_map(model):
    """The same model with a second embedder, which is like the one of the time."""
    params, config, tokenize = model
    config = replace(config, transformer=replace(config.transformer, guidance_embeds=True))
    p = dict(params["transformer"])
    for name in list(p):
        if name.startswith(transformer.TIME):
            p[name.replace(transformer.TIME, transformer.SECOND_TIME)] = p[name]
    return params | {"transformer": p}, config, tokenize


def test_a_flow_map_adds_the_embedded_time_that_it_goes_to(model, flow_map):
    params, config, _ = flow_map
    now, then = jnp.float32([1.0, 0.6]), jnp.float32([0.5, 0.0])

    def embed(*times):
        return transformer.embed_time(params["transformer"], config.transformer, *times)

    with pytest.raises(ValueError, match="This transformer is a flow map, and has to be told"):
        embed(now)
    both = embed(now, then)
    assert farthest(both, embed(now, now)) > 1e-3
    params, config, _ = model
    np.testing.assert_allclose(both, embed(now) + embed(then), atol=1e-6)
    with pytest.raises(ValueError, match="This transformer is no flow map"):
        embed(now, then)


def test_a_flow_map_that_does_not_heed_where_it_goes_draws_what_its_velocity_draws(
    model, flow_map, prompts
):
    params, config, tokenize = flow_map
    last = f"{transformer.SECOND_TIME}.linear_2.weight"
    p = params["transformer"]
    heedless = params | {"transformer": p | {last: jnp.zeros_like(p[last])}}
    guided = {"guidance": 2.0, "empty": tokenize([""])}
    expected = draw(model, prompts, 24, 40, **guided)
    assert farthest(draw((heedless, config, tokenize), prompts, 24, 40, **guided), expected) < 1e-5
    assert farthest(draw(flow_map, prompts, 24, 40, **guided), expected) > 1e-3


def test_prompts_are_encoded_as_by_pytorchs_text_encoder_padding_too(model, recorded, prompts):
    params, config, tokenize = model
    ids, mask = tokenize(prompts)
    assert not mask.all()
    encode = jax.jit(flux2.encode_prompts, static_argnames="config")
    assert farthest(encode(params, config, ids, mask), recorded["encoded"]) <= TOLERANCE


def test_tokens_of_images_and_images_of_tokens_are_those_of_pytorchs_vae(model, recorded):
    params, config, _ = model
    image = 1 / (1 + np.exp(-made_up_input("image", 2, 3, 16, 24)))
    latents = channels_last(made_up_input("latents", 2, 8, 4, 6))
    deviation = np.sqrt(recorded["bn.running_var"] + config.vae.batch_norm_eps)
    tokens = (vae.pack(latents, config.vae) - recorded["bn.running_mean"]) / deviation

    @jax.jit
    def run(params, image, tokens):
        found = flux2.encode_images(params, config, image)
        return found, flux2.decode(params["vae"], config.vae, tokens, height=16, width=24)

    found, decoded = run(params, channels_last(image), tokens)
    assert farthest(found, recorded["normalized"]) <= TOLERANCE
    assert farthest(decoded, channels_last(recorded["decoded"])) <= TOLERANCE


def test_latents_become_tokens_in_pytorchs_order_and_latents_again(model, recorded):
    config = model[1].vae
    mean = channels_last(recorded["mean"])
    packed = vae.pack(mean, config)
    assert np.array_equal(packed, recorded["packed"])
    assert np.array_equal(vae.unpack(packed, config, height=16, width=24), mean)


def test_times_are_those_of_pytorchs_scheduler(recorded):
    compared = 0
    for name in recorded.files:
        if not name.startswith("times "):
            continue
        match name.split()[1:]:
            case [steps, "by", shift]:
                shift = float(shift)
            case [tokens, steps]:
                shift = flux2.shift_by_size(int(tokens), int(steps))
                assert abs(np.log(shift) - recorded[f"mu {tokens} {steps}"]) < 1e-12
        found = flux2.times(int(steps), shift)
        assert farthest(found, recorded[name]) <= 1e-6, name
        compared += 1
    assert compared == 13


# Whole images.

program = jax.jit(flux2.generate, static_argnames=flux2.STATIC)
SHARE = 0.05 / 255  # by so much of all brightness an image may differ from PyTorch's


def noise_for(prompts, height, width):
    return made_up_input("noise", len(prompts), height * width // 64, 32)


def draw(model, prompts, height, width, **options):
    """Images of prompts from the noise that PyTorch had."""
    params, config, tokenize = model
    noise = noise_for(prompts, height, width)
    ids, mask = tokenize(prompts)
    return program(params, config, ids, mask, noise, height, width, steps=STEPS, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [("distilled", {}), ("shifted by 3", {"shift": 3.0}), ("guided", {"guidance": 4.0})],
)
def test_images_are_those_of_pytorchs_pipeline(model, recorded, prompts, name, options):
    if "guidance" in options:
        options = options | {"empty": model[2]([""])}
    found = draw(model, prompts, 24, 40, **options)
    assert farthest(found, recorded[name] / 65535) <= SHARE


def test_edited_images_are_those_of_pytorchs_pipeline(model, recorded, prompts):
    expected = recorded["edited"] / 65535

    def edit(*numbers):
        images = recorded["pictures"][list(numbers)] / np.float32(255)
        options = {"guidance": 2.5, "empty": model[2]([""]), "images": images}
        return draw(model, prompts, 64, 64, **options)

    assert farthest(edit(0), expected) <= SHARE  # one picture for every prompt
    found = edit(0, 1)  # one for each
    assert farthest(found[0], expected[0]) <= SHARE
    assert farthest(found[1], expected[1]) > 1 / 255


def test_with_two_references_the_image_is_that_of_pytorchs_pipeline(model, recorded, prompts):
    pictures = recorded["pictures"][None] / np.float32(255)  # both for the one prompt
    found = draw(model, prompts[:1], 64, 64, images=pictures)
    assert farthest(found, recorded["two references"] / 65535) <= SHARE


IN_TURN = {
    "guided": {"guidance": 4.0},
    "edited": {"images": 2},
    "of two images": {"images": (1, 2), "batch": 2},
    "in int8": {"int8": True},
    "from the host's memory": {"offload": True, "guidance": 4.0},
    "in int8 from the host's memory": {"offload": True, "int8": True},
}


@pytest.mark.parametrize("options", IN_TURN.values(), ids=IN_TURN)
def test_one_part_after_the_other_draws_what_all_at_once_draw(folder, model, monkeypatch, options):
    params, config, tokenize = model
    prompts = ["a red circle", "a blue star"]
    noise = noise_for(prompts, 64, 64)
    options = dict(options)
    int8, batch = options.pop("int8", False), options.pop("batch", 1)
    offloads = options.pop("offload", False)
    if "images" in options:
        counts = np.atleast_1d(options["images"])  # of images, and of those for a prompt
        options["images"] = made_up_input("images", *counts, 64, 64, 3).clip(0, 1)

    at_once = options | ({"empty": tokenize([""])} if "guidance" in options else {})
    transformer = params["transformer"]
    rounded = params | {"transformer": quantize(transformer) if int8 else transformer}
    expected = draw((rounded, config, tokenize), prompts, 64, 64, **at_once)

    # What lies on the device after a part was read, and that part's own.
    held = []
    before = sum(array.nbytes for array in jax.live_arrays())

    def load(*args, **options):
        read = flux2.load(*args, **options)
        held.append(sum(array.nbytes for array in jax.live_arrays()) - before)
        own = sum(array.nbytes for array in jax.tree.leaves(read[0]))
        assert held[-1] < own + 100_000
        return read

    waited = []

    def wait(p, device):
        waited.append("transformer" if "x_embedder.weight" in p else "text_encoder")
        return offload.blocks_on_host(p, device)

    monkeypatch.setattr(in_turn, "load", load)
    monkeypatch.setattr(in_turn, "blocks_on_host", wait)
    found = flux2.generate_in_turn(
        folder,
        prompts,
        noise,
        64,
        64,
        STEPS,
        **options,
        dtype=jnp.float32,
        int8=int8,
        offload=offloads,
        batch=batch,
    )
    assert waited == (["text_encoder", "transformer"] if offloads else [])
    assert len(held) == (4 if "images" in options else 3)
    # What is rounded to int8 in each step may fall to the other side of a half.
    assert farthest(found, expected) < (3 if int8 else 0.1) / 255


@pytest.mark.parametrize("int8", [False, True])
def test_of_a_part_the_matrices_of_blocks_alone_wait_in_the_hosts_memory(model, int8):
    p = model[0]["transformer"]
    p = quantize(p) if int8 else p
    placed = offload.blocks_on_host(dict(p), jax.devices()[0])
    assert placed.keys() == p.keys()
    waiting = {name for name, value in placed.items() if isinstance(value, offload.Waiting)}
    assert waiting == {name for name, value in p.items() if "*" in name and len(value.shape) == 3}
    for name, value in placed.items():
        matrix = getattr(value, "weight", value)
        matrix = getattr(matrix, "values", matrix)
        kind = matrix.sharding.memory_kind
        assert kind == ("pinned_host" if name in waiting else "device"), name


def test_a_device_without_memory_kinds_is_told_so_before_anything_is_read(folder, monkeypatch):
    monkeypatch.setattr(offload, "HOST", "no kind of memory")
    monkeypatch.setattr(in_turn, "load", None)
    noise = flux2.random_tokens(jax.random.key(0), flux2.read_config(folder), 1, 64, 64)
    with pytest.raises(ValueError, match="keeps no arrays in the host's memory"):
        flux2.generate_in_turn(folder, ["a"], noise, 64, 64, offload=True)


# Files.


def test_a_folder_is_read_as_it_says(folder, tmp_path):
    config = flux2.read_config(folder)
    assert (config.shift, config.is_distilled) == (None, False)
    assert config.text_encoder.read_layers == (2, 4, 6)
    assert config.vae.pixels_per_token == 8
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "scheduler" / "scheduler_config.json"
    make.edit_json(file, lambda found: found | {"use_dynamic_shifting": False})
    make.edit_json(copy / "model_index.json", lambda found: found | {"is_distilled": True})
    config = flux2.read_config(copy)
    assert (config.shift, config.is_distilled) == (3.0, True)


def test_rotary_positions_are_read_where_newer_versions_write_them(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")

    def move(found):
        base = found.pop("rope_theta")
        return found | {"rope_parameters": {"rope_type": "default", "rope_theta": base}}

    make.edit_json(copy / "text_encoder" / "config.json", move)
    assert flux2.read_config(copy) == flux2.read_config(folder)


def test_files_written_of_a_model_have_what_they_were_read_from(model, folder):
    for part, values in model[0].items():
        saved = {}
        for file in (folder / part).glob("*.safetensors"):
            saved |= load_file(file)
        written = to_files(values)
        assert all(np.array_equal(value, saved[name]) for name, value in written.items())
        numbers = sum(value.size for value in values.values())
        assert sum(value.size for value in written.values()) == numbers


@pytest.fixture(scope="module")
def shards(model, folder, tmp_path_factory):
    """The same model in bfloat16, in three files for each part, and what else may lie there.

    That is a file which the index does not name, and an array which is in no block.
    """
    shards = tmp_path_factory.mktemp("shards") / "model"
    shutil.copytree(folder, shards, ignore=shutil.ignore_patterns("*.safetensors"))
    for part, values in model[0].items():
        tensors = to_files(values) | {"of.others": np.zeros(3, np.float32)}
        tensors = {name: value.astype(jnp.bfloat16) for name, value in tensors.items()}
        make.save_in_parts(tensors, shards / part, "model", 3)
    shutil.copy(shards / "tokenizer" / "vocab.json", shards / "vae" / "old.safetensors")
    return shards


def test_a_model_in_bfloat16_and_in_several_files_is_read(model, shards, recorded, prompts):
    found = flux2.load(shards)
    assert found[1] == model[1]
    rounded = jax.tree.map(lambda value: np.asarray(value).astype(jnp.bfloat16), model[0])
    assert make.is_same(found[0], rounded)
    images = draw(found, prompts, 24, 40)
    assert images.dtype == jnp.float32
    assert 0 < 255 * np.abs(images - recorded["distilled"] / 65535).mean() < 3


# What cannot be.


def remove(place):
    return lambda folder: (folder / place).unlink()


def change(part, **changes):
    """Change settings of a part."""
    file = {"scheduler": "scheduler_config", "tokenizer": "tokenizer_config", "": "model_index"}

    def change(folder):
        name = file.get(part, "config")
        make.edit_json(folder / part / f"{name}.json", lambda found: found | changes)

    return change


def change_tokenizer(**changes):
    """Change rules of the tokenizer."""
    return lambda folder: make.edit_json(
        folder / "tokenizer" / "tokenizer.json", lambda found: found | changes
    )


def endless_split():
    """Rules as Qwen's, but with an expression that takes years for a word of sixty letters."""
    split = {"type": "Split", "pattern": {"Regex": "(a|a)*(a|aa)+$"}, "behavior": "Isolated"}
    levels = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split | {"invert": False}, levels]}


def in_8_bits(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = {name: value.astype(jnp.float8_e4m3fn) for name, value in load_file(file).items()}
    save_file(tensors, file)


BAD_FOLDERS = {
    "no model_index.json": (remove("model_index.json"), "is missing: give a whole folder in diff"),
    "no config.json": (remove("vae/config.json"), "vae/config.json is missing"),
    "no scheduler": (
        remove("scheduler/scheduler_config.json"),
        "scheduler_config.json is missing",
    ),
    "no tokenizer": (remove("tokenizer/tokenizer.json"), "tokenizer.json is missing"),
    "a damaged tokenizer": (
        lambda folder: (folder / "tokenizer" / "tokenizer.json").write_text("{}"),
        "tokenizer.json is no tokenizer of this model, as it cuts texts by other rules: get",
    ),
    "a tokenizer without words": (
        change_tokenizer(model={"type": "BPE", "dropout": None}),
        "tokenizer.json is no tokenizer: .* Get it again.",
    ),
    "a tokenizer of another model": (
        change_tokenizer(added_tokens=[]),
        "tokenizer.json has no token .*: it is not Qwen's. Get Qwen3's.",
    ),
    "a tokenizer with an expression that runs for ever": (
        change_tokenizer(pre_tokenizer=endless_split()),
        "tokenizer.json is no tokenizer of this model, as it cuts texts by other rules: get",
    ),
    "a length of prompts that is null": (
        change("tokenizer", model_max_length=None),
        "has None for model_max_length, which is no number of tokens: download",
    ),
    "another pipeline": (
        change("", _class_name="StableDiffusionPipeline"),
        "is made for StableDiffusionPipeline, and this code reads Flux2KleinPipeline",
    ),
    "embedded guidance": (
        change("transformer", guidance_embeds=True),
        r"has nothing for time_guidance_embed\.guidance_embedder\..*, and its configuration means",
    ),
    "another text encoder": (
        change("text_encoder", model_type="mistral3"),
        "asks for model_type = 'mistral3', which this model does not have: it has 'qwen3'",
    ),
    "another scheduler": (
        change("scheduler", use_karras_sigmas=True),
        "asks for use_karras_sigmas = True, which this model does not have: it has False",
    ),
    "rotary positions of another size": (
        change("transformer", axes_dims_rope=[2, 4, 6, 6]),
        r"axes_dims_rope = \(2, 4, 6, 6\), which are not four even numbers that add up to",
    ),
    "scaled rotary positions": (
        change("text_encoder", rope_parameters={"rope_type": "yarn"}),
        "asks for rope_type = 'yarn', which this model does not have: it has 'default'",
    ),
    "more blocks than the configuration means": (
        change("transformer", num_single_layers=2),
        r"has \(.* for single_transformer_blocks\.2\..*, and its configuration means nothing",
    ),
    "fewer blocks than the configuration means": (
        change("transformer", num_single_layers=4),
        r"has nothing for single_transformer_blocks\.3\.attn\..*, and its configuration means \(",
    ),
    "numbers of 8 bits": (
        in_8_bits,
        r"transformer holds numbers of 8 bits \(F8_E4M3, called fp8\): get the file in float16 or",
    ),
}


@pytest.mark.parametrize("how", BAD_FOLDERS)
def test_a_bad_folder_is_refused_in_a_sentence(folder, tmp_path, how):
    spoil, sentence = BAD_FOLDERS[how]
    copy = shutil.copytree(folder, tmp_path / "copy")
    spoil(copy)
    with pytest.raises((FileNotFoundError, ValueError), match=sentence):
        flux2.load(copy)


def test_two_files_with_the_same_parameter_are_refused(shards, tmp_path):
    copy = shutil.copytree(shards, tmp_path / "copy")
    files = [copy / "vae" / f"model-{number:05}-of-00003.safetensors" for number in (1, 2)]
    shutil.copy(*files)
    with pytest.raises(ValueError, match=r"model-00001.* and .*model-00002.* both have .*: remove"):
        flux2.load(copy)


@pytest.mark.parametrize(
    ("prompts", "options", "sentence"),
    [
        (2, {}, "2 prompts and 64 x 64 pixels need noise of the shape"),
        (0, {}, "batch is 1, of 0 prompts: give at least 1 of both"),
        (1, {"batch": 0}, "batch is 0, of 1 prompts"),
        (1, {"images": np.zeros((1, 128, 64, 3), np.float32)}, "and these have 128 x 64: resize"),
        (1, {"images": np.zeros((3, 64, 64, 3), np.float32)}, "There are 3 images to edit and 1 p"),
    ],
)
def test_what_cannot_be_drawn_in_turn_is_refused_before_anything_is_read(
    folder, monkeypatch, prompts, options, sentence
):
    monkeypatch.setattr(in_turn, "load", None)
    noise = flux2.random_tokens(jax.random.key(0), flux2.read_config(folder), 1, 64, 64)
    with pytest.raises(ValueError, match=sentence):
        flux2.generate_in_turn(folder, ["a"] * prompts, noise, 64, 64, **options)


def test_reference_images_for_another_number_of_prompts_are_refused(model):
    params, config, _ = model
    shapes = {"noise": (2, 4, 32), "prompt": (2, 3, 120), "reference": (3, 4, 32)}
    inputs = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match="there must be one for all 2 prompts or one for each"):
        flux2.denoise(params, config, height=16, width=16, **inputs)
    with pytest.raises(ValueError, match="give the empty prompt, encoded: empty=encode_prompts"):
        flux2.denoise(params, config, height=16, width=16, guidance=3.0, **inputs)
