"""Reports on a program: will it fit, what takes the memory, and what is the least time."""

import dataclasses
import json
from pathlib import Path

from helpers.tpu.compiler import CHIPS, ask_compiler, usable_hbm, versions
from helpers.tpu.programs import Program, load_shapes, lower_parts, lower_program, picture_size, tree_bytes

GIB = 2**30
KINDS = ("parameters", "temporaries", "program", "output")  # of what lies in HBM
# Seconds for a picture of 1024 × 1024 pixels in 20 steps by SDXL in bfloat16, on each of four chips at a time, measured
# with JAX 0.4.16: https://huggingface.co/blog/sdxl_jax. The v4-8 has four chips; its name counts cores.
PUBLISHED = {"v5e": ("TPU v5e-4", 2.33), "v4": ("TPU v4-8", 2.16)}
# Installed from a wheel, the recorded reports lie inside the package; in a clone of the repository, beside it.
_RECORDED = (Path(__file__).parents[1] / "recorded", Path(__file__).parents[2] / "benchmarks" / "tpu")


def memory_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Whether a program fits, and what takes how much of the HBM of each chip. One compilation.

    The compiler decides: it refuses a program that does not fit. It never hears of parameters that the program does
    not read, such as the VAE's encoder; as they lie on the chip all the same, there has to be room for them, too.

    Returns
    -------
    dict
        ``fits``; ``verdict``, a sentence; ``usable_hbm`` in bytes; ``hbm``, the bytes of each kind (None where the
        compiler refuses); ``whole``, what the compiler counts in the whole program, a loop's body once; and
        ``compile_seconds`` and ``date``.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    label = f"{program.pipeline} {program.dtype} {program.chip}-{program.chips} batch {program.batch}"
    say(f"{label}: lowering …")
    lowered = lower_program(program, pipeline, params)
    answer = ask_compiler(lowered, program.chip, params, label=label, cache=cache, say=say)
    usable, hbm, fits = usable_hbm(program.chip), None, answer["fits"]
    if fits:
        memory = answer["memory"]
        hbm = {"parameters": memory["arguments"] + memory["unread"]} | {kind: memory[kind] for kind in KINDS[1:]}
        fits = sum(hbm.values()) <= usable
        sizes = f"its parts take {sum(hbm.values()) / GIB:.2f} GiB on each chip, of {usable / GIB:.2f} GiB."
        verdict = f"It fits: {sizes}" if fits else f"It does not fit: {sizes}"
    else:
        verdict = f"It does not fit. The compiler: {answer['message'].splitlines()[0]}"
    return {
        "fits": fits,
        "verdict": verdict,
        "usable_hbm": usable,
        "hbm": hbm,
        "whole": {kind: answer.get(kind) for kind in ("flops", "bytes_accessed")},
        "compile_seconds": answer["compile_seconds"],
        "date": answer["date"],
    }


def least_seconds(part: dict, chip: str) -> tuple[float, float]:
    """Seconds below which a part, as it was compiled, cannot be done: for its operations, and to read its weights.

    What fits into the memory on the chip needs to be read only once in all of the part's runs.
    """
    peak, weights = CHIPS[chip], part["weight_bytes"]
    reads = weights + (part["runs"] - 1) * max(0, weights - peak.on_chip)
    return part["runs"] * part["flops"] / peak.flops, reads / peak.bandwidth


def compile_report(program: Program, *, cache: Path | None = None, say=lambda line: None) -> dict:
    """Ask the compiler about a whole program and about its parts. Seconds for a small one, minutes for a real one.

    Returns
    -------
    dict
        What ``benchmarks/report.schema.json`` describes: the program, the versions, ``memory_report``'s answers, the
        bytes of each model's parameters, the parts, and the least seconds for a call and for a picture.
    """
    pipeline, params = load_shapes(program.pipeline, program.dtype, program.split_head_dim)
    height, width = picture_size(program, pipeline)
    layout = bool(pipeline.unet.config.split_head_dim)
    settings = {"pipeline": Path(program.pipeline).name, "height": height, "width": width, "split_head_dim": layout}
    report = {
        "program": dataclasses.asdict(program) | settings,
        "versions": versions(),
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
        report["parts"].append(part)
    report["least_seconds"] = sum(part["least_seconds"] for part in report["parts"])
    report["least_seconds_per_picture"] = report["least_seconds"] / program.batch
    return report


def largest_batch(
    program: Program,
    *,
    report: dict | None = None,
    guess: int | None = None,
    cache: Path | None = None,
    say=lambda line: None,
) -> dict:
    """Find a batch n that fits while n + 1 does not. Both are compiled, as memory does not grow evenly.

    Compiled are batch 1; a guess; and the batch at which a straight line through those two reaches the memory's limit.
    If that one fits, larger ones follow, and smaller ones if not, in steps that double, until the limit lies between
    two; then those in the middle.

    Parameters
    ----------
    program : Program
        Its batch does not count.
    report : dict, optional
        What ``compile_report`` says of this program at batch 1. It spares that compilation, if by the same versions.
    guess : int, optional
        For the second compilation. By default half of what would fit if all pictures needed as much as the first:
        those after it need more.

    Returns
    -------
    dict
        ``largest`` (0 if not even one picture fits); ``predicted``, by the line, which goes no further than to four
        times the guess (None if the guess does not fit); ``versions``; ``date`` of the last answer; and ``tried``: for
        each batch whether it ``fits``, the ``hbm`` of each kind in bytes (None where the compiler refuses), and
        ``compile_seconds``.
    """
    tried, dates, usable = {}, set(), usable_hbm(program.chip)

    def fits(batch: int) -> bool:
        if batch not in tried:
            if batch == 1 and report and report["versions"] == versions():
                answer = report
            else:
                answer = memory_report(dataclasses.replace(program, batch=batch), cache=cache, say=say)
            tried[batch] = {"batch": batch} | {key: answer[key] for key in ("fits", "hbm", "compile_seconds")}
            dates.add(answer["date"])
        return tried[batch]["fits"]

    def needs(batch: int) -> int:
        return sum(tried[batch]["hbm"].values())

    largest, predicted = int(fits(1)), None
    refused = None if largest else 1  # the smallest batch that does not fit
    if largest:
        fixed = tried[1]["hbm"]["parameters"] + tried[1]["hbm"]["program"]
        guess = batch = max(2, guess or (usable - fixed) // max(1, needs(1) - fixed) // 2)
        if fits(guess):
            largest = guess
            each = max(1, (needs(guess) - needs(1)) // (guess - 1))
            batch = predicted = min(guess + (usable - needs(guess)) // each, 4 * guess)
        step = 1 if predicted else max(1, guess // 4)
    while refused is None or refused > largest + 1:
        if fits(batch):
            largest = batch
            batch += step
        else:
            refused = batch
            batch -= step
        step *= 2
        if refused and not largest < batch < refused:
            batch = (largest + refused) // 2
    return {
        "largest": largest,
        "predicted": predicted,
        "versions": versions(),
        "date": max(dates),
        "tried": [tried[batch] for batch in sorted(tried)],
    }


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
        said = f"It is {found['largest']}" if found["largest"] else "None fits: not even one picture at a time"
        if found["predicted"]:
            said += f" ({found['predicted']} was predicted)"
        lines.append(f"The largest batch that fits? {said}.")
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
    """Reports as a table in Markdown, with a row for each program and for its largest batch, and who answered when."""
    rows = [["pipeline", "chips", "batch", "fits", *KINDS, "GFLOP", "at least", "compiled"]]
    for report in reports:
        p, found = report["program"], report["largest_batch"]
        name = f"{p['pipeline']}, {p['height']} × {p['width']}, {p['steps']} steps, {p['dtype']}"
        if p["split_head_dim"] != ("text_encoder_2" in report["parameter_bytes"]):  # which only XL has
            name += f", split_head_dim={p['split_head_dim']}"
        entries = [report | {"batch": p["batch"]}]
        if found:
            entries += [other for other in found["tried"] if other["batch"] == found["largest"] > p["batch"]]
        for entry in entries:
            largest = ", the largest" if found and entry["batch"] == found["largest"] else ""
            sizes = [f"{entry['hbm'][kind] / 2**20:,.1f}" if entry["hbm"] else "" for kind in KINDS]
            chips = f"{p['chips']}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}{p['chip']}"
            row = [name, chips, f"{entry['batch']}{largest}", "yes" if entry["fits"] else "no"]
            flops = sum(part["flops"] * part["runs"] for part in entry.get("parts", ())) / entry["batch"]
            bound = [f"{flops / 1e9:,.0f}", f"{entry['least_seconds_per_picture']:.3g} s"] if flops else ["", ""]
            rows.append([*row, *sizes, *bound, f"{entry['compile_seconds']:.0f} s"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths[:4]] + [f"{'-' * (width - 1)}:" for width in widths[4:]])
    aligned = [[*map(str.ljust, row[:4], widths), *map(str.rjust, row[4:], widths[4:])] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in aligned]
    answers = [answer for report in reports for answer in (report, report["largest_batch"]) if answer]
    asked = {f"libtpu {answer['versions']['libtpu']} with jax {answer['versions']['jax']}" for answer in answers}
    dates = sorted(answer["date"] for answer in answers)
    units = "Memory is in MiB on each chip; operations and the least time are those of a picture."
    when = f"from {dates[0]} to {dates[-1]}" if dates[0] < dates[-1] else f"on {dates[0]}"
    lines += ["", f"{units} Answered by {', '.join(sorted(asked))}, {when}."]
    return "\n".join(lines)


def published_times(reports: list[dict]) -> list[tuple[str, float, float]]:
    """For each of ``PUBLISHED`` whose program is among the reports the system, its least and its measured seconds."""
    found = []
    for chip, (system, measured) in PUBLISHED.items():
        wanted = {
            "pipeline": "sdxl",
            "chip": chip,
            "dtype": "bfloat16",
            "steps": 20,
            "batch": 1,
            "split_head_dim": True,
        }
        least = [report["least_seconds"] for report in reports if wanted.items() <= report["program"].items()]
        found += [(system, seconds, measured) for seconds in least]
    return found
