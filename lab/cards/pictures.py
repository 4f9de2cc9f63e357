"""Pictures for the checkpoints' cards."""

import json
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image


def save_picture(picture: Image.Image, file: Path) -> None:
    """Write a PNG with 52 levels for each colour: half the bytes, and no visible difference."""
    picture.point(lambda level: 5 * round(level / 5)).save(file, optimize=True)


def draw_losses(parts: dict[str, list[Path]], file: Path) -> None:
    """Draw a curve for each part, of the trainings in these folders one after another."""
    figure = Figure(figsize=(4 * len(parts), 2.8), layout="tight")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for ax, (title, folders) in zip(axes, parts.items(), strict=True):
        before = 0
        for folder in folders:
            losses = read_losses(folder)
            ax.semilogy(
                [before + step for step in losses], losses.values(), linewidth=1, color="C0"
            )
            before += max(losses)
        ax.set(title=title, xlabel="step", ylabel="loss, mean of 50 steps")
        ax.grid(alpha=0.3, which="both")
    figure.savefig(file, dpi=80)


def read_losses(folder: Path) -> dict[int, float]:
    """Return the losses that the log of a training has, by the number of the step.

    After an interruption some steps were taken, and written, once more.
    """
    rows = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}
