"""The tables and pictures of the card of shapes-flux2, from what is recorded.

``python -m lab.cards.flux2`` makes them when ``lab.record`` has nothing left of ``score/flux2``,
``score/sd`` and ``clock/training``. With ``--work FOLDER`` it only adds what was judged while a
model was trained in this folder, by ``lab.train``, to ``score/trainings``.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from course.shapes import scenes
from helpers import image_grid, read_record
from lab.cards.pictures import save_picture
from lab.record import make_row, read_rows, write_rows
from lab.score import sd
from lab.score.flux2 import (
    GUIDANCE,
    LOSS_SCENES,
    LOSS_TIMES,
    SHIFTS,
    STEPS,
    USUAL,
    hash_of_weights,
    load,
)
from lab.site.translations import chinese_of, translate_table
from lab.train import flow

CARD = flow.CHECKPOINT / "README.md"
CHINESE_CARD = chinese_of(CARD)
TRAININGS = "score/trainings"
UNET_STEPS = (1, 2, 4, 8, 16)
UNET_GUIDANCE = (1.0, 2.0, 3.0)
# What the UNet of shapes-sd took at most, by its card: 103 and 47 minutes of two threads.
UNET_CPU_HOURS = 2 * (103 + 47) / 60
TABLES = ("<!-- scores -->", "<!-- end of scores -->")


def find_answer(record: str, question: dict) -> dict:
    """Return the recorded answer to a question."""
    (found,) = (row["answer"] for row in read_record(record) if row["question"] == question)
    return found


def own_score(**setting) -> dict:
    """Return what was counted of the bundled checkpoint, drawing as usual but for some settings."""
    return find_answer("score/flux2", {"weights": hash_of_weights()} | USUAL | setting)


def unet_score(steps: int, guidance: float) -> int:
    """Return how many of the same captions the UNet of shapes-sd draws right."""
    return find_answer("score/sd", sd.USUAL | {"steps": steps, "guidance": guidance})["right"]


def table_row(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table_head(*cells) -> list[str]:
    return [table_row(*cells), "|" + " --- |" * len(cells)]


def scores_by_steps() -> list[str]:
    lines = table_head("steps", *(f"guidance {guidance:g}" for guidance in GUIDANCE))
    for steps in STEPS:
        cells = []
        for guidance in GUIDANCE:
            drawn = own_score(steps=steps, guidance=guidance)["right"]
            edited = own_score(steps=steps, guidance=guidance, edit=True)["right"]
            cells.append(f"{drawn} / {edited}")
        lines.append(table_row(steps, *cells))
    return lines


def scores_of_unet() -> list[str]:
    lines = table_head("steps", *(f"guidance {guidance:g}" for guidance in UNET_GUIDANCE))
    for steps in UNET_STEPS:
        lines.append(table_row(steps, *(unet_score(steps, each) for each in UNET_GUIDANCE)))
    return lines


def scores_by_attribute() -> list[str]:
    lines = table_head("pictures", "all", "size", "colour", "shape", "background", "refused")
    for name, edit in (("drawn", False), ("edited", True)):
        counts = own_score(edit=edit)
        lines.append(
            table_row(name, *(counts[key] for key in ("right", *scenes.ATTRIBUTES, "refused")))
        )
    return lines


def scores_by_shape() -> list[str]:
    """Return a table of shapes, the best first."""
    shapes = own_score()["shapes"]
    shares = {name: count["right"] / count["asked"] for name, count in shapes.items()}
    best_first = sorted(shares, key=shares.get, reverse=True)
    counts = [shapes[name] for name in best_first]
    cells = [f"{count['right']} of {count['asked']}" for count in counts]
    return [*table_head(*best_first), table_row(*cells)]


def scores_by_shift() -> str:
    scores = [f"{own_score(shift=shift)['right']} with a shift of {shift:g}" for shift in SHIFTS]
    return ", ".join(scores)


def losses_by_time() -> list[str]:
    lines = table_head("time", *LOSS_TIMES)
    for kind in ("training", "new"):
        asked = {"weights": hash_of_weights(), "scenes": kind, "times": LOSS_TIMES}
        losses = find_answer("score/flux2", asked)["losses"]
        lines.append(table_row(f"{kind} scenes", *(f"{loss:.3f}" for loss in losses)))
    return lines


def scores_by_training() -> list[str]:
    """Return a table of the last score of each training."""
    lines = table_head("a model of", "a step", "steps", "CPU-hours", "drawn", "edited")
    for row in read_record(TRAININGS):
        sizes, batch = name_of_training(row["question"]).rsplit(", ", 1)
        steps, last = row["answer"]["steps"], row["answer"]["judged"][-1]
        hours = f"{cpu_hours(row['question'], steps):.1f}"
        lines.append(table_row(sizes, batch, f"{steps:,}", hours, last["drawn"], last["edited"]))
    return lines


def name_of_training(asked: dict) -> str:
    sizes = asked["transformer"]
    blocks = f"{sizes['num_layers']} + {sizes['num_single_layers']} blocks"
    channels = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    return f"{blocks}, {channels} channels, {asked['batch']} examples"


def cpu_hours(asked: dict, step: int) -> float:
    return step * find_answer("clock/training", asked)["cpu_seconds"] / 3600


def tables() -> str:
    """Return the scores of the card, in Markdown."""
    usual = own_score()
    wrong = usual["pictures"] - usual["right"]
    sizes = flow.CONFIG.transformer
    bundled = f"{sizes.num_layers} + {sizes.num_single_layers} blocks"
    lines = [
        *scores_by_steps(),
        "",
        "The UNet of shapes-sd, from the same captions, by DDIM:",
        "",
        *scores_of_unet(),
        "",
        f"In {USUAL['steps']} steps at guidance {USUAL['guidance']:g}, attribute by attribute:",
        "",
        *scores_by_attribute(),
        "",
        "Shape by shape, drawn right:",
        "",
        *scores_by_shape(),
        "",
        "A picture that the judge refuses counts as wrong in every attribute. Of the "
        f"{wrong} wrong pictures it refuses {usual['refused']}. Read by themselves, "
        f"both colours are right in {usual['colors'] - usual['right']}.",
        "",
        f"Drawn right with other shifts of the times: {scores_by_shift()}.",
        "",
        f"The loss on {LOSS_SCENES:,} scenes of the training and on as many new ones:",
        "",
        *losses_by_time(),
        "",
        f"The models that were trained, of which that with {bundled} is the bundled one:",
        "",
        *scores_by_training(),
    ]
    return "\n".join(lines)


def chinese_tables() -> str:
    """Return the scores of the Chinese card."""
    return translate_table("scores", tables())


def update_card(card: Path, tables: str) -> None:
    """Write the tables into a card."""
    before, rest = card.read_text().split(TABLES[0])
    _, after = rest.split(TABLES[1])
    card.write_text(f"{before}{TABLES[0]}\n{tables}\n{TABLES[1]}{after}")


def draw_pictures() -> None:
    """Draw and edit some scenes."""
    judges, params = load()
    shown = 16
    captions = [scenes.caption(**named) for named in judges.asked[:shown]]
    usual = USUAL["steps"], USUAL["guidance"]
    drawn = judges.draw(params, *usual)
    save_picture(image_grid(drawn[:shown], captions=captions), flow.CHECKPOINT / "samples.png")
    edited = judges.draw(params, *usual, edit=True)
    rows = np.concatenate([np.asarray(judges.before[:8]), edited[:8]])
    captions = [""] * 8 + judges.changes[:8]
    save_picture(image_grid(rows, columns=8, captions=captions), flow.CHECKPOINT / "edits.png")


def draw_trainings() -> None:
    """Draw loss and scores of all trainings, against the CPU-hours that such steps take."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for training in read_record(TRAININGS):
        asked, run = training["question"], training["answer"]
        hours = [cpu_hours(asked, row["step"]) for row in run["losses"]]
        losses = [row["loss"] for row in run["losses"]]
        axes[0].plot(hours, losses, linewidth=1, label=name_of_training(asked))
        hours = [cpu_hours(asked, row["step"]) for row in run["judged"]]
        for ax, kind in zip(axes[1:], ("drawn", "edited"), strict=True):
            ax.plot(hours, [row[kind] for row in run["judged"]], "o-", markersize=4)
    axes[0].set(title="loss", ylim=(None, 0.75))
    unet = unet_score(USUAL["steps"], USUAL["guidance"])
    axes[1].plot(UNET_CPU_HOURS, unet, "s", color="C7", label="the UNet (at most)")
    axes[1].legend(loc="lower right", fontsize="small")
    for ax, title in zip(axes[1:], ("drawn right", "edited right"), strict=True):
        ax.set(title=f"{title}, of {flow.JUDGED}", ylim=(0, 100))
    for ax in axes:
        ax.set_xlabel("CPU-hours")
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(flow.CHECKPOINT / "loss.png", dpi=80)


def draw_scores() -> None:
    """Draw what is drawn and edited right against the number of steps."""
    figure = Figure(figsize=(8, 2.8), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, edit in zip(axes, (False, True), strict=True):
        for guidance in GUIDANCE:
            right = [own_score(steps=n, guidance=guidance, edit=edit)["right"] for n in STEPS]
            ax.plot(STEPS, right, "o-", label=f"guidance {guidance:g}")
        ax.set(title="edited" if edit else "drawn", xlabel="steps", xscale="log", ylim=(0, 100))
        ax.set_xticks(STEPS, STEPS)
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    for number, guidance in enumerate(UNET_GUIDANCE):
        right = [unet_score(steps, guidance) for steps in UNET_STEPS]
        axes[0].plot(UNET_STEPS, right, "s--", color=f"C{number}", markersize=4)
    axes[0].plot([], [], "s--", color="C7", markersize=4, label="the UNet")
    axes[0].set_ylabel(f"right, of {flow.JUDGED}")
    axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(flow.CHECKPOINT / "scores.png", dpi=80)


def read_training(folder: Path, part: str) -> tuple[dict, list[dict], list[dict]]:
    """Return what a training says of itself, the rows of its log with losses, and those judged."""
    if not (folder / "run.json").exists():
        raise SystemExit(f"{folder} holds no training: run python -m lab.train {part} first.")
    run = json.loads((folder / "run.json").read_text())
    lines = (folder / "log.jsonl").read_text().splitlines()
    # After an interruption some steps are taken, and written, once more.
    rows = {(row["step"], "drawn" in row): row for row in map(json.loads, lines)}
    losses = [row for row in rows.values() if "loss" in row]
    return run, losses, [row for row in rows.values() if "drawn" in row]


def record_training(record: str, asked: dict, answer: dict, losses: list[dict]) -> None:
    """Add a training to a record, in place of an earlier one, with the loss of each 100 steps."""
    thinned = [
        {"step": row["step"], "loss": round(row["loss"], 4)}
        for row in losses
        if row["step"] % 100 == 0
    ]
    others = [row for row in read_rows(record) if row["question"] != asked]
    write_rows(record, [*others, make_row(asked, answer | {"losses": thinned})])


def add_training(folder: Path) -> None:
    """Add a training to the record, with all that was judged."""
    run, losses, rows = read_training(folder, "shapes-flux2")
    judged = []
    for row in rows:
        right = {"drawn": row["drawn"]["right"], "edited": row["edited"]["right"]}
        judged.append({"step": row["step"]} | right)
    asked = {"transformer": run["transformer"], "batch": run["batch"]}
    answer = {"device": run["device"], "steps": judged[-1]["step"], "judged": judged}
    record_training(TRAININGS, asked, answer, losses)


def run_card(
    description: str, add_training: Callable[[Path], None], make: Callable[[], None]
) -> None:
    """Make a card, or with ``--work FOLDER`` only add a training to its record."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="of a training, to add")
    options = parser.parse_args()
    if options.work:
        add_training(options.work)
    else:
        make()


def make() -> None:
    """Draw the card's pictures, and write its tables in both languages."""
    draw_pictures()
    draw_trainings()
    draw_scores()
    update_card(CARD, tables())
    update_card(CHINESE_CARD, chinese_tables())


if __name__ == "__main__":
    run_card(__doc__, add_training, make)
