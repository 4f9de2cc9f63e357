"""Record how many held-out captions the small FLUX.2 draws right, and how many scenes it edits so.

``python -m benchmarks.record_flow`` writes ``benchmarks/flow.json``: the score of the bundled
checkpoint in several numbers of steps, at several scales of guidance and with several shifts, by
the judge in ``shapes``; shape by shape in the usual way; and the curve of its training, where the
folder of the training is here.
What is recorded of the checkpoint as it is, is left out. When nothing is left, the pictures and the
tables of its card are made anew. All of it takes about ten minutes on 2 cores.
"""

import functools
import hashlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import flux2
from benchmarks.common import (
    FOLDER,
    ROOT,
    make_parser,
    name_of,
    origin,
    read_json,
    work_through,
    write_json,
)
from helpers import image_grid
from shapes import judge, scenes
from training import flow
from training.pictures import save

TARGET = FOLDER / "flow.json"
CHECKPOINT = ROOT / "checkpoints" / "shapes-flux2"
STEPS = (1, 2, 4, 8, 16, 32)
GUIDANCE = (1.0, 2.0, 3.0, 6.0)
SHIFTS = (0.5, 1.0, 2.0, 3.0, 4.0)
USUAL = {"steps": 8, "guidance": 3.0, "shift": flow.CONFIG.shift}
# What the UNet of shapes-sd took at most, by its card: 103 and 47 minutes of two threads.
UNET_CPU_HOURS = 2 * (103 + 47) / 60
TABLES = ("<!-- scores -->", "<!-- end of scores -->")


def settings() -> list[dict]:
    """What to draw and to edit with."""
    found = []
    for steps, guidance, edit in itertools.product(STEPS, GUIDANCE, (False, True)):
        found.append(USUAL | {"steps": steps, "guidance": guidance, "edit": edit})
    for shift in SHIFTS:
        row = USUAL | {"shift": shift, "edit": False}
        if row not in found:
            found.append(row)
    return found


def hash_of_weights() -> str:
    """Of the files of all parts."""
    found = hashlib.sha256()
    for file in sorted(CHECKPOINT.rglob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()


@functools.cache
def load() -> tuple[flow.Judge, dict]:
    """The judge, and the parameters without the VAE's, in float32."""
    params, _, _ = flux2.load(CHECKPOINT, jnp.float32)
    return flow.Judge(params.pop("vae"), flow.JUDGED), params


def recorded() -> dict:
    """What is recorded of the checkpoint as it is."""
    content = read_json(TARGET, default={})
    return content if content.get("weights") == hash_of_weights() else {}


def record(setting: dict) -> None:
    judges, params = load()
    row = setting | judges(params, **setting)
    print(row, flush=True)
    content = origin("jax", "jaxlib", "numpy", "scipy")
    content |= {"weights": hash_of_weights(), "pictures": flow.JUDGED}
    rows = recorded().get("rows", [])
    write_json(TARGET, recorded() | content | {"rows": [*rows, row]})


def record_shapes() -> None:
    """Count what is drawn right of each shape, and what is wrong with the other pictures."""
    judges, params = load()
    shapes = {name: {"asked": 0, "right": 0} for name in scenes.SHAPES}
    wrong = {"pictures": 0, "refused": 0, "colors_right": 0}
    images = judges.draw(params, USUAL["steps"], USUAL["guidance"])
    for named, image in zip(judges.asked, images, strict=True):
        seen = judge.read(image)
        right = all(judge.right_attributes(named, seen).values())
        shapes[named["shape"]]["asked"] += 1
        shapes[named["shape"]]["right"] += right
        if not right:
            colors = judge.read_colors(image)  # it reads those of most pictures that it refuses
            is_read = not isinstance(colors, judge.Refusal)
            wrong["pictures"] += 1
            wrong["refused"] += isinstance(seen, judge.Refusal)
            wrong["colors_right"] += is_read and colors[:2] == (named["background"], named["color"])
    write_json(TARGET, recorded() | {"shapes": shapes, "wrong": wrong})


def record_training(log: Path) -> None:
    """Thin the log of the training: the loss of each 100 steps, and all that was judged."""
    losses, judged = [], []
    cpu_seconds = 0.0
    for line in log.read_text().splitlines():
        row = json.loads(line)
        cpu_seconds += row.get("cpu_seconds", 0)
        hours = round(cpu_seconds / 3600, 3)
        if "drawn" in row:
            right = {"drawn": row["drawn"]["right"], "edited": row["edited"]["right"]}
            judged.append({"step": row["step"], "cpu_hours": hours} | right)
        elif row["step"] % 100 == 0:
            losses.append({"step": row["step"], "loss": round(row["loss"], 4)})
    training = {"cpu_hours": round(cpu_seconds / 3600, 2), "losses": losses, "judged": judged}
    write_json(TARGET, recorded() | {"training": training})


def find_left(log: Path) -> dict[str, Callable[[], None]]:
    rows = recorded().get("rows", [])
    left = {}
    for setting in settings():
        if not any(setting.items() <= row.items() for row in rows):
            left[name_of(setting)] = functools.partial(record, setting)
    # The first setting writes whose record it is.
    if rows and "shapes" not in recorded():
        left["shapes"] = record_shapes
    if rows and "training" not in recorded() and log.exists():
        left["training"] = functools.partial(record_training, log)
    return left


def row_of(content: dict, **setting) -> dict:
    (row,) = (row for row in content["rows"] if setting.items() <= row.items())
    return row


def unet_scores() -> dict[int, int]:
    """How many captions the UNet of ``shapes-sd`` draws right, by its number of DDIM's steps."""
    found = {}
    for row in read_json(FOLDER / "steps.json", default=None)["rows"]:
        kind = (row["checkpoint"], row["sampler"], row["unguided"])
        if kind == ("shapes-sd", "ddim", 0):
            found[row["steps"]] = row["right"]
    return found


def table_row(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table_head(*cells) -> list[str]:
    return [table_row(*cells), "|" + " --- |" * len(cells)]


def scores_by_steps(content: dict) -> list[str]:
    lines = table_head("steps", *(f"guidance {guidance:g}" for guidance in GUIDANCE))
    for steps in STEPS:
        cells = []
        for guidance in GUIDANCE:
            setting = USUAL | {"steps": steps, "guidance": guidance}
            drawn = row_of(content, edit=False, **setting)["right"]
            edited = row_of(content, edit=True, **setting)["right"]
            cells.append(f"{drawn} / {edited}")
        lines.append(table_row(steps, *cells))
    return lines


def scores_by_attribute(content: dict) -> list[str]:
    lines = table_head("", "all", "size", "colour", "shape", "background", "refused")
    for name, edit in (("drawn", False), ("edited", True)):
        row = row_of(content, edit=edit, **USUAL)
        lines.append(
            table_row(name, *(row[key] for key in ("right", *scenes.ATTRIBUTES, "refused")))
        )
    return lines


def scores_by_shape(content: dict) -> list[str]:
    """The best shape first."""
    shares = {name: count["right"] / count["asked"] for name, count in content["shapes"].items()}
    best_first = sorted(shares, key=shares.get, reverse=True)
    counts = [content["shapes"][name] for name in best_first]
    cells = [f"{count['right']} of {count['asked']}" for count in counts]
    return [*table_head(*best_first), table_row(*cells)]


def scores_by_shift(content: dict) -> str:
    found = []
    for shift in SHIFTS:
        right = row_of(content, **USUAL | {"shift": shift, "edit": False})["right"]
        found.append(f"{right} with a shift of {shift:g}")
    return ", ".join(found)


def scores_by_training(content: dict) -> list[str]:
    judged = content["training"]["judged"]
    lines = table_head("step", *(f"{row['step']:,}" for row in judged))
    for name in ("drawn", "edited"):
        lines.append(table_row(name, *(row[name] for row in judged)))
    return lines


def tables(content: dict) -> str:
    """The scores of the card, in Markdown."""
    wrong = content["wrong"]
    lines = [
        *scores_by_steps(content),
        "",
        f"In {USUAL['steps']} steps at guidance {USUAL['guidance']:g}, attribute by attribute:",
        "",
        *scores_by_attribute(content),
        "",
        "Shape by shape, drawn right:",
        "",
        *scores_by_shape(content),
        "",
        f"Of the {wrong['pictures']} wrong pictures the judge refuses {wrong['refused']}, and in "
        f"{wrong['colors_right']} both colours are right.",
        "",
        f"Drawn right with other shifts of the times: {scores_by_shift(content)}.",
        "",
        "While it was trained, before the parameters were rounded to bfloat16:",
        "",
        *scores_by_training(content),
    ]
    return "\n".join(lines)


def update_card(content: dict) -> None:
    """Write the tables into the card."""
    card = CHECKPOINT / "README.md"
    before, rest = card.read_text().split(TABLES[0])
    _, after = rest.split(TABLES[1])
    card.write_text(f"{before}{TABLES[0]}\n{tables(content)}\n{TABLES[1]}{after}")


def draw_pictures() -> None:
    judges, params = load()
    shown = 16
    captions = [scenes.caption(**named) for named in judges.asked[:shown]]
    usual = USUAL["steps"], USUAL["guidance"]
    drawn = judges.draw(params, *usual)
    save(image_grid(drawn[:shown], captions=captions), CHECKPOINT / "samples.png")
    edited = judges.draw(params, *usual, edit=True)
    rows = np.concatenate([np.asarray(judges.before[:8]), edited[:8]])
    captions = [""] * 8 + judges.changes[:8]
    save(image_grid(rows, columns=8, captions=captions), CHECKPOINT / "edits.png")


def draw_curves(content: dict) -> None:
    """Loss and scores: of the training, and against steps."""
    training = content["training"]
    figure = Figure(figsize=(8, 2.8), layout="tight")
    axes = figure.subplots(1, 2)
    steps = [row["step"] for row in training["losses"]]
    axes[0].plot(steps, [row["loss"] for row in training["losses"]], linewidth=1)
    axes[0].set(xlabel="step", ylabel="loss, mean of 50 steps", ylim=(None, 0.75))
    hours = [row["cpu_hours"] for row in training["judged"]]
    for name in ("drawn", "edited"):
        axes[1].plot(hours, [row[name] for row in training["judged"]], "o-", label=name)
    label = "the UNet, drawn (at most)"
    axes[1].plot(UNET_CPU_HOURS, unet_scores()[8], "s", color="C3", label=label)
    axes[1].set(xlabel="CPU-hours of training", ylabel=f"right, of {flow.JUDGED}", ylim=(0, 96))
    axes[1].legend(loc="lower right", fontsize="small")
    for ax in axes:
        ax.grid(alpha=0.3)
    figure.savefig(CHECKPOINT / "loss.png", dpi=80)

    figure = Figure(figsize=(8, 2.8), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, edit in zip(axes, (False, True), strict=True):
        for guidance in GUIDANCE:
            kind = {"guidance": guidance, "edit": edit, "shift": USUAL["shift"]}
            right = [row_of(content, steps=steps, **kind)["right"] for steps in STEPS]
            ax.plot(STEPS, right, "o-", label=f"guidance {guidance:g}")
        ax.set(title="edited" if edit else "drawn", xlabel="steps", xscale="log", ylim=(0, 96))
        ax.set_xticks(STEPS, STEPS)
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    unet = {steps: right for steps, right in unet_scores().items() if steps <= max(STEPS)}
    axes[0].plot(unet.keys(), unet.values(), "s--", color="C7", label="the UNet, by DDIM")
    axes[0].set_ylabel(f"right, of {flow.JUDGED}")
    axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(CHECKPOINT / "scores.png", dpi=80)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, default=flow.WORK, help="default: %(default)s")
    options = parser.parse_args()
    status = work_through(lambda: find_left(options.work / "log.jsonl"), options)
    if options.list:
        return status
    content = recorded()
    if not find_left(options.work / "log.jsonl") and "training" in content:
        draw_pictures()
        draw_curves(content)
        update_card(content)
    return status


if __name__ == "__main__":
    sys.exit(main())
