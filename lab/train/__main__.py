"""Make the bundled checkpoints from nothing: ``make checkpoints``.

Every part is seeded and resumable: run the same command again after an interruption, and it goes
on. All models use the VAE that is trained before them, or that of ``checkpoints/shapes-sd`` if
"vae" is not chosen. The bundled checkpoints stay as they are, unless ``--to`` names their folder.

"few-steps" trains shapes-few, a student of shapes-flux2, first by ``reflow`` and from there by
``dmd``, or by one ``--way`` only: see ``lab/train/few_steps.py``. Its teacher is the model that is
trained before it, or the bundled one.

The checkpoints' cards, README.md, are written by hand. When the training has ended,
``python -m lab.cards.sd FOLDER --draw FOLDER`` gives a card's scores and pictures, and
``python -m lab.cards.flux2`` those of shapes-flux2.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp

from course import flux2, sd
from lab.cards.pictures import draw_losses
from lab.train import export, few_steps, flow, loop, unet, vae
from lab.train.data import CHECKPOINTS, ROOT

PARTS = ("vae", "shapes-sd", "shapes-sdxl", "shapes-flux2", "few-steps")
MOST_SHORTENED = 1_000  # beyond this, there are fewer scenes than a batch has


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    add("--work", type=Path, help="folder to resume from (default: build/training)")
    add("--to", type=Path, help="folder for the checkpoints (default: WORK/checkpoints)")
    add(
        "--shorten",
        type=int,
        default=1,
        metavar="N",
        help="an Nth of all steps and scenes, to try the way from end to end",
    )
    both = " and then ".join(few_steps.BUNDLED)
    add("--way", choices=few_steps.WAYS, help=f"of few-steps (default: {both})")
    add("--seed", type=int, default=0, help="of few-steps, for its random numbers (default: 0)")
    add("--earlier", type=Path, metavar="FOLDER", help="of few-steps, a student to start from")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"There is no part {part!r}: choose from {', '.join(PARTS)}.")
    if not 1 <= options.shorten <= MOST_SHORTENED:
        parser.error(f"--shorten is {options.shorten}: choose from 1 to {MOST_SHORTENED}.")
    default = "training" if options.shorten == 1 else f"shortened-{options.shorten}"
    options.parts = options.parts or PARTS
    options.work = options.work or ROOT / "build" / default
    options.to = options.to or options.work / "checkpoints"
    return options


def shorten(recipe: loop.Recipe, by: int) -> loop.Recipe:
    """Return a recipe with a part of the steps and scenes."""
    shorter = replace(
        recipe,
        steps=recipe.steps // by,
        cooldown=recipe.cooldown // by,
        pool=recipe.pool // by,
    )
    if isinstance(recipe, flow.Recipe):
        shorter = replace(shorter, pairs=recipe.pairs // by)
    return shorter


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    work = options.work
    bundled, config, tokenize = sd.load(CHECKPOINTS / "shapes-sd")
    of_vae = bundled["vae"]
    if "vae" in options.parts:
        recipe = shorten(vae.RECIPE, options.shorten)
        of_vae = vae.train(work / "vae", recipe, config.vae)

    if "shapes-sd" in options.parts or "shapes-sdxl" in options.parts:
        recipe = shorten(unet.FIRST, options.shorten)
        first = unet.train(work / "shapes-sd-first", recipe, config, tokenize, of_vae)
    if "shapes-sd" in options.parts:
        recipe = shorten(unet.SD, options.shorten)
        params = unet.train(work / "shapes-sd", recipe, config, tokenize, of_vae, first)
        write(params, options.to / "shapes-sd")
        losses = {"UNet": [work / "shapes-sd-first", work / "shapes-sd"]}
        if "vae" in options.parts:
            losses = {"autoencoder": [work / "vae"]} | losses
        draw_losses(losses, options.to / "shapes-sd" / "loss.png")
    if "shapes-sdxl" in options.parts:
        recipe = shorten(unet.SDXL, options.shorten)
        _, xl, tokenize = sd.load(CHECKPOINTS / "shapes-sdxl")
        params = unet.train(work / "shapes-sdxl", recipe, xl, tokenize, of_vae, first)
        write(params, options.to / "shapes-sdxl")
        draw_losses({"UNet": [work / "shapes-sdxl"]}, options.to / "shapes-sdxl" / "loss.png")
    if "shapes-flux2" in options.parts:
        recipe = shorten(flow.RECIPE, options.shorten)
        params = flow.train(work / "flux2", recipe, flow.CONFIG, of_vae)
        write(params, options.to / "shapes-flux2")
    if "few-steps" in options.parts:
        if "shapes-flux2" in options.parts:
            teacher = params
        else:
            teacher, _, _ = flux2.load(flow.CHECKPOINT, jnp.float32)
        student = None
        if options.earlier:
            student, _, _ = flux2.load(options.earlier, jnp.float32)
        for way in [options.way] if options.way else few_steps.BUNDLED:
            recipe = shorten(few_steps.WAYS[way].recipe, options.shorten)
            recipe = replace(recipe, seed=options.seed)
            folder = work / "few-steps" / f"{way}-{options.seed}"
            student = few_steps.train(folder, recipe, flow.CONFIG, teacher, way, earlier=student)
        config = few_steps.student_config(way, flow.CONFIG)
        export.export_distilled(student, config, flow.CHECKPOINT, options.to / "shapes-few")
        print(f"Wrote {options.to / 'shapes-few'}.")


def write(params: dict[str, dict[str, jax.Array]], folder: Path) -> None:
    """Write a checkpoint in the format of the bundled one of the same name."""
    to_folder = export.export_flux2 if folder.name == "shapes-flux2" else export.export_sd
    to_folder(params, CHECKPOINTS / folder.name, folder)
    print(f"Wrote {folder}.")


if __name__ == "__main__":
    main()
