"""Single files in the original layout, and the commands that write folders."""

from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.numpy import load_file, save_file

import course.convert
import course.lora
import helpers.models
from course import sd
from course.model.files import stack_layers, to_files
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
    assert make.is_same(sd.load(tmp_path / "new")[0], params)


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
