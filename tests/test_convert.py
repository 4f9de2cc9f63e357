"""Single files in the original layout, and the commands that write folders."""

import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

import course.convert
import course.lora
import helpers.models
from course import flux2, sd
from course.flux2 import convert as flux2_convert
from course.model.files import stack_layers, to_channels_first, to_files, unstack_layers
from course.model.singles import Layout
from course.sd import convert
from helpers import bundled_checkpoint
from tests.makers import common
from tests.makers import files as make

SOURCES = {name: Path(bundled_checkpoint(name).source) for name in ("shapes-sd", "shapes-sdxl")}
SD = SOURCES["shapes-sd"]
LORA = SD.parent / "loras" / "star-for-heart.safetensors"


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
            theirs, rows = convert.original_name(part, name, configurations[model])
            assert [theirs, rows and rows.taken[0]] == expected


def test_names_and_rows_of_flux2_are_those_that_diffusers_reads(small_flux2):
    _, config, _ = small_flux2
    recorded = common.read_json("klein/recorded")["rows"]
    for part, names in (("transformer", "original"), ("vae", "comfy")):
        shapes = unstack_layers(flux2.parameter_shapes(config)[part])
        unread = [name for name in shapes if name.startswith("bn.")]  # by diffusers' function
        assert recorded[part].keys() == shapes.keys() - set(unread)
        for name, expected in recorded[part].items():
            theirs, rows = flux2_convert.name_in_layout(Layout("", names), part, name, config)
            count = to_channels_first(name, np.empty(shapes[name].shape, np.int8)).shape[0]
            taken = np.arange(rows.whole(count) if rows else count)
            taken = rows.take(taken) if rows else taken
            assert [theirs, taken[0], taken[count // 2]] == expected


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
    assert make.is_same(sd.load(tmp_path / "new")[0], params)


def read_all(folder):
    """All parameters in the files of a folder, by their parts and names."""
    code = flux2 if (folder / "transformer").is_dir() else sd
    return code.read_files(folder, code.read_config(folder))


def is_same_model(folder, other):
    """Whether two folders have the same parameters."""
    found, expected = read_all(folder), read_all(other)
    for part, values in expected.items():
        for name, value in values.items():
            if not np.array_equal(found[part][name], value) and name != "lm_head.weight":
                return False
    return found.keys() == expected.keys()


@pytest.mark.parametrize("model", ["sd", "flux2"])
def test_a_folder_becomes_single_files_and_a_folder_again(
    folder, flux2_folder, model, tmp_path, capsys
):
    source = flux2_folder if model == "flux2" else folder
    files, new = tmp_path / "files", tmp_path / "new"
    run_command(course.convert, source, files)
    arguments = [files / "model.safetensors"]
    if model == "flux2":
        arguments = [files / "transformer.safetensors", "--vae", files / "vae.safetensors"]
        arguments += ["--text-encoder", files / "text_encoder.safetensors"]
    assert {file.name for file in files.iterdir()} == {
        Path(x).name for x in arguments if str(x).startswith(str(files))
    }
    run_command(course.convert, arguments[0], new, *arguments[1:], "--like", source)
    assert "with so many parameters" in capsys.readouterr().out
    assert is_same_model(new, source)
    code = flux2 if model == "flux2" else sd
    _, config, tokenize = code.load(new)
    assert config == code.read_config(source)
    _, _, before = code.load(source)
    assert jax.tree.all(jax.tree.map(np.array_equal, tokenize(["a star"]), before(["a star"])))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SD, "out", "--vae", SD], "is a whole model, to which --vae adds nothing"),
        (["model.safetensors", "out"], "has no configuration: give a model of the same kind by"),
        (["model.SFT", "out"], "model.SFT has no configuration: give a model of the same kind by"),
    ],
)
def test_options_that_say_nothing_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_command(course.convert, *arguments, status=1)
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_options_for_stable_diffusion_are_refused_for_flux2(flux2_folder, tmp_path, capsys):
    run_command(course.convert, flux2_folder, tmp_path / "files")
    file = tmp_path / "files" / "transformer.safetensors"
    for option, message in {
        "--text-encoder-2": "is a model without text_encoder_2: leave that option out",
        "--prediction=epsilon": "predicts velocities: leave out --prediction",
    }.items():
        more = [option, file] if option.endswith("2") else [option]
        others = ["--vae", flux2_folder, "--text-encoder", flux2_folder, "--like", flux2_folder]
        run_command(course.convert, file, tmp_path / "new", *more, *others, status=1)
        assert message in capsys.readouterr().err


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


def test_no_command_writes_over_the_model_that_it_reads(folder, tmp_path, capsys):
    source = shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "link").symlink_to(source)
    run_command(course.convert, source, tmp_path / "files")
    before = {file: file.read_bytes() for file in source.rglob("*") if file.is_file()}
    file = tmp_path / "files" / "model.safetensors"
    for out in (source, source / "new", tmp_path / "link"):
        run_command(course.lora, source, out, LORA, status=1)
        run_command(course.convert, file, out, "--like", source, status=1)
        run_command(course.convert, file, out, "--like", SD, "--vae", source, status=1)
        run_command(course.convert, source, out, status=1)
        said = capsys.readouterr().err
        assert said.count("would change that model: give a different folder.\n") == 4
    assert {file: file.read_bytes() for file in source.rglob("*") if file.is_file()} == before


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("no network"), OSError()])
def test_without_a_network_a_hub_id_ends_in_a_sentence(error, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(helpers.models, "snapshot_download", fail)
    message = "owner/name cannot be had, as the Hugging Face Hub cannot be reached"
    run_command(course.lora, "owner/name", "out", LORA, status=1)
    assert message in capsys.readouterr().err
    run_command(course.convert, "file", "out", "--like", "owner/name", status=1)
    assert message in capsys.readouterr().err


def test_a_scale_that_is_no_number_is_refused_by_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        run_command(course.lora, SD, "out", "lora.safetensors=much")
    sentence = "the scale of lora.safetensors is 'much': give a finite number"
    assert sentence in capsys.readouterr().err


REFUSALS = {
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


@pytest.mark.parametrize("how", REFUSALS)
def test_a_bad_single_file_is_refused_in_a_sentence(models, tmp_path, how):
    params, config, _ = models["shapes-sd"]
    change, message = REFUSALS[how]
    file = tmp_path / "model.safetensors"
    write_single_file(params, config, file)
    save_file(change(load_file(file)), file)
    with pytest.raises(ValueError, match=message):
        convert.read_single_file(file, config)


@pytest.fixture
def old_vae(models):
    """The tensors of a VAE whose attention is convolutions of one pixel, as it was before 2023."""
    tensors = to_files(models["shapes-sd"][0]["vae"])
    for name, value in tensors.items():
        if ".attentions.0." in name and value.ndim == 2:
            tensors[name] = value[:, :, None, None]
    return tensors


def read_with_vae(model, tensors, place):
    """Read a single file with the VAE of a folder."""
    params, config, _ = model
    (place / "vae").mkdir()
    save_file(tensors, place / "vae" / "diffusion_pytorch_model.safetensors")
    write_single_file(params, config, place / "model.safetensors")
    return convert.read_single_file(place / "model.safetensors", config, vae=place / "vae")


def test_a_vae_folder_may_have_convolutions_in_its_attention(models, old_vae, tmp_path):
    model = models["shapes-sd"]
    found = read_with_vae(model, old_vae, tmp_path)
    assert make.is_same(stack_layers(found["vae"]), model[0]["vae"])


def test_a_vae_folder_of_a_different_model_is_refused(models, old_vae, tmp_path):
    other = old_vae | {"encoder.conv_in.bias": np.zeros(3, np.float32)}
    sentence = r"\(3,\) for encoder.conv_in.bias, .* its vae is that of a different model. Take a"
    with pytest.raises(ValueError, match=sentence):
        read_with_vae(models["shapes-sd"], other, tmp_path)
