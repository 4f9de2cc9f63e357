"""pick_checkpoint and bundled_checkpoint, with a local server in the Hub's place."""

import json
import shutil
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlparse

import jax
import jax.numpy as jnp
import pytest
from huggingface_hub import constants, file_download

import helpers

ROOT = Path(__file__).resolve().parents[1]
SHA = "0123456789abcdef0123456789abcdef01234567"
WEIGHTS = "unet/diffusion_flax_model.msgpack"
CONFIGS = {
    "model_index.json": json.dumps({"_class_name": "FlaxStableDiffusionPipeline"}),
    "unet/config.json": json.dumps({"sample_size": 64}),
    "vae/config.json": json.dumps({"block_out_channels": [128, 256, 512, 512]}),
}
SD, SDXL = "CompVis/stable-diffusion-v1-4", "stabilityai/stable-diffusion-xl-base-1.0"
CONFIGS_OF_SDXL = {
    # Named after PyTorch's class, whose weights lie in the same repository.
    "model_index.json": json.dumps({"_class_name": "StableDiffusionXLPipeline"}),
    "unet/config.json": json.dumps({"sample_size": 128, "addition_embed_type": "text_time"}),
}


SIZES = {WEIGHTS: 1_720_000_000, "text_encoder/flax_model.msgpack": 246_000_000, "unet/big.bin": 10**12}
SIZES_ELSEWHERE = {
    "owner/torch-only": {"unet/weights.safetensors": 10**9},
    "owner/huge": {WEIGHTS: 10**18},
    SDXL: SIZES | {WEIGHTS: 10_300_000_000, "text_encoder_2/flax_model.msgpack": 2_780_000_000},
}
REVISIONS = {SD: {"bf16", "main"}, SDXL: {"main"}, "owner/gated": {"main"}, "owner/huge": {"main"}}
REVISIONS |= {"owner/torch-only": {"main"}}
NO_HUB = "http://127.0.0.1:9"
PATH_ON_THE_HUB = file_download.HUGGINGFACE_CO_URL_TEMPLATE.removeprefix(constants.ENDPOINT)


class FakeHub(BaseHTTPRequestHandler):
    """Answers the calls that pick_checkpoint makes as the Hub does, for a handful of repositories."""

    def refuse(self, status, code):
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def give(self, text, **headers):
        body = text.encode()
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self):
        path = unquote(urlparse(self.path).path).strip("/")
        parts = path.split("/")
        api = parts[:2] == ["api", "models"]
        repository = "/".join(parts[2:4] if api else parts[:2])
        if repository == "owner/broken":
            return self.refuse(500, "")
        if repository not in REVISIONS:
            return self.refuse(404, "RepoNotFound")
        if path.endswith("auth-check"):
            return self.refuse(403, "GatedRepo") if repository == "owner/gated" else self.give("{}")
        revision = parts[5] if api else parts[3]
        if revision not in REVISIONS[repository]:
            return self.refuse(404, "RevisionNotFound")
        if api:
            sizes = SIZES_ELSEWHERE.get(repository, SIZES)
            files = [{"rfilename": name, "size": size} for name, size in sizes.items()]
            return self.give(json.dumps({"id": repository, "sha": SHA, "siblings": files}))
        file = "/".join(parts[4:])
        configs = CONFIGS | (CONFIGS_OF_SDXL if repository == SDXL else {})
        if file not in configs:
            return self.refuse(404, "EntryNotFound")
        return self.give(configs[file], X_Repo_Commit=SHA, ETag=f'"{file.replace("/", "-")}"')

    do_HEAD = do_GET  # noqa: N815  (a name that http.server looks for)


@pytest.fixture(scope="module")
def hub(serve):
    with serve(FakeHub) as address:
        yield address


@pytest.fixture
def pick(monkeypatch, tmp_path, capsys):
    """Call pick_checkpoint on an accelerator with so many GiB, or without; what it said and chose, or raised."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def pick(endpoint, choice="", memory=None, model="sd", safetensors=False):
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + PATH_ON_THE_HUB)
        monkeypatch.setenv("TUTORIAL_CHECKPOINT", choice)
        if memory is not None:
            monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
            monkeypatch.setattr(helpers.checkpoints, "_device_memory", lambda: memory * 2**30)
        try:
            chosen = helpers.pick_checkpoint(model, safetensors)
        except RuntimeError as error:
            chosen = error
        said = capsys.readouterr()
        assert said.err == ""
        return said.out.rstrip("\n"), chosen

    return pick


def test_a_cpu_run_says_so_and_takes_the_bundled_checkpoint(pick):
    said, chosen = pick(NO_HUB)
    assert said.startswith("This is a CPU run: using the bundled checkpoint shapes-sd")
    assert chosen == helpers.bundled_checkpoint("shapes-sd")


def test_an_accelerator_with_the_memory_gets_stable_diffusion_in_bfloat16(pick, hub):
    said, chosen = pick(hub, memory=16)
    assert said == f"Using {SD} at revision 'bf16', 2.0 GB to download."
    assert (chosen.source, chosen.revision, chosen.dtype) == (SD, "bf16", jnp.bfloat16)
    assert (chosen.height, chosen.width, chosen.download_bytes) == (512, 512, 1_966_000_000)


def test_an_accelerator_with_more_memory_gets_xl(pick, hub):
    said, chosen = pick(hub, memory=16, model="sdxl")
    assert said == f"Using {SDXL} at revision 'main', 13.3 GB to download."
    assert (chosen.source, chosen.revision, chosen.dtype) == (SDXL, "main", jnp.bfloat16)
    assert (chosen.height, chosen.width, chosen.download_bytes) == (1024, 1024, 13_326_000_000)


def test_without_the_memory_for_xl_its_bundled_relative_is_taken(pick, hub):
    said, chosen = pick(hub, memory=8, model="sdxl")
    assert said.startswith(f"{SDXL} takes 14 GiB of memory, and each device has 8.0 GiB: using the bundled checkpoint")
    assert chosen == helpers.bundled_checkpoint("shapes-sdxl")
    assert pick(NO_HUB, model="sdxl")[1] == chosen


@pytest.mark.parametrize(
    ("choice", "model", "found"),
    [
        ("shapes-sdxl", "sd", "FlaxStableDiffusionXLPipeline"),
        ("shapes-sd", "sdxl", "FlaxStableDiffusionPipeline"),
        (helpers.bundled_checkpoint("shapes-sd").source, "sdxl", "FlaxStableDiffusionPipeline"),
        (SDXL, "sd", "StableDiffusionXLPipeline"),
        (f"{SD}@bf16", "sdxl", "FlaxStableDiffusionPipeline"),
    ],
    ids=["name of XL", "name", "folder", "XL on the Hub", "on the Hub"],
)
def test_a_checkpoint_for_another_architecture_is_refused_in_one_sentence(pick, hub, choice, model, found):
    _, error = pick(hub, choice=choice, memory=16, model=model)
    wanted = {"sd": "FlaxStableDiffusionPipeline", "sdxl": "FlaxStableDiffusionXLPipeline"}[model]
    assert isinstance(error, RuntimeError)
    assert f"is made for {found}, and this chapter teaches {wanted}" in str(error)
    assert f"set TUTORIAL_CHECKPOINT to shapes-{model} or" in str(error)
    assert "\n" not in str(error)


def test_a_checkpoint_for_xl_is_taken_where_xl_is_taught(pick, hub):
    assert pick(NO_HUB, choice="shapes-sdxl", model="sdxl")[1] == helpers.bundled_checkpoint("shapes-sdxl")
    assert pick(hub, choice=SDXL, model="sdxl")[1].source == SDXL


def test_an_accelerator_without_the_memory_says_so(pick, hub):
    said, chosen = pick(hub, memory=4)
    assert said.startswith(f"{SD} takes 6 GiB of memory, and each device has 4.0 GiB: using the bundled")
    assert chosen.name == "shapes-sd"


def test_an_accelerator_without_the_hub_says_so_in_one_line(pick):
    said, chosen = pick(NO_HUB, memory=16)
    assert "the Hugging Face Hub cannot be reached" in said
    assert "using the bundled checkpoint shapes-sd" in said
    assert "\n" not in said
    assert chosen.name == "shapes-sd"


def test_a_bundled_name_is_taken_wherever_it_runs(pick, hub):
    said, chosen = pick(hub, choice="shapes-sd-bf16", memory=16)
    assert said == "TUTORIAL_CHECKPOINT is set: using shapes-sd-bf16."
    assert (chosen.name, chosen.dtype) == ("shapes-sd-bf16", jnp.bfloat16)


def test_a_folder_is_taken(pick, checkpoint):
    assert pick(NO_HUB, choice=checkpoint.source)[1].source == checkpoint.source


def test_a_hub_id_is_taken_with_its_revision(pick, hub):
    _, chosen = pick(hub, choice=f"{SD}@bf16")
    assert (chosen.source, chosen.revision, chosen.dtype) == (SD, "bf16", jnp.float32), "float32, as this is a CPU"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (f"{SD}@flux", f"The Hub does not give {SD} at revision 'flux': Revision Not Found"),
        ("owner/gated", "Cannot access gated repo"),
        ("owner/missing", "Repository Not Found"),
        ("owner/huge", "needs 1000000000.0 GB of disk"),
        ("owner/torch-only", "it has no Flax weights"),
        # An answer that is no file is passed on.
        ("owner/broken", "The Hub does not give owner/broken at revision 'main': 500 Server Error"),
        ("shapes", "TUTORIAL_CHECKPOINT is 'shapes': no folder, no Hub id (owner/name), and no bundled checkpoint"),
        ("./nowhere/at-all", "no folder, no Hub id"),
    ],
)
def test_an_explicit_choice_that_cannot_be_had_is_one_sentence(pick, hub, choice, message):
    _, error = pick(hub, choice=choice, memory=16)
    assert isinstance(error, RuntimeError)
    assert message in str(error)
    assert "\n" not in str(error)


def test_an_explicit_choice_without_the_hub_does_not_fall_back(pick):
    _, error = pick(NO_HUB, choice=f"{SD}@bf16", memory=16)
    assert isinstance(error, RuntimeError)
    assert "cannot be reached" in str(error)


def test_a_folder_without_flax_weights_is_refused(pick, tmp_path):
    _, error = pick(NO_HUB, choice=str(tmp_path))
    assert isinstance(error, RuntimeError)
    assert "holds no pipeline with Flax weights" in str(error)


@pytest.fixture
def with_safetensors(tmp_path):
    """A folder with the bundled configurations, and safetensors in place of Flax weights."""
    folder = shutil.copytree(ROOT / "checkpoints" / "shapes-sd", tmp_path / "model")
    for file in folder.rglob("*.msgpack"):
        file.rename(file.with_name("diffusion_pytorch_model.safetensors"))
    return folder


def test_safetensors_are_for_the_later_chapters(pick, hub, with_safetensors):
    for source, choice in (NO_HUB, str(with_safetensors)), (hub, "owner/torch-only"):
        _, error = pick(source, choice=choice)
        assert isinstance(error, RuntimeError)
        assert "safetensors, which the chapters from 11 on read" in str(error)
    _, chosen = pick(NO_HUB, choice=str(with_safetensors), safetensors=True)
    assert (chosen.source, chosen.height, chosen.download_bytes) == (str(with_safetensors), 64, 0)
    _, chosen = pick(hub, choice="owner/torch-only", safetensors=True)
    assert (chosen.source, chosen.revision) == ("owner/torch-only", "main")
    assert chosen.download_bytes == sum(SIZES_ELSEWHERE["owner/torch-only"].values())


def test_an_accelerator_that_does_not_tell_its_memory_says_so(pick, hub):
    said, _ = pick(hub, memory=0)
    assert "each device has an unknown amount: using the bundled" in said


def test_an_unknown_model_lists_the_known_ones():
    with pytest.raises(ValueError, match="no model 'flux' in this course: choose one of sd, sdxl"):
        helpers.pick_checkpoint("flux")


def test_an_unknown_bundled_checkpoint_lists_the_known_ones():
    with pytest.raises(ValueError, match="'sd15': choose one of shapes-sd, shapes-sd-bf16, shapes-sdxl"):
        helpers.bundled_checkpoint("sd15")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("shapes-sd", jnp.float32), ("shapes-sd-bf16", jnp.bfloat16), ("shapes-sdxl", jnp.float32)],
)
def test_a_bundled_checkpoint_describes_itself(name, dtype):
    checkpoint = helpers.bundled_checkpoint(name)
    assert (checkpoint.height, checkpoint.num_inference_steps, checkpoint.guidance_scale) == (64, 15, 3.0)
    assert checkpoint.dtype == dtype
    assert len(checkpoint.prompts) == 8
    assert checkpoint.download_bytes == 0
