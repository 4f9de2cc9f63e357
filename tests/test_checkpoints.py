"""Which checkpoint a chapter gets: on a CPU, on an accelerator, and if the reader names one."""

import json
import os
import shutil
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import constants, file_download

import helpers
from helpers import checkpoints, models

SD, SDXL = "CompVis/stable-diffusion-v1-4", "stabilityai/stable-diffusion-xl-base-1.0"
KLEIN, KLEIN_BASE = "black-forest-labs/FLUX.2-klein-4B", "black-forest-labs/FLUX.2-klein-base-4B"
PYTORCH_CONFIGS = {
    # Named after PyTorch's class, whose weights may lie in the same repository.
    SD: {"_class_name": "StableDiffusionPipeline", "sample_size": 64},
    SDXL: {"_class_name": "StableDiffusionXLPipeline", "sample_size": 128},
    KLEIN: {"_class_name": "Flux2KleinPipeline", "sample_size": 1024, "is_distilled": True},
    KLEIN_BASE: {"_class_name": "Flux2KleinPipeline", "sample_size": 1024, "is_distilled": False},
}
KLEIN_SIZES = {
    "flux-2-klein-4b.safetensors": 7_750_000_000,  # all parts once more, as one file
    "transformer/diffusion_pytorch_model.safetensors": 7_750_000_000,
    "text_encoder/model-00001-of-00002.safetensors": 4_970_000_000,
    "text_encoder/model-00002-of-00002.safetensors": 3_080_000_000,
    "vae/diffusion_pytorch_model.safetensors": 168_000_000,
}


@pytest.fixture
def accelerator(monkeypatch):
    """A function that pretends that JAX runs on devices with so many GiB of memory."""

    def accelerator(memory: float, platform: str = "tpu") -> None:
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(checkpoints, "_device_memory", lambda: int(memory * 2**30))

    return accelerator


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that has all models; its attribute `sizes` has the sizes of files, in bytes.

    The disk has room for them, whatever this machine's has.
    """
    hub = SimpleNamespace(sizes={checkpoints.FLAX_WEIGHTS: 1_720_000_000, "unet/other.bin": 10**12})

    def model_info(self, hub_id, **options):
        files = [SimpleNamespace(rfilename=name, size=size) for name, size in hub.sizes.items()]
        return SimpleNamespace(siblings=files)

    def snapshot_download(hub_id, **options):
        content = PYTORCH_CONFIGS[hub_id] | {"block_out_channels": [128, 256, 512, 512]}
        folder = tmp_path / "snapshot"
        for name in ("model_index.json", "unet/config.json", "vae/config.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return str(folder)

    monkeypatch.setattr(checkpoints.HfApi, "model_info", model_info)
    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "free_disk", lambda folder: 10**12)
    return hub


@pytest.fixture
def ask_at(monkeypatch, tmp_path):
    """A function that makes the Hub's client ask at an address."""
    template = file_download.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)

    def ask_at(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", address + template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    return ask_at


@pytest.fixture
def no_hub(ask_at):
    ask_at("http://127.0.0.1:9")


@pytest.fixture
def with_safetensors(tmp_path):
    """A folder with the bundled configurations, and safetensors in place of Flax weights."""
    source = helpers.bundled_checkpoint("shapes-sd").source
    folder = shutil.copytree(source, tmp_path / "model")
    for file in folder.rglob("*.msgpack"):
        file.rename(file.with_name("diffusion_pytorch_model.safetensors"))
    return str(folder)


# What is chosen


@pytest.mark.parametrize("model", ["sd", "sdxl", "flux2"])
def test_a_cpu_run_says_so_and_takes_the_bundled_checkpoint(capsys, model):
    assert helpers.pick_checkpoint(model) == helpers.bundled_checkpoint(f"shapes-{model}")
    said = capsys.readouterr().out
    assert said.startswith(f"This is a CPU run: using the bundled checkpoint shapes-{model},")


@pytest.mark.parametrize(
    ("model", "hub_id", "revision", "pixels"),
    [("sd", SD, "bf16", 512), ("sdxl", SDXL, "main", 1024)],
)
def test_an_accelerator_with_the_memory_gets_the_real_model_in_bfloat16(
    hub, accelerator, capsys, model, hub_id, revision, pixels
):
    accelerator(memory=16)
    chosen = helpers.pick_checkpoint(model)
    assert (chosen.source, chosen.revision, chosen.dtype) == (hub_id, revision, jnp.bfloat16)
    assert (chosen.height, chosen.width) == (pixels, pixels)
    name = f"{hub_id} at revision {revision!r}"
    said = f"Loading {name} will download 1.7 GB.\nUsing {name}.\n"
    assert capsys.readouterr().out == said


def test_an_accelerator_with_the_memory_gets_flux2_klein(hub, accelerator, capsys):
    hub.sizes = KLEIN_SIZES
    accelerator(memory=15.75)  # a TPU v5e
    chosen = helpers.pick_checkpoint("flux2", safetensors=True)
    assert (chosen.source, chosen.revision, chosen.dtype) == (KLEIN, "main", jnp.bfloat16)
    assert (chosen.height, chosen.width) == (1024, 1024)
    assert (chosen.num_inference_steps, chosen.guidance_scale) == (4, 1.0)
    assert "will download 16.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "platform", "memory", "reason"),
    [
        ("sd", "tpu", 4, f"{SD} takes 6 GiB of memory, and each device has 4.0 GiB"),
        ("sdxl", "gpu", 8, f"{SDXL} takes 14 GiB of memory, and each device has 8.0 GiB"),
        ("flux2", "tpu", 12, f"{KLEIN} takes 15 GiB of memory, and each device has 12.0 GiB"),
        ("flux2", "gpu", 11, f"{KLEIN} takes 15 GiB of memory, and each device has 11.0 GiB"),
        ("sd", "tpu", 0, f"{SD} takes 6 GiB of memory, and the devices do not tell theirs"),
    ],
)
def test_an_accelerator_without_the_memory_gets_the_bundled_checkpoint(
    hub, accelerator, capsys, model, platform, memory, reason
):
    accelerator(memory, platform)
    assert helpers.pick_checkpoint(model) == helpers.bundled_checkpoint(f"shapes-{model}")
    assert capsys.readouterr().out.startswith(f"{reason}: using the bundled checkpoint")


def test_an_accelerator_without_the_hub_gets_the_bundled_checkpoint(no_hub, accelerator, capsys):
    accelerator(memory=16)
    assert helpers.pick_checkpoint() == helpers.bundled_checkpoint("shapes-sd")
    (said,) = capsys.readouterr().out.splitlines()
    assert "the Hugging Face Hub cannot be reached (is the internet switched on?): using" in said


# What the reader names


@pytest.fixture
def choose(monkeypatch):
    """A function that sets TUTORIAL_CHECKPOINT and picks."""

    def choose(choice: str, *arguments, **keywords) -> helpers.Checkpoint:
        monkeypatch.setenv("TUTORIAL_CHECKPOINT", choice)
        return helpers.pick_checkpoint(*arguments, **keywords)

    return choose


def test_a_bundled_name_is_taken_wherever_it_runs(choose, accelerator, capsys):
    accelerator(memory=16)
    chosen = choose("shapes-sd")
    assert (chosen.name, chosen.dtype) == ("shapes-sd", jnp.float32)
    assert capsys.readouterr().out == "TUTORIAL_CHECKPOINT is set: using shapes-sd.\n"


def test_the_word_bundled_gives_each_model_its_own(choose, accelerator):
    accelerator(memory=16)
    chosen = [choose("bundled", model).name for model in ("sd", "sdxl")]
    assert chosen == ["shapes-sd", "shapes-sdxl"]


def test_a_folder_is_taken(choose):
    folder = helpers.bundled_checkpoint("shapes-sdxl").source
    assert choose(folder, "sdxl").source == folder


def test_a_readers_folder_is_for_bfloat16_unless_it_runs_on_a_cpu(
    choose, accelerator, with_safetensors
):
    assert choose(with_safetensors, safetensors=True).dtype == jnp.float32
    accelerator(memory=16)
    assert choose(with_safetensors, safetensors=True).dtype == jnp.bfloat16


def test_a_bundled_folder_by_its_path_is_in_its_own_dtype(choose, accelerator):
    accelerator(memory=16)
    folder = helpers.bundled_checkpoint("shapes-sdxl").source
    assert choose(folder, "sdxl").dtype == jnp.float32


def test_a_bundled_folder_may_be_given_from_where_one_stands(choose, accelerator, monkeypatch):
    accelerator(memory=16)
    monkeypatch.chdir(helpers.find_data("checkpoints"))
    chosen = choose("./shapes-sdxl", "sdxl")
    assert chosen.is_bundled and chosen.dtype == jnp.float32


def test_a_hub_id_is_taken_with_its_revision(choose, hub):
    chosen = choose(f"{SD}@other")
    assert (chosen.source, chosen.revision) == (SD, "other")
    assert chosen.dtype == jnp.float32, "as this is a CPU"


# What is chosen, for which chapter, the sizes of files on the Hub if not usual, the sentence.
FOR_FLAX = r"is made for .*, and this chapter teaches Flax"
NOTHING = r"no folder, no Hub id \(owner/name\), and no bundled"
KINDS = "holds no pipeline with Flax weights or safetensors"
REFUSALS = {
    "XL": ("shapes-sdxl", ("sd",), None, FOR_FLAX),
    "SD": ("shapes-sd", ("sdxl",), None, FOR_FLAX),
    "a folder": (helpers.bundled_checkpoint("shapes-sd").source, ("sdxl",), None, FOR_FLAX),
    "XL on the Hub": (SDXL, ("sd",), None, FOR_FLAX),
    "FLUX.2": ("shapes-flux2", ("sd",), None, FOR_FLAX),
    "not FLUX.2": (
        "shapes-sd",
        ("flux2", True),
        None,
        "and this chapter teaches Flux2KleinPipeline: set",
    ),
    "no weights": (SD, ("sd", True), {"unet/weights.bin": 10**9}, KINDS),
    "no FLUX.2 weights": (
        KLEIN,
        ("flux2", True),
        {"unet/weights.bin": 10**9},
        "holds no pipeline with safetensors: choose",
    ),
    "a wrong name": ("shapes-sd15", (), None, NOTHING),
    "a wrong folder": ("./nowhere/at-all", (), None, NOTHING),
    "a wrong path": ("/nowhere", (), None, NOTHING),
    "too large a model": (
        SD,
        (),
        {checkpoints.FLAX_WEIGHTS: 10**18},
        r"needs 1000000000\.0 GB of disk, .* set HF_HOME",
    ),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_chapter_cannot_load_is_refused_in_a_sentence(choose, hub, what):
    choice, chapter, sizes, sentence = REFUSALS[what]
    if sizes:
        hub.sizes = sizes
    with pytest.raises(RuntimeError, match=sentence):
        choose(choice, *chapter)


def test_the_base_of_flux2_klein_gets_more_steps_and_guidance(choose, hub):
    hub.sizes = KLEIN_SIZES
    chosen = choose(KLEIN_BASE, "flux2", safetensors=True)
    assert (chosen.num_inference_steps, chosen.guidance_scale) == (50, 4.0)


def test_safetensors_are_for_the_later_chapters(choose, hub, with_safetensors):
    hub.sizes = {"unet/model.fp16.safetensors": 10**9}
    for choice in (with_safetensors, SD):
        with pytest.raises(RuntimeError, match="has safetensors, which the chapters from 9 on"):
            choose(choice)
        assert choose(choice, safetensors=True).source == choice


def test_a_folder_without_weights_is_refused(choose, tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps(PYTORCH_CONFIGS[SD]))
    with pytest.raises(RuntimeError, match=KINDS):
        choose(str(tmp_path), safetensors=True)


def test_a_folder_says_which_model_it_holds(tmp_path):
    for model in ("sd", "sdxl", "flux2"):
        assert models.which_model(models.find_model(f"shapes-{model}")) == model
    with pytest.raises(RuntimeError, match=r"model_index\.json is missing: give a whole folder"):
        models.which_model(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    with pytest.raises(RuntimeError, match="is made for FluxPipeline, and this course has models"):
        models.which_model(tmp_path)
    (tmp_path / "model_index.json").write_text('{"_class_name":')
    with pytest.raises(RuntimeError, match=r"model_index\.json is damaged"):
        models.which_model(tmp_path)
    (tmp_path / "model_index.json").write_text('{"a":' * 10**5)
    with pytest.raises(RuntimeError, match=r"model_index\.json is damaged"):
        models.which_model(tmp_path)
    os.truncate(tmp_path / "model_index.json", 2**36)
    with pytest.raises(RuntimeError, match="has 68719 MB, which no configuration has: get it"):
        models.which_model(tmp_path)
    (tmp_path / "model_index.json").unlink()
    os.mkfifo(tmp_path / "model_index.json")
    with pytest.raises(RuntimeError, match=r"model_index\.json is missing: give a whole folder"):
        models.which_model(tmp_path)


def test_without_the_hub_nothing_else_is_taken_in_its_place(choose, no_hub):
    with pytest.raises(RuntimeError, match="cannot be reached"):
        choose(SD)


@pytest.mark.parametrize(
    ("status", "code", "name"),
    [
        (404, "RepoNotFound", "RepositoryNotFoundError"),
        (404, "RevisionNotFound", "RevisionNotFoundError"),
        (403, "GatedRepo", "GatedRepoError"),
        (500, "", "HfHubHTTPError"),
    ],
)
def test_what_the_hub_does_not_give_is_said_with_what_to_do(
    choose, serve, ask_at, status, code, name
):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with serve(Refusing) as address:
        ask_at(address)
        with pytest.raises(RuntimeError) as refused:
            choose("owner/model")
        said = f"The Hub does not give owner/model at revision 'main' ({name}): look at {address}/"
        assert str(refused.value).startswith(said)


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="no model 'flux' in this course: choose one of sd, sdxl"):
        helpers.pick_checkpoint("flux")


# Bundled checkpoints


def test_an_unknown_bundled_checkpoint_lists_the_known_ones():
    with pytest.raises(
        ValueError,
        match="'sd15': choose one of shapes-few, shapes-flux2, shapes-sd, shapes-sdxl",
    ):
        helpers.bundled_checkpoint("sd15")


SETTINGS = {
    "shapes-sd": (15, 3.0),
    "shapes-sdxl": (15, 3.0),
    "shapes-flux2": (8, 3.0),
    "shapes-few": (4, 1.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_bundled_checkpoint_describes_itself(name):
    checkpoint = helpers.bundled_checkpoint(name)
    assert (checkpoint.height, checkpoint.width, checkpoint.dtype) == (64, 64, jnp.float32)
    assert (checkpoint.num_inference_steps, checkpoint.guidance_scale) == SETTINGS[name]
    assert len(checkpoint.prompts) == 8


# Downloads


def test_what_is_on_the_hub_is_downloaded_without_what_no_chapter_reads(choose, hub, monkeypatch):
    asked = {}

    def snapshot_download(hub_id, revision, **patterns):
        asked.update(patterns, source=(hub_id, revision))
        return "/some/folder"

    chosen = choose(f"{SD}@bf16")
    monkeypatch.setattr(models, "snapshot_download", snapshot_download)
    assert str(helpers.download(chosen)) == "/some/folder"
    assert asked["source"] == (SD, "bf16")
    assert "safety_checker/*" in asked["ignore_patterns"]
