"""pick_checkpoint and bundled_checkpoint, with a local server in the Hub's place."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from urllib.parse import unquote, urlparse

import jax.numpy as jnp
import pytest

import helpers

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
def pick(tmp_path):
    """Call pick_checkpoint in a new process, on an accelerator with so many GiB or none; what it printed and chose."""

    def pick(endpoint, choice="", memory=None, model="sd"):
        code = "import helpers, jax\n"
        if memory is not None:
            code += (
                f"jax.default_backend = lambda: 'tpu'\nhelpers.checkpoints._device_memory = lambda: {memory} * 2**30\n"
            )
        code += (
            f"try:\n    c = helpers.pick_checkpoint({model!r})\n"
            "    print(c.source, c.revision, c.dtype.__name__, sep='|', end='|')\n"
            "    print(c.height, c.width, c.download_bytes, c.license, sep='|')\n"
            "except Exception as error:\n    print(type(error).__name__, error, sep='|')"
        )
        environment = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        environment |= {"TUTORIAL_CHECKPOINT": choice, "HF_HUB_DISABLE_TELEMETRY": "1"}
        result = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=120
        )
        assert result.stderr == ""
        *said, chosen = result.stdout.strip().splitlines()
        return "\n".join(said), chosen.split("|")

    return pick


NO_HUB = "http://127.0.0.1:9"


def test_a_cpu_run_says_so_and_takes_the_bundled_checkpoint(pick):
    said, chosen = pick(NO_HUB)
    assert said.startswith("This is a CPU run: using the bundled checkpoint shapes-sd")
    assert chosen[0].endswith("shapes-sd")
    assert chosen[1:] == ["None", "float32", "64", "64", "0", "Apache-2.0"]


def test_an_accelerator_with_the_memory_gets_stable_diffusion_in_bfloat16(pick, hub):
    said, chosen = pick(hub, memory=16)
    assert said == f"Using {SD} at revision 'bf16', 2.0 GB to download."
    assert chosen == [SD, "bf16", "bfloat16", "512", "512", "1966000000", "CreativeML OpenRAIL-M"]


def test_an_accelerator_with_more_memory_gets_xl(pick, hub):
    said, chosen = pick(hub, memory=16, model="sdxl")
    assert said == f"Using {SDXL} at revision 'main', 13.3 GB to download."
    assert chosen == [SDXL, "main", "bfloat16", "1024", "1024", "13326000000", "OpenRAIL++-M"]


def test_without_the_memory_for_xl_its_bundled_relative_is_taken(pick, hub):
    said, chosen = pick(hub, memory=8, model="sdxl")
    assert said.startswith(f"{SDXL} takes 14 GiB of memory, and each device has 8.0 GiB: using the bundled checkpoint")
    assert chosen[0].endswith("shapes-sdxl")
    assert pick(NO_HUB, model="sdxl")[1][0].endswith("shapes-sdxl")


@pytest.mark.parametrize(
    ("choice", "model", "found"),
    [
        ("shapes-sdxl", "sd", "FlaxStableDiffusionXLPipeline"),
        ("shapes-sd", "sdxl", "FlaxStableDiffusionPipeline"),
        ("folder", "sdxl", "FlaxStableDiffusionPipeline"),
        (SDXL, "sd", "StableDiffusionXLPipeline"),
        (f"{SD}@bf16", "sdxl", "FlaxStableDiffusionPipeline"),
    ],
)
def test_a_checkpoint_for_another_architecture_is_refused_in_one_sentence(pick, hub, checkpoint, choice, model, found):
    choice = checkpoint.source if choice == "folder" else choice
    _, (kind, text) = pick(hub, choice=choice, memory=16, model=model)
    wanted = {"sd": "FlaxStableDiffusionPipeline", "sdxl": "FlaxStableDiffusionXLPipeline"}[model]
    assert kind == "RuntimeError"
    assert f"is made for {found}, and this chapter teaches {wanted}" in text
    assert f"set TUTORIAL_CHECKPOINT to shapes-{model} or" in text
    assert "\n" not in text


def test_a_checkpoint_for_xl_is_taken_where_xl_is_taught(pick, hub):
    assert pick(NO_HUB, choice="shapes-sdxl", model="sdxl")[1][0].endswith("shapes-sdxl")
    assert pick(hub, choice=SDXL, model="sdxl")[1][0] == SDXL


def test_an_accelerator_without_the_memory_says_so(pick, hub):
    said, chosen = pick(hub, memory=4)
    assert said.startswith(f"{SD} takes 6 GiB of memory, and each device has 4.0 GiB: using the bundled")
    assert chosen[0].endswith("shapes-sd")


def test_an_accelerator_without_the_hub_says_so_in_one_line(pick):
    said, chosen = pick(NO_HUB, memory=16)
    assert "the Hugging Face Hub cannot be reached" in said
    assert "using the bundled checkpoint shapes-sd" in said
    assert len(said.splitlines()) == 1
    assert chosen[0].endswith("shapes-sd")


def test_a_bundled_name_is_taken_wherever_it_runs(pick, hub):
    said, chosen = pick(hub, choice="shapes-sd-bf16", memory=16)
    assert said == "TUTORIAL_CHECKPOINT is set: using shapes-sd-bf16."
    assert chosen[0].endswith("shapes-sd-bf16")
    assert chosen[2] == "bfloat16"


def test_a_folder_is_taken(pick, checkpoint):
    _, chosen = pick(NO_HUB, choice=checkpoint.source)
    assert chosen[0] == checkpoint.source


def test_a_hub_id_is_taken_with_its_revision(pick, hub):
    _, chosen = pick(hub, choice=f"{SD}@bf16")
    assert chosen[:3] == [SD, "bf16", "float32"]  # float32, because this is a CPU


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (f"{SD}@flux", f"{SD} has no revision 'flux'"),
        ("owner/gated", "owner/gated at revision 'main' is gated: accept its licence at"),
        ("owner/missing", "The Hub has no repository owner/missing, or it is private"),
        ("owner/huge", "needs 1000000000.0 GB of disk"),
        ("owner/torch-only", "it has no Flax weights"),
        ("shapes", "TUTORIAL_CHECKPOINT is 'shapes': no folder, no Hub id (owner/name), and no bundled checkpoint"),
        ("./nowhere/at-all", "no folder, no Hub id"),
    ],
)
def test_an_explicit_choice_that_cannot_be_had_is_one_sentence(pick, hub, choice, message):
    _, (kind, text) = pick(hub, choice=choice, memory=16)
    assert kind == "RuntimeError"
    assert message in text
    assert "\n" not in text


def test_an_explicit_choice_without_the_hub_does_not_fall_back(pick):
    _, (kind, text) = pick(NO_HUB, choice=f"{SD}@bf16", memory=16)
    assert kind == "RuntimeError"
    assert "cannot be reached" in text


def test_a_folder_without_flax_weights_is_refused(pick, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    _, (kind, text) = pick(NO_HUB, choice=str(folder))
    assert kind == "RuntimeError"
    assert "holds no pipeline with Flax weights" in text


def test_an_accelerator_that_does_not_tell_its_memory_says_so(pick, hub):
    said, _ = pick(hub, memory=0)
    assert "each device has an unknown amount: using the bundled" in said


def test_an_answer_of_the_hub_that_is_no_file_is_passed_on(pick, hub):
    _, (kind, text) = pick(hub, choice="owner/broken")
    assert kind == "RuntimeError"
    assert text.startswith("The Hub does not give owner/broken at revision 'main': 500 Server Error")


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
    assert (checkpoint.height, checkpoint.num_inference_steps, checkpoint.guidance_scale) == (64, 30, 3.0)
    assert checkpoint.dtype == dtype
    assert len(checkpoint.prompts) == 8
    assert checkpoint.download_bytes == 0
