"""Make the bundled checkpoints from nothing: ``make checkpoints``.

Every part is seeded and resumable: run the same command again after an interruption, and it goes
on. The checkpoints' cards, README.md, are written by hand. When the training has ended,
``python -m training.evaluate FOLDER --draw FOLDER`` gives a card's scores and pictures.
"""

import argparse
import json
import platform
from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from matplotlib.figure import Figure
from torch import nn

from course.shapes import scenes
from training import autoencoder, convert, diffusion, export, flow, sd, sdxl, tokenizer

ROOT = Path(__file__).resolve().parents[1]
SEED = 0
MOST_SHORTENED = 1_000  # beyond this, the autoencoder has fewer scenes than a batch


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="folder to resume from (default: build/training, or build/shortened-N)",
    )
    parser.add_argument(
        "--to",
        type=Path,
        help="folder for the checkpoints (default: checkpoints, or with --shorten in WORK)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", action="store_true", help="compile the UNets: faster, needs a C++ compiler"
    )
    parser.add_argument(
        "--shorten",
        type=int,
        default=1,
        metavar="N",
        help="an Nth of all steps and scenes, to try the way from end to end",
    )
    arguments = parser.parse_args()
    if not 1 <= arguments.shorten <= MOST_SHORTENED:
        parser.error(f"--shorten is {arguments.shorten}: choose from 1 to {MOST_SHORTENED}.")
    if arguments.shorten > 1:
        arguments.work = arguments.work or ROOT / "build" / f"shortened-{arguments.shorten}"
        arguments.to = arguments.to or arguments.work / "checkpoints"
    else:
        arguments.work = arguments.work or ROOT / "build" / "training"
        arguments.to = arguments.to or ROOT / "checkpoints"
    return arguments


def main() -> None:
    arguments = parse_arguments()
    # Each would say many times that its Flax classes will go.
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    device = torch.device(arguments.device)
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)

    words = tokenizer.write(work / "tokenizer")
    vae, vae_log = autoencoder.train(
        work,
        steps=autoencoder.STEPS // arguments.shorten,
        pool_size=autoencoder.POOL // arguments.shorten,
        seed=SEED,
        device=device,
    )

    def train(
        recipe: diffusion.Recipe, earlier: nn.ModuleDict | None, seed: int
    ) -> tuple[nn.ModuleDict, dict]:
        recipe = replace(
            recipe,
            steps=recipe.steps // arguments.shorten,
            cooldown=recipe.cooldown // arguments.shorten,
            pool_size=recipe.pool_size // arguments.shorten,
        )
        return diffusion.train(
            recipe,
            vae,
            words,
            work,
            earlier=earlier,
            seed=seed,
            device=device,
            compiled=arguments.compile,
        )

    # Both checkpoints start from the first model.
    first, first_log = train(sd.FIRST, earlier=None, seed=SEED)
    parts, log = train(sd.RECIPE, earlier=first, seed=SEED + 1)
    xl_parts, xl_log = train(sdxl.RECIPE, earlier=first, seed=SEED)

    vae = vae.cpu().float()
    parts = parts.cpu().float()
    xl_parts = xl_parts.cpu().float()
    to = arguments.to
    convert.to_flax(vae, parts, words, to / "shapes-sd")
    convert.to_flax(vae, xl_parts, words, to / "shapes-sdxl")
    runs = {"autoencoder": [vae_log], "UNet": [first_log, log]}
    draw_losses(runs, to / "shapes-sd" / "loss.png")
    draw_losses({"UNet": [xl_log]}, to / "shapes-sdxl" / "loss.png")

    train_flow(work / flow.WORK.name, to / "shapes-flux2", arguments.shorten)

    psnr = autoencoder.reconstruction_psnr(vae, unseen_pictures(512))
    record = {
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {device.type}",
        "torch": torch.__version__,
        "parameters": {
            "autoencoder": count_parameters({"vae": vae}),
            "shapes-sd": count_parameters(parts),
            "shapes-sdxl": count_parameters(xl_parts),
        },
        "autoencoder": vae_log,
        "shapes-sd": [first_log, log],
        "shapes-sdxl": [xl_log],
        "psnr": {"mean": float(psnr.mean()), "worst": float(psnr.min())},
    }
    (work / "record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"Wrote the checkpoints into {to}, and what the cards say of training into {work}.")


def train_flow(work: Path, folder: Path, shorten: int) -> None:
    """Train the small FLUX.2, and write it as ``python -m training.export`` does.

    Its VAE is the one in ``checkpoints/shapes-sd``, where ``make checkpoints`` has just put it.
    """
    recipe = flow.Recipe()
    recipe = replace(
        recipe,
        steps=recipe.steps // shorten,
        cooldown=recipe.cooldown // shorten,
        pool=recipe.pool // shorten,
        pairs=recipe.pairs // shorten,
    )
    average = flow.train(work, recipe)
    numbers = flow.prepare(work, recipe)
    vae = flow.vae_parameters(numbers["mean"], numbers["variance"])
    export.export(average | {"vae": vae}, folder)


def unseen_pictures(count: int) -> np.ndarray:
    """Scenes of held-out combinations: uint8, (count, 64, 64, 3)."""
    rng = np.random.default_rng(SEED)
    choices = sorted(scenes.held_out())
    pictures = []
    for k in range(count):
        color, shape, background = choices[k % len(choices)]
        pictures.append(scenes.render(scenes.random_scene(rng, color, shape, background)))
    return np.stack(pictures)


def count_parameters(parts: dict[str, nn.Module]) -> dict[str, int]:
    return {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}


def draw_losses(logs: dict[str, list[dict]], file: Path) -> None:
    """Draw a curve for each part, of all its runs one after another."""
    figure = Figure(figsize=(4 * len(logs), 2.8), layout="tight")
    axes = figure.subplots(1, len(logs), squeeze=False)[0]
    for ax, (title, runs) in zip(axes, logs.items(), strict=True):
        before = 0
        for log in runs:
            steps = [before + step for step in log["steps"]]
            ax.semilogy(steps, log["loss"], linewidth=1, color="C0")
            before = steps[-1]
        ax.set(title=title, xlabel="step", ylabel="loss, mean of 50 steps")
        ax.grid(alpha=0.3, which="both")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    main()
