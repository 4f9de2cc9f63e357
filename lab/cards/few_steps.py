"""The tables and pictures of the card of shapes-few, from what is recorded.

``python -m lab.cards.few_steps`` makes them when ``lab.record`` has nothing left of
``score/few_steps``, ``score/flux2`` and ``score/sd``. With ``--work FOLDER`` it only adds what was
judged while a student was trained in this folder, by ``lab.train``, to ``score/students``.
"""

import json
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from course.shapes import scenes
from helpers import image_grid, read_record
from lab.cards.flux2 import (
    UNET_STEPS,
    find_answer,
    read_training,
    record_training,
    run_card,
    table_head,
    table_row,
    unet_score,
    update_card,
)
from lab.cards.flux2 import own_score as teacher_score
from lab.cards.pictures import save_picture
from lab.score.few_steps import CHECKPOINT, RUNS, SHIFTS, USUAL
from lab.score.flux2 import STEPS, hash_of_weights, load
from lab.site.translations import chinese_of, translate_table
from lab.train import few_steps, flow

CARD = CHECKPOINT / "README.md"
CHINESE_CARD = chinese_of(CARD)
TEACHER_GUIDANCE = {False: 3.0, True: 2.0}  # of drawings, and of edits
DRAWN_RUNS = (1, 2, 4)  # in the picture of samples
STUDENTS = "score/students"


def own_score(**setting) -> dict:
    """Return what was counted, in two runs but for some settings."""
    asked = {"weights": hash_of_weights(CHECKPOINT)} | USUAL | setting
    return find_answer("score/few_steps", asked)


def teacher_in(runs: int, edit: bool) -> int | str:
    """Return the teacher's score with guidance in so many runs, of which a step takes two."""
    if runs % 2:
        return ""
    guidance = TEACHER_GUIDANCE[edit]
    return teacher_score(steps=runs // 2, guidance=guidance, edit=edit)["right"]


def unet_in(runs: int) -> int | str:
    """Return the score of the UNet of shapes-sd with guidance 3 in so many runs."""
    return "" if runs % 2 else unet_score(runs // 2, 3.0)


def scores_by_runs() -> list[str]:
    lines = table_head(
        "runs", "drawn", "its teacher", "the UNet of shapes-sd", "edited", "its teacher"
    )
    for runs in (*RUNS, 16):
        own = "", ""
        if runs in RUNS:
            own = tuple(own_score(steps=runs, edit=edit)["right"] for edit in (False, True))
        lines.append(
            table_row(
                runs, own[0], teacher_in(runs, False), unet_in(runs), own[1], teacher_in(runs, True)
            )
        )
    return lines


def scores_by_attribute() -> list[str]:
    lines = table_head("runs", "all", "size", "colour", "shape", "background", "refused")
    for runs in RUNS:
        counts = own_score(steps=runs)
        cells = (counts[key] for key in ("right", *scenes.ATTRIBUTES, "refused"))
        lines.append(table_row(runs, *cells))
    return lines


def in_each(counts: dict[str, int]) -> str:
    """Return what was counted in 1, 2 and 4 runs."""
    return " / ".join(str(counts[str(runs)]) for runs in few_steps.RUNS)


def scores_of_students() -> list[str]:
    """Return a table of all students, by the captions that are judged at the end."""
    lines = table_head("way", "starts from", "seed", "steps", "CPU-minutes", "drawn", "edited")
    for row in read_record(STUDENTS):
        asked, answer = row["question"], row["answer"]
        start = "its teacher" if asked["earlier"] == asked["teacher"] else "a student"
        steps = f"{answer['judged'][-1]['step']:,}"
        counts = (in_each(answer["final"][kind]) for kind in ("drawn", "edited"))
        run = asked["way"], start, asked["seed"], steps, answer["cpu_minutes"]
        lines.append(table_row(*run, *counts))
    return lines


def scores_of_seeds() -> list[str]:
    """Return a sentence for each training that was done by several seeds."""
    by_seed = {}
    for row in read_record(STUDENTS):
        asked, answer = row["question"], row["answer"]
        steps = answer["judged"][-1]["step"]
        others = [asked[name] for name in sorted(asked) if name != "seed"]
        by_seed.setdefault((asked["way"], steps, *others), []).append(answer["final"])
    sentences = []
    for (way, steps, *_), finals in by_seed.items():
        if len(finals) == 1:
            continue
        counts = []
        for what in ("drawn", "edited"):
            parts = []
            for runs in few_steps.RUNS:
                seeds = [final[what][str(runs)] for final in finals]
                parts.append(f"{np.mean(seeds):.1f} ({min(seeds)} to {max(seeds)})")
            counts.append(f"{what} {' / '.join(parts)}")
        run = f"{len(finals)} seeds of {way} in {steps} steps"
        sentences += ["", f"The mean of {run}: {', '.join(counts)}."]
    return sentences


def scores_by_training() -> list[str]:
    """Return a table of what was judged on the way, by captions to choose settings by."""
    lines = table_head("way", "seed", "steps", "drawn", "edited")
    for row in read_record(STUDENTS):
        way, seed = row["question"]["way"], row["question"]["seed"]
        for judged in row["answer"]["judged"]:
            counts = (in_each(judged[kind]) for kind in ("drawn", "edited"))
            lines.append(table_row(way, seed, f"{judged['step']:,}", *counts))
    return lines


def tables() -> str:
    """Return the scores of the card, in Markdown."""
    shifts = [f"{own_score(shift=shift)['right']} with a shift of {shift:g}" for shift in SHIFTS]
    seen = {str(runs): own_score(steps=runs, seen=True)["right"] for runs in few_steps.RUNS}
    lines = [
        *scores_by_runs(),
        "",
        "What is drawn, attribute by attribute:",
        "",
        *scores_by_attribute(),
        "",
        f"Drawn right in two runs by other shifts of the times: {', '.join(shifts)}.",
        "",
        f"Of {flow.JUDGED} captions of combinations that it was trained on, drawn right from new "
        f"noise in 1 / 2 / 4 runs: {in_each(seen)}.",
        "",
        "The students that were trained. Here and below, numbers are of 1 / 2 / 4 runs:",
        "",
        *scores_of_students(),
        *scores_of_seeds(),
        "",
        "On the way, on other captions of held-out combinations, by which settings were chosen:",
        "",
        *scores_by_training(),
    ]
    return "\n".join(lines)


def chinese_tables() -> str:
    """Return the scores of the Chinese card."""
    return translate_table("few-scores", tables())


def draw_scores() -> None:
    """Draw what is drawn and edited right against the runs of the network."""
    figure = Figure(figsize=(8, 2.8), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, edit in zip(axes, (False, True), strict=True):
        right = [own_score(steps=runs, edit=edit)["right"] for runs in RUNS]
        ax.plot(RUNS, right, "o-", label="shapes-few")
        for guidance in (TEACHER_GUIDANCE[edit], 1.0):
            each = 1 if guidance == 1 else 2
            right = [
                teacher_score(steps=steps, guidance=guidance, edit=edit)["right"] for steps in STEPS
            ]
            runs = [each * steps for steps in STEPS]
            ax.plot(runs, right, "s--", markersize=4, label=f"its teacher, guidance {guidance:g}")
        ax.set(title="edited" if edit else "drawn", xlabel="runs", xscale="log", ylim=(0, 100))
        ax.set_xticks((1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32))
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    unet = [unet_score(steps, 3.0) for steps in UNET_STEPS]
    axes[0].plot([2 * steps for steps in UNET_STEPS], unet, "^:", markersize=4, label="the UNet")
    axes[0].set_ylabel(f"right, of {flow.JUDGED}")
    for ax in axes:
        ax.legend(loc="lower right", fontsize="small")
    figure.savefig(CHECKPOINT / "scores.png", dpi=80)


def draw_pictures() -> None:
    """Draw and edit some scenes."""
    judges, params = load(CHECKPOINT)
    shown = 8
    captions = [scenes.caption(**named) for named in judges.asked[:shown]]
    rows = [judges.draw(params, runs, guidance=1)[:shown] for runs in DRAWN_RUNS]
    labels = captions + [f"runs: {runs}" for runs in DRAWN_RUNS[1:] for _ in range(shown)]
    grid = image_grid(np.concatenate(rows), columns=shown, captions=labels)
    save_picture(grid, CHECKPOINT / "samples.png")
    edited = judges.draw(params, USUAL["steps"], guidance=1, edit=True)
    rows = np.concatenate([np.asarray(judges.before[:shown]), edited[:shown]])
    grid = image_grid(rows, columns=shown, captions=[""] * shown + judges.changes[:shown])
    save_picture(grid, CHECKPOINT / "edits.png")


def add_training(folder: Path) -> None:
    """Add a training to the record, with what was judged on the way and at the end."""
    asked, losses, judged = read_training(folder, "few-steps")
    device = asked.pop("device")
    answer = {
        "device": device,
        "cpu_minutes": round(sum(row["cpu_seconds"] for row in losses) / 60),
        "judged": judged,
        "final": json.loads((folder / "final.json").read_text()),
    }
    record_training(STUDENTS, asked, answer, losses)


def make() -> None:
    """Draw the card's pictures, and write its tables in both languages."""
    draw_pictures()
    draw_scores()
    update_card(CARD, tables())
    update_card(CHINESE_CARD, chinese_tables())


if __name__ == "__main__":
    run_card(__doc__, add_training, make)
