"""What the recorders share: records that are written whole, and work that can be interrupted."""

import argparse
import datetime
import json
import logging
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

from course.tpu.compiler import versions

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks"


def write_json(file: Path, content) -> None:
    """Write a file whole or not at all, so that an interruption leaves nothing half-written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(file)


def read_json(file: Path, default):
    """What a record holds, or the default if there is none yet."""
    if file.exists():
        return json.loads(file.read_text())
    return default


def origin(*packages: str) -> dict:
    """When, and with which versions of packages, something is recorded."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": date, "versions": versions(*packages)}


def name_of(question: dict) -> str:
    """What a question is called in the list of what is left.

    >>> name_of({"model": "sd", "batch": 4})
    'model sd, batch 4'
    """
    return ", ".join(f"{key} {value}" for key, value in question.items())


def machine() -> dict:
    """This machine's processor, as Linux calls it or by its architecture, and its cores."""
    name = platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": os.cpu_count()}


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options that `work_through` takes."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say what is left, and do nothing")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many minutes")
    return parser


def work_through(
    find_left: Callable[[], dict[str, Callable[[], None]]], options: argparse.Namespace
) -> int:
    """Record what is left, one after another, until nothing is.

    Parameters
    ----------
    find_left : callable
        It says what is not recorded yet, by name, and what records it. It is asked again after
        each, so two recorders may work at once if their ``--only`` differs, and an answer may be
        what the next question depends on.
    options : argparse.Namespace
        From `make_parser`.

    Returns
    -------
    int
        An exit status: 1 if something failed. The others were tried all the same.
    """
    failed = set()

    def find_wanted() -> dict[str, Callable[[], None]]:
        wanted = {}
        for name, record in find_left().items():
            if options.only in name and name not in failed:
                wanted[name] = record
        return wanted

    wanted = find_wanted()
    if options.list:
        print("\n".join(wanted) or "Nothing is left.")
        return 0
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("course").setLevel(logging.INFO)
    start = time.monotonic()
    while wanted and (options.minutes is None or time.monotonic() - start < 60 * options.minutes):
        name, record = next(iter(wanted.items()))
        print(f"== {name}, of {len(wanted)} left", flush=True)
        try:
            record()
        except RuntimeError as error:
            print(f"It failed: {error}", flush=True)
            failed.add(name)
        wanted = find_wanted()
    print(f"Left: {len(wanted)}. Failed: {', '.join(sorted(failed)) or 'nothing'}.")
    return 1 if failed else 0
