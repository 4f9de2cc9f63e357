"""Making the bundled checkpoints, in small: it needs PyTorch (``make .venv-train/installed``)."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import flux2
import stable_diffusion
from shapes import scenes
from stable_diffusion.unet import project_text, unet
from stable_diffusion.vae import decode

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from training import (  # noqa: E402
    autoencoder,
    convert,
    diffusion,
    evaluate,
    flow,
    loop,
    sd,
    sdxl,
    tokenizer,
)

ROOT = Path(__file__).resolve().parents[1]


def test_a_run_that_was_cut_off_takes_the_same_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "SAVE_EVERY", 4)
    calls = 0

    def train(folder, stop_at=None):
        nonlocal calls
        calls = 0

        def loss_fn(model, generator):
            nonlocal calls
            calls += 1
            if calls == stop_at:
                raise KeyboardInterrupt
            x = torch.randn((8, 3), generator=generator)
            return (model(x) - x.sum(1, keepdim=True)).square().mean()

        torch.manual_seed(0)
        return loop.fit(
            torch.nn.Linear(3, 1),
            loss_fn,
            name="line",
            folder=folder,
            steps=10,
            peak_lr=0.1,
            cooldown=5,
            seed=1,
            device=torch.device("cpu"),
        )

    whole, log = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "cut", stop_at=7)
    resumed, resumed_log = train(tmp_path / "cut")
    assert calls == 6, "four steps were saved"
    assert torch.equal(resumed.weight, whole.weight)
    assert resumed_log["steps"] == log["steps"] == [10]


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    rates = [loop.learning_rate(step, steps=1000, peak=2.0, cooldown=400) for step in range(1001)]
    assert rates[:50] == sorted(rates[:50]) and rates[0] == 2.0 / loop.WARMUP
    assert set(rates[loop.WARMUP : 600]) == {2.0}
    assert rates[800] == pytest.approx(1.0) and rates[1000] == pytest.approx(0.0)


def test_captions_name_nothing_everything_or_something():
    scene = scenes.Scene("small", "red", "heart", "white")
    generator = torch.Generator().manual_seed(0)
    named = [diffusion.random_attributes(scene, generator) for _ in range(2_000)]
    counts = np.array([sum(value is not None for value in each.values()) for each in named])
    assert (counts == 0).mean() == pytest.approx(diffusion.EMPTY_CAPTIONS, abs=0.03)
    # All four are named by half of the captions, and by some of those that may leave things out.
    some = 1 - diffusion.EMPTY_CAPTIONS - diffusion.FULL_CAPTIONS
    full = diffusion.FULL_CAPTIONS + some * (1 - diffusion.DROPPED_ATTRIBUTES) ** 4
    assert (counts == 4).mean() == pytest.approx(full, abs=0.03)


def test_latents_are_white_and_pictures_stay_what_they_were():
    torch.manual_seed(0)
    model = autoencoder.AutoencoderKL(**autoencoder.CONFIG).eval()
    pictures = np.stack([scenes.render(scene) for scene in scenes.training_scenes(16, 0)])
    pictures = autoencoder.to_signed(pictures)

    def latents_and_restored():
        with torch.no_grad():
            latents = model.encode(pictures).latent_dist.mean
            std, mean = torch.std_mean(latents, dim=(0, 2, 3), keepdim=True)
            return latents, std, mean

    latents, std, mean = latents_and_restored()
    with torch.no_grad():
        before = model.decode((latents - mean) / std).sample
    autoencoder.normalize_latents(model, pictures)
    latents, std, mean = latents_and_restored()
    with torch.no_grad():
        after = model.decode(latents).sample
    channels = latents.transpose(0, 1).flatten(1)
    np.testing.assert_allclose(torch.cov(channels), np.eye(4), atol=1e-3)
    np.testing.assert_allclose(mean.flatten(), 0, atol=1e-4)
    np.testing.assert_allclose(after, before, atol=1e-3)


@pytest.mark.parametrize("recipe", [sd.RECIPE, sdxl.RECIPE], ids=lambda recipe: recipe.name)
def test_what_is_converted_computes_what_pytorch_computes(tmp_path, recipe):
    torch.manual_seed(0)
    words = tokenizer.write(tmp_path / "tokenizer")
    vae = autoencoder.AutoencoderKL(**autoencoder.CONFIG).eval()
    parts = recipe.build(words).eval()
    convert.to_flax(vae, parts, words, tmp_path / "folder", jnp.float32)

    captions = ["a red heart", "a small blue star on a white background"]
    ids = words(captions, padding="max_length").input_ids
    noisy = torch.randn((2, 4, 8, 8))
    timesteps = torch.tensor([10, 900])
    with torch.no_grad():
        condition = recipe.condition(parts, torch.tensor(ids), captions, torch.Generator())
        velocity = parts["unet"](noisy, timesteps, **condition).sample
        picture = vae.decode(noisy).sample / 2 + 0.5

    params, config, tokenize = stable_diffusion.load(tmp_path / "folder")
    assert tokenize(captions)[:, 0].tolist() == ids
    context, pooled = stable_diffusion.encode_prompts(params, config, tokenize(captions))
    sizes = jnp.array(sdxl.SIZES)
    condition = project_text(params["unet"], config.unet, context, pooled, sizes)
    latents = jnp.moveaxis(jnp.asarray(noisy.numpy()), 1, -1)
    found = unet(params["unet"], config.unet, latents, jnp.asarray(timesteps.numpy()), condition)
    np.testing.assert_allclose(np.moveaxis(found, -1, 1), velocity, atol=2e-4)
    drawn = decode(params["vae"], config.vae, latents)
    np.testing.assert_allclose(np.moveaxis(drawn, -1, 1), picture.clamp(0, 1), atol=2e-4)


def test_a_copy_of_a_training_picture_is_found(monkeypatch):
    monkeypatch.setattr(diffusion, "POOL", 20_000)
    pool = {}
    for scene in scenes.training_scenes(diffusion.POOL, diffusion.POOL_SEED):
        words = scenes.caption(scene.size, scene.color, scene.shape, scene.background)
        pool[words] = scenes.render(scene) / np.float32(255)

    found = evaluate.nearest(lambda captions: np.stack([pool[text] for text in captions]), None)
    assert found["median distance"] == 0
    assert found["median distance of fresh scenes"] > 0.05


@pytest.fixture(scope="module")
def shortened(tmp_path_factory):
    """The checkpoints of a run of a few steps for each part."""
    folder = tmp_path_factory.mktemp("training")
    command = [sys.executable, "-m", "training", "--shorten", "1000"]
    subprocess.run([*command, "--work", folder], cwd=ROOT, check=True)
    return folder / "checkpoints"


@pytest.mark.parametrize("name", ["shapes-sd", "shapes-sd-bf16", "shapes-sdxl"])
def test_a_shortened_run_writes_folders_that_load(shortened, name):
    dtype = jnp.bfloat16 if name.endswith("bf16") else jnp.float32
    params, config, tokenize = stable_diffusion.load(shortened / name, dtype)
    assert all(x.dtype == dtype for x in jax.tree.leaves(params))
    draw = jax.jit(stable_diffusion.generate, static_argnames=stable_diffusion.STATIC)
    images = draw(
        params, config, tokenize(["a red heart"]), jax.random.key(0), tokenize([""]), steps=1
    )
    assert images.shape == (1, 64, 64, 3) and jnp.isfinite(images).all()
    shipped = ROOT / "checkpoints" / name
    for file in shipped.rglob("*.json"):
        assert (shortened / name / file.relative_to(shipped)).exists(), file


def test_a_shortened_run_trains_the_small_flux2_too(shortened):
    _, config, _ = flux2.load(shortened / "shapes-flux2", jnp.float32)
    assert config == flow.CONFIG
    shipped = ROOT / "checkpoints" / "shapes-flux2"
    for file in (*shipped.rglob("*.json"), *shipped.rglob("*.safetensors")):
        assert (shortened / "shapes-flux2" / file.relative_to(shipped)).exists(), file
    log = (shortened.parent / "flux2" / "log.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["step"] == flow.Recipe().steps // 1000


def test_a_checkpoint_is_scored_and_its_samples_are_drawn(shortened, tmp_path):
    command = [sys.executable, "-m", "training.evaluate", shortened / "shapes-sd"]
    command += ["--pictures", "4", "--steps", "1", "--draw", tmp_path]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    assert report["held-out combinations"]["pictures"] == 4
    assert 0 <= report["training captions"]["all"] <= 1
    assert (tmp_path / "samples.png").exists()
