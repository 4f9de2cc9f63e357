"""Reports on a program: will it fit, what takes the memory, and what is the least time."""

import dataclasses
import datetime
import json
from pathlib import Path

from helpers.tpu.compiler import CHIPS, ask_compiler, usable_hbm, versions
from helpers.tpu.programs import Program, load_shapes, lower_parts, lower_program, picture_size, tree_bytes

GIB = 2**30
KINDS = ("parameters", "temporaries", "program", "output")  # of what lies in HBM
# Installed from a wheel, the recorded reports lie inside the package; in a clone of the repository, beside it.
_RECORDED = (Path(__file__).parents[1] / "recorded", Path(__file__).parents[2] / "benchmarks" / "tpu")


def memory_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Whether a program fits, and what takes how much of the HBM of each chip. One compilation.

    The compiler decides: it refuses a program that does not fit.

    Returns
    -------
    dict
        ``fits``; ``verdict``, a sentence; ``usable_hbm`` in bytes; ``hbm``, the bytes of each kind, and ``peak``, the
        most that the compiler has in use at a time, the program itself not among it (both None if it does not fit);
        ``whole``, what the compiler counts in the whole program, a loop's body once; and ``compile_seconds``.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    label = f"{program.pipeline} {program.dtype} {program.chip}-{program.chips} batch {program.batch}"
    say(f"{label}: lowering …")
    lowered = lower_program(program, pipeline, params)
    answer = ask_compiler(lowered, program.chip, params, label=label, cache=cache, say=say)
    usable, hbm, peak = usable_hbm(program.chip), None, None
    if answer["fits"]:
        memory = answer["memory"]
        hbm = {"parameters": memory["arguments"] + memory["unread"]}
        hbm |= {kind: memory[kind] for kind in KINDS[1:]}
        peak = memory["peak"]
        verdict = f"It fits: its parts take {sum(hbm.values()) / GIB:.2f} GiB on each chip, of {usable / GIB:.2f} GiB."
    else:
        verdict = f"It does not fit. The compiler: {answer['message'].splitlines()[0]}"
    return {
        "fits": answer["fits"],
        "verdict": verdict,
        "usable_hbm": usable,
        "hbm": hbm,
        "peak": peak,
        "whole": {kind: answer.get(kind) for kind in ("flops", "bytes_accessed")},
        "compile_seconds": answer["compile_seconds"],
    }


def least_seconds(part: dict, chip: str) -> tuple[float, float]:
    """Seconds below which a part cannot be done on a chip: for its operations, and for reading its weights from HBM.

    Weights that fit into the memory on the chip need to be read only once in all of the part's runs.
    """
    peak, weights = CHIPS[chip], part["weight_bytes"]
    reads = weights + (part["runs"] - 1) * max(0, weights - peak.on_chip)
    return part["runs"] * part["flops"] / peak.flops, reads / peak.bandwidth


def compile_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Ask the compiler about a whole program and about its parts. Seconds for a small one, minutes for a real one.

    Returns
    -------
    dict
        What ``benchmarks/report.schema.json`` describes: the program, versions and date, ``memory_report``'s answers,
        the bytes of each model's parameters, the parts, and the least seconds for a call and for a picture.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    height, width = picture_size(program, pipeline)
    layout = bool(pipeline.unet.config.split_head_dim)
    settings = {"pipeline": Path(program.pipeline).name, "height": height, "width": width, "split_head_dim": layout}
    report = {
        "program": dataclasses.asdict(program) | settings,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **memory_report(program, cache=cache, say=say),
        "parameter_bytes": {name: tree_bytes(tree) for name, tree in params.items() if name != "scheduler"},
        "parts": [],
        "least_seconds": None,
        "least_seconds_per_picture": None,
        "largest_batch": None,
    }
    if not report["fits"]:
        return report
    for name, (lowered, runs, weight_bytes) in lower_parts(program, pipeline, params).items():
        answer = ask_compiler(lowered, program.chip, label=name, cache=cache, say=say)
        part = {"name": name, "runs": runs, "weight_bytes": weight_bytes}
        part |= {kind: answer[kind] for kind in ("flops", "bytes_accessed", "compile_seconds")}
        by_flops, by_weights = least_seconds(part, program.chip)
        part["least_seconds"] = max(by_flops, by_weights)
        part["bound_by"] = "FLOPs" if by_flops >= by_weights else "weights"
        part["temporaries"] = answer["memory"]["temporaries"]
        report["parts"].append(part)
    report["least_seconds"] = sum(part["least_seconds"] for part in report["parts"])
    report["least_seconds_per_picture"] = report["least_seconds"] / program.batch
    return report


def largest_batch(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Find the largest batch that fits: predicted from two compilations, and confirmed at n and n + 1.

    The first compilation is that of batch 1. The second is of the batch that would just fit if everything but the
    parameters and the program grew with it; a line through both gives n.

    Returns
    -------
    dict
        ``largest`` (0 if not even one picture fits), ``predicted`` (None unless both of them fit), and ``tried``: for
        each batch whether it ``fits``, the ``hbm`` of each kind in bytes (None if not), and ``compile_seconds``.
    """
    tried, usable = {}, usable_hbm(program.chip)

    def fits(batch: int) -> bool:
        if batch not in tried:
            answer = memory_report(dataclasses.replace(program, batch=batch), cache=cache, say=say)
            tried[batch] = {"batch": batch} | {key: answer[key] for key in ("fits", "hbm", "compile_seconds")}
        return tried[batch]["fits"]

    def needs(batch: int) -> int:
        return sum(tried[batch]["hbm"].values())

    largest, predicted = 0, None
    if fits(1):
        fixed = tried[1]["hbm"]["parameters"] + tried[1]["hbm"]["program"]
        largest = max(2, (usable - fixed) // (needs(1) - fixed))
        if fits(largest):
            each = max(1, (needs(largest) - needs(1)) // (largest - 1))
            largest = predicted = largest + max(0, usable - needs(largest)) // each
        while not fits(largest):
            largest -= 1
        while fits(largest + 1):
            largest += 1
    return {"largest": largest, "predicted": predicted, "tried": [tried[batch] for batch in sorted(tried)]}


def recorded_reports() -> list[dict]:
    """The reports in ``benchmarks/tpu``, sorted by their files' names; perhaps none."""
    folder = next((folder for folder in _RECORDED if folder.exists()), None)
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))] if folder else []


def text_of(report: dict) -> str:
    """A report as a page of text."""
    p = report["program"]
    lines = [
        f"{p['pipeline']}, {p['height']} × {p['width']} pixels, {p['steps']} steps, {p['dtype']}, batch {p['batch']} "
        f"on each of {p['chips']} {p['chip']} chip(s), by {p['parallel']}",
        report["verdict"],
    ]
    if found := report["largest_batch"]:
        said = "None fits: not even one picture at a time." if found["largest"] == 0 else f"It is {found['largest']}"
        if found["predicted"]:
            said += f" ({found['predicted']} was predicted)."
        lines.append(f"The largest batch that fits? {said}")
    if report["hbm"]:
        lines += ["", f"{'HBM on each chip':<20}{'MiB':>10}"]
        lines += [f"{kind:<20}{size / 2**20:>10.1f}" for kind, size in report["hbm"].items()]
    if report["parts"]:
        head = f"{'part':<16}{'runs':>5}{'GFLOP':>10}{'weights':>12}{'accessed*':>12}{'least time':>13}  bound by"
        lines += ["", head]
        for part in report["parts"]:
            lines.append(
                f"{part['name']:<16}{part['runs']:>5}{part['flops'] / 1e9:>10.4g}{part['weight_bytes'] / 1e6:>9.1f} MB"
                f"{part['bytes_accessed'] / 1e6:>9.0f} MB{part['least_seconds'] * 1e3:>10.3f} ms  {part['bound_by']}"
            )
        lines += [
            "GFLOP, weights and bytes are those of one run. *The compiler's estimate, perhaps above what is needed.",
            "",
            f"A call takes at least {report['least_seconds']:.3g} s, "
            f"a picture {report['least_seconds_per_picture']:.3g} s.",
        ]
    used, seconds = report["versions"], report["compile_seconds"]
    lines.append(f"Compiled in {seconds:.0f} s on {report['date']} by libtpu {used['libtpu']}, jax {used['jax']}.")
    return "\n".join(lines)


def table_of(reports: list[dict]) -> str:
    """Reports as a table of text, a line for each: MiB on each chip by kind, and the least seconds for a picture."""
    head = "".join(f"{kind:>12}" for kind in KINDS)
    lines = [f"{'(memory in MiB on each chip)':<66}{'fits':<5}{head}{'least':>11}{'compiled':>10}"]
    for report in reports:
        for name, hbm, least, seconds in rows_of(report):
            sizes = "".join(f"{hbm[kind] / 2**20:>12,.1f}" if hbm else f"{'-':>12}" for kind in KINDS)
            shortest = f"{least:.3g} s" if least else "-"
            lines.append(f"{name:<66}{'yes' if hbm else 'no':<5}{sizes}{shortest:>11}{seconds:>8.0f} s")
    return "\n".join(lines)


def rows_of(report: dict) -> list[tuple[str, dict | None, float | None, float]]:
    """The rows of a report in a table: one for its program, and one for the largest batch, if it was looked for.

    Each is a name, the bytes of HBM by kind (None: it does not fit), the least seconds for a picture, if they were
    counted, and the seconds that the compiler took.
    """
    p, found = report["program"], report["largest_batch"]
    name = f"{p['pipeline']} {p['height']}×{p['width']}, {p['steps']} steps, {p['dtype']}, {p['chips']} {p['chip']}, "
    heads = "" if p["split_head_dim"] == (p["pipeline"] == "sdxl") else ", other heads"
    least = report["least_seconds_per_picture"]
    rows = [(f"{name}batch {p['batch']}{heads}", report["hbm"], least, report["compile_seconds"])]
    for other in found["tried"] if found else []:
        if other["batch"] == found["largest"] > p["batch"]:
            rows.append(
                (f"{name}batch {other['batch']}, the largest{heads}", other["hbm"], None, other["compile_seconds"])
            )
    return rows
