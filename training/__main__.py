"""Make the bundled checkpoints from nothing: ``make checkpoints``.

Every part is seeded and resumable: run the same command again after an interruption, and it goes on.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import diffusers
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from training import autoencoder, card, convert, diffusion, scenes, sd, sdxl, tokenizer

ROOT = Path(__file__).resolve().parents[1]
CHECKPOINTS = ROOT / "checkpoints"
AUTOENCODER_STEPS = 3_000
SEED = 0
# The checkpoints of a recipe: what is appended to its name, and the type in which the parameters are stored.
PUBLISHED = {"shapes-sd": {"": "float32", "-bf16": "bfloat16"}, "shapes-sdxl": {"": "float32"}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "training", help="folder to resume from")
    parser.add_argument("--to", type=Path, default=CHECKPOINTS, help="folder for the checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the UNets: faster, needs a C++ compiler")
    parser.add_argument("--shorten", type=int, default=1, metavar="N", help="an Nth of all steps, to try the way out")
    arguments = parser.parse_args()
    # Each would say many times that its Flax classes will go.
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    device = torch.device(arguments.device)
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    words = tokenizer.write(work / "tokenizer")
    vae, vae_log = autoencoder.train(work, steps=AUTOENCODER_STEPS // arguments.shorten, seed=SEED, device=device)

    def train(recipe: diffusion.Recipe, **settings) -> tuple[torch.nn.ModuleDict, dict]:
        shorter = replace(recipe, **{k: getattr(recipe, k) // arguments.shorten for k in ("steps", "cooldown")})
        return diffusion.train(shorter, vae, words, work, device=device, compiled=arguments.compile, **settings)

    first, first_log = train(sd.FIRST, seed=SEED)
    trained = []
    for recipe, logs, seed in ((sd.RECIPE, [first_log], SEED + 1), (sdxl.RECIPE, [], SEED)):
        parts, log = train(recipe, earlier=first, seed=seed)
        record = {
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {device.type}",
            "torch": torch.__version__,
            "autoencoder": vae_log,
            "diffusion": [*logs, log],
        }
        trained.append((recipe, parts, record))
    # Only now, because drawing and judging takes minutes, which a run that was interrupted would spend again.
    for recipe, parts, record in trained:
        publish(recipe, vae.cpu(), parts.cpu(), words, record, work, arguments.to)


def publish(
    recipe: diffusion.Recipe,
    vae: torch.nn.Module,
    parts: torch.nn.ModuleDict,
    words: transformers.CLIPTokenizer,
    record: dict,
    work: Path,
    to: Path,
) -> None:
    """Convert, score and describe what was trained."""
    vae, parts = vae.float(), parts.float()
    rng = np.random.default_rng(SEED)
    choices = sorted(scenes.held_out())
    unseen = np.stack([scenes.render(scenes.random_scene(rng, *choices[k % len(choices)])) for k in range(512)])
    record["parameters"] = {
        name: sum(p.numel() for p in part.parameters()) for name, part in {"vae": vae, **parts}.items()
    }
    record["psnr"] = autoencoder.reconstruction_psnr(vae, unseen).tolist()

    reports = {}
    for suffix, dtype in PUBLISHED[recipe.name].items():
        name = recipe.name + suffix
        shutil.rmtree(to / name, ignore_errors=True)
        convert.to_flax(vae, parts, words, to / name, jnp.dtype(dtype))
        command = [sys.executable, "-m", "training.evaluate", str(to / name), "--dtype", dtype]
        command += ["--judge", "2000", "--variety", "--nearest"] if dtype == "float32" else []
        command += ["--negative", "1000"] if recipe is sdxl.RECIPE else []
        command += ["--draw", str(to / name)]
        reports[name] = json.loads(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    (work / f"record-{recipe.name}.json").write_text(json.dumps({"record": record, "reports": reports}))
    card.write(to, record, reports)


if __name__ == "__main__":
    main()
