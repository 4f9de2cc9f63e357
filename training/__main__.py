"""Make the bundled checkpoints from nothing: ``make checkpoints``.

Every part is seeded and resumable: run the same command again after an interruption, and it goes on.
"""

import argparse
import json
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch

from training import autoencoder, card, convert, diffusion, scenes, tokenizer

ROOT = Path(__file__).resolve().parents[1]
STEPS = {"autoencoder": 4_000, "diffusion": 6_000}
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "training", help="folder to resume from")
    parser.add_argument("--to", type=Path, default=ROOT / "checkpoints", help="folder for the checkpoints")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for part, steps in STEPS.items():
        parser.add_argument(f"--{part}-steps", type=int, default=steps, help=f"default: {steps}")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    words = tokenizer.write(work / "tokenizer")
    vae, vae_log = autoencoder.train(work, steps=arguments.autoencoder_steps, seed=SEED, device=device)
    parts, log = diffusion.train(vae, words, work, steps=arguments.diffusion_steps, seed=SEED, device=device)
    pytorch_folder = work / "pytorch"
    convert.save_pytorch(vae.cpu(), parts["text_encoder"].cpu(), parts["unet"].cpu(), words, pytorch_folder)

    rng = np.random.default_rng(SEED)
    choices = sorted(scenes.held_out())
    unseen = np.stack([scenes.render(scenes.random_scene(rng, *choices[k % len(choices)])) for k in range(512)])
    record = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {device.type}",
        "torch": torch.__version__,
        "autoencoder": vae_log,
        "diffusion": log,
        "parameters": {name: sum(p.numel() for p in part.parameters()) for name, part in {"vae": vae, **parts}.items()},
        "psnr": autoencoder.reconstruction_psnr(vae, unseen).tolist(),
    }
    (work / "training.json").write_text(json.dumps(record))

    reports = {}
    for name, dtype in (("shapes-sd", "float32"), ("shapes-sd-bf16", "bfloat16")):
        shutil.rmtree(arguments.to / name, ignore_errors=True)
        convert.to_flax(pytorch_folder, arguments.to / name, jnp.dtype(dtype))
        command = [sys.executable, "-m", "training.evaluate", str(arguments.to / name), "--dtype", dtype]
        extra = ["--variety", "--judge", "2000"] if dtype == "float32" else []
        reports[name] = json.loads(subprocess.run([*command, *extra], stdout=subprocess.PIPE, check=True).stdout)
    card.write(arguments.to, record, reports)

    fixture = ROOT / "tests" / "fixtures" / "pytorch_pictures.npz"
    subprocess.run([sys.executable, "-m", "training.pytorch_pictures", str(pytorch_folder), str(fixture)], check=True)


if __name__ == "__main__":
    main()
