"""Record how many held-out captions the small FLUX.2 draws right, and how many scenes it edits so.

``python -m benchmarks.record_flow`` writes ``benchmarks/flow.json``: the score of the bundled
checkpoint in several numbers of steps, at several scales of guidance and with several shifts, by
the judge in ``shapes``; shape by shape in the usual way; its loss at several times; and the score
of the UNet of ``shapes-sd`` beside it. What is recorded of the checkpoint as it is, is left out.
When nothing is left, the pictures and the tables of its card are made anew. All of it takes about
ten minutes on 2 cores.

``--work FOLDER`` first adds what was judged while a model was trained in this folder, by
``lab.train``, to ``benchmarks/flow_runs.json``.
"""

import functools
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from benchmarks import record_steps
from benchmarks.common import (
    FOLDER,
    ROOT,
    machine,
    make_parser,
    name_of,
    origin,
    read_json,
    work_through,
    write_json,
)
from course import flux2
from course.flux2.configs import TransformerConfig
from course.flux2.tokenizer import Tokenizer
from course.shapes import judge, scenes
from helpers import image_grid
from lab.train import data, flow, loop
from lab.train.cards import save_picture
from lab.train.tokenizers import QWEN_LENGTH, learn_qwen

TARGET = FOLDER / "flow.json"
RUNS = FOLDER / "flow_runs.json"
CHECKPOINT = ROOT / "checkpoints" / "shapes-flux2"
STEPS = (1, 2, 4, 8, 16, 32)
GUIDANCE = (1.0, 2.0, 3.0, 6.0)
SHIFTS = (0.5, 1.0, 2.0, 3.0, 4.0)
UNET_STEPS = (1, 2, 4, 8, 16)
UNET_GUIDANCE = (1.0, 2.0, 3.0)
USUAL = {"steps": 8, "guidance": 3.0, "shift": flow.CONFIG.shift}
# What the UNet of shapes-sd took at most, by its card: 103 and 47 minutes of two threads.
UNET_CPU_HOURS = 2 * (103 + 47) / 60
LOSS_SCENES = 1_000
LOSS_TIMES = [0.1, 0.3, 0.5, 0.7, 0.9]
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


def record_unet() -> None:
    """How many of the same captions the UNet of ``shapes-sd`` draws right, by DDIM."""
    rows = []
    model = record_steps.load("shapes-sd")
    for steps, guidance in itertools.product(UNET_STEPS, UNET_GUIDANCE):
        images = record_steps.draw_pictures(*model, "ddim", steps, guidance=guidance)
        rows.append(
            {"steps": steps, "guidance": guidance, "right": record_steps.count_right(images)}
        )
        print("UNet", rows[-1], flush=True)
    write_json(TARGET, recorded() | {"unet": rows})


def record_losses() -> None:
    """The loss at several times, on scenes of the training and on as many new ones."""
    judges, params = load()
    encode = jax.jit(flux2.encode_images, static_argnums=1)
    side = data.PIXELS // flow.CONFIG.vae.pixels_per_token

    @jax.jit
    def loss_at(clean: jax.Array, text: jax.Array, t: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(0), clean.shape)
        predicted = flux2.velocity(
            params["transformer"],
            flow.CONFIG.transformer,
            clean + t * (noise - clean),
            text,
            jnp.full(len(clean), t),
            flux2.positions(side, side),
            flux2.text_positions(text.shape[1]),
        )
        return jnp.square(predicted - (noise - clean)).mean()

    losses = {}
    seen = scenes.training_scenes(flow.RECIPE.pool, data.POOL_SEED)[:LOSS_SCENES]
    new = scenes.training_scenes(LOSS_SCENES, seed=99)
    for kind, some in (("training", seen), ("new", new)):
        images = np.stack([scenes.render(scene) for scene in some])
        clean = encode({"vae": judges.vae}, flow.CONFIG, np.float32(images) / 255)
        captions = []
        for scene in some:
            named = {name: getattr(scene, name) for name in scenes.ATTRIBUTES}
            captions.append(scenes.caption(**named))
        text = flux2.encode_prompts(params, flow.CONFIG, *judges.tokenize(captions))
        found = [float(loss_at(clean, text, jnp.float32(t))) for t in LOSS_TIMES]
        losses[kind] = [round(loss, 4) for loss in found]
    write_json(TARGET, recorded() | {"losses": losses})


def add_run(folder: Path) -> None:
    """Thin the log of a training: the loss of each 100 steps, and all that was judged.

    What a step takes is known from the log if it was trained on a CPU, and is measured otherwise.
    """
    run = read_json(folder / "run.json", default=None)
    if run is None:
        raise SystemExit(f"{folder} holds no training: run python -m lab.train shapes-flux2 first.")
    losses, judged = [], []
    cpu_seconds = 0.0
    lines = (folder / "log.jsonl").read_text().splitlines()
    # After an interruption some steps are taken, and written, once more.
    rows = {(row["step"], "drawn" in row): row for row in map(json.loads, lines)}
    for row in rows.values():
        cpu_seconds += row.get("cpu_seconds", 0)
        if "drawn" in row:
            right = {"drawn": row["drawn"]["right"], "edited": row["edited"]["right"]}
            judged.append({"step": row["step"]} | right)
        elif row["step"] % 100 == 0:
            losses.append({"step": row["step"], "loss": round(row["loss"], 4)})
    steps = judged[-1]["step"]
    run["steps"] = steps
    if run["device"] == "cpu":
        run["step_on_cpu"] = {"cpu_seconds": round(cpu_seconds / steps, 3)}
    else:
        run["step_on_cpu"] = measure_step(run)
    run |= {"losses": losses, "judged": judged}
    others = [
        other for other in read_json(RUNS, default=[]) if name_of_run(other) != name_of_run(run)
    ]
    write_json(RUNS, [*others, run])


def measure_step(run: dict, steps: int = 10) -> dict:
    """What a step of such a training takes on this machine's CPU: the medians of some steps.

    The data is random, since time does not depend on it.
    """
    sizes = TransformerConfig(
        **{name: tuple(v) if isinstance(v, list) else v for name, v in run["transformer"].items()}
    )
    recipe = replace(flow.RECIPE, batch=run["batch"], edits=run["batch"] // 8)
    rng = np.random.default_rng(0)
    count = 1_000
    tokens = jnp.float16(rng.normal(size=(count, 16, sizes.in_channels)))
    attributes = jnp.zeros((count, len(data.OPTIONS)), jnp.int32)
    ids, mask = Tokenizer(learn_qwen(), QWEN_LENGTH)(data.all_captions())
    arrays = {
        "tokens": tokens,
        "attributes": attributes,
        "before": tokens,
        "after": tokens,
        "afterwards": attributes,
        "changed": jnp.zeros(count, jnp.int32),
        "ids": jnp.asarray(ids),
        "mask": jnp.asarray(mask),
    }
    task = flow.make_task(recipe, replace(flow.CONFIG, transformer=sizes))
    step = loop.make_step(task)
    state = loop.initial_state(task)
    seconds, cpu_seconds = [], []
    for number in range(3 + steps):
        started, cpu = time.perf_counter(), time.process_time()
        state, loss = step(state, number, arrays)
        loss.block_until_ready()
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - cpu)
    measured = {
        "seconds": round(float(np.median(seconds[3:])), 3),
        "cpu_seconds": round(float(np.median(cpu_seconds[3:])), 3),
    }
    return measured | machine()


def name_of_run(run: dict) -> str:
    sizes = run["transformer"]
    blocks = f"{sizes['num_layers']} + {sizes['num_single_layers']} blocks"
    channels = sizes["num_attention_heads"] * sizes["attention_head_dim"]
    return f"{blocks}, {channels} channels, {run['batch']} examples"


def cpu_hours(run: dict, step: int) -> float:
    return step * run["step_on_cpu"]["cpu_seconds"] / 3600


def find_left() -> dict[str, Callable[[], None]]:
    rows = recorded().get("rows", [])
    left = {}
    for setting in settings():
        if not any(setting.items() <= row.items() for row in rows):
            left[name_of(setting)] = functools.partial(record, setting)
    # The first setting writes whose record it is.
    if rows and "shapes" not in recorded():
        left["shapes"] = record_shapes
    if rows and "unet" not in recorded():
        left["UNet"] = record_unet
    if rows and "losses" not in recorded():
        left["losses"] = record_losses
    return left


def row_of(content: dict, part: str = "rows", **setting) -> dict:
    (row,) = (row for row in content[part] if setting.items() <= row.items())
    return row


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


def scores_of_unet(content: dict) -> list[str]:
    lines = table_head("steps", *(f"guidance {guidance:g}" for guidance in UNET_GUIDANCE))
    for steps in UNET_STEPS:
        cells = [unet_score(content, steps, guidance) for guidance in UNET_GUIDANCE]
        lines.append(table_row(steps, *cells))
    return lines


def unet_score(content: dict, steps: int, guidance: float) -> int:
    return row_of(content, "unet", steps=steps, guidance=guidance)["right"]


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


def losses_by_time(content: dict) -> list[str]:
    losses = content["losses"]
    lines = table_head("time", *LOSS_TIMES)
    for kind in ("training", "new"):
        lines.append(table_row(f"{kind} scenes", *(f"{loss:.3f}" for loss in losses[kind])))
    return lines


def scores_by_run() -> list[str]:
    """The last score of each training."""
    lines = table_head("a model of", "a step", "steps", "CPU-hours", "drawn", "edited")
    for run in read_json(RUNS, default=[]):
        sizes, batch = name_of_run(run).rsplit(", ", 1)
        last = run["judged"][-1]
        hours = f"{cpu_hours(run, run['steps']):.1f}"
        lines.append(
            table_row(sizes, batch, f"{run['steps']:,}", hours, last["drawn"], last["edited"])
        )
    return lines


def tables(content: dict) -> str:
    """The scores of the card, in Markdown."""
    wrong = content["wrong"]
    sizes = flux2.read_config(CHECKPOINT).transformer
    bundled = f"{sizes.num_layers} + {sizes.num_single_layers} blocks"
    lines = [
        *scores_by_steps(content),
        "",
        "The UNet of shapes-sd, from the same captions, by DDIM:",
        "",
        *scores_of_unet(content),
        "",
        f"In {USUAL['steps']} steps at guidance {USUAL['guidance']:g}, attribute by attribute:",
        "",
        *scores_by_attribute(content),
        "",
        "Shape by shape, drawn right:",
        "",
        *scores_by_shape(content),
        "",
        "A picture that the judge refuses counts as wrong in every attribute. Of the "
        f"{wrong['pictures']} wrong pictures it refuses {wrong['refused']}. Read by themselves, "
        f"both colours are right in {wrong['colors_right']}.",
        "",
        f"Drawn right with other shifts of the times: {scores_by_shift(content)}.",
        "",
        f"The loss on {LOSS_SCENES:,} scenes of the training and on as many new ones:",
        "",
        *losses_by_time(content),
        "",
        f"The models that were trained, of which that with {bundled} is the bundled one:",
        "",
        *scores_by_run(),
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
    save_picture(image_grid(drawn[:shown], captions=captions), CHECKPOINT / "samples.png")
    edited = judges.draw(params, *usual, edit=True)
    rows = np.concatenate([np.asarray(judges.before[:8]), edited[:8]])
    captions = [""] * 8 + judges.changes[:8]
    save_picture(image_grid(rows, columns=8, captions=captions), CHECKPOINT / "edits.png")


def draw_trainings() -> None:
    """Loss and scores of all trainings, against the CPU-hours that such steps take."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots(1, 3)
    for run in read_json(RUNS, default=[]):
        name = name_of_run(run)
        hours = [cpu_hours(run, row["step"]) for row in run["losses"]]
        axes[0].plot(hours, [row["loss"] for row in run["losses"]], linewidth=1, label=name)
        hours = [cpu_hours(run, row["step"]) for row in run["judged"]]
        for ax, kind in zip(axes[1:], ("drawn", "edited"), strict=True):
            ax.plot(hours, [row[kind] for row in run["judged"]], "o-", markersize=4)
    axes[0].set(title="loss", ylim=(None, 0.75))
    unet = unet_score(recorded(), USUAL["steps"], USUAL["guidance"])
    axes[1].plot(UNET_CPU_HOURS, unet, "s", color="C7", label="the UNet (at most)")
    axes[1].legend(loc="lower right", fontsize="small")
    for ax, title in zip(axes[1:], ("drawn right", "edited right"), strict=True):
        ax.set(title=f"{title}, of {flow.JUDGED}", ylim=(0, 100))
    for ax in axes:
        ax.set_xlabel("CPU-hours")
        ax.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(CHECKPOINT / "loss.png", dpi=80)


def draw_scores(content: dict) -> None:
    """What is drawn and edited right against the number of steps."""
    figure = Figure(figsize=(8, 2.8), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    for ax, edit in zip(axes, (False, True), strict=True):
        for guidance in GUIDANCE:
            kind = {"guidance": guidance, "edit": edit, "shift": USUAL["shift"]}
            right = [row_of(content, steps=steps, **kind)["right"] for steps in STEPS]
            ax.plot(STEPS, right, "o-", label=f"guidance {guidance:g}")
        ax.set(title="edited" if edit else "drawn", xlabel="steps", xscale="log", ylim=(0, 100))
        ax.set_xticks(STEPS, STEPS)
        ax.set_xticks([], minor=True)
        ax.grid(alpha=0.3)
    for number, guidance in enumerate(UNET_GUIDANCE):
        right = [unet_score(content, steps, guidance) for steps in UNET_STEPS]
        axes[0].plot(UNET_STEPS, right, "s--", color=f"C{number}", markersize=4)
    axes[0].plot([], [], "s--", color="C7", markersize=4, label="the UNet")
    axes[0].set_ylabel(f"right, of {flow.JUDGED}")
    axes[0].legend(loc="lower right", fontsize="small")
    figure.savefig(CHECKPOINT / "scores.png", dpi=80)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="of a training, to add")
    options = parser.parse_args()
    if options.work:
        add_run(options.work)
    status = work_through(find_left, options)
    if not options.list and not find_left():
        draw_pictures()
        draw_trainings()
        draw_scores(recorded())
        update_card(recorded())
    return status


if __name__ == "__main__":
    sys.exit(main())
