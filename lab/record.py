"""Record the answers to a subject's questions: ``python -m lab.record ask/flux2``.

``lab/ask`` asks the TPU compiler, ``lab/score`` has the judge count, ``lab/clock`` measures times.
There each subject is a module with two functions: ``questions(rows)`` returns what is to be asked,
as dictionaries, which may depend on the rows recorded so far; ``answer(**question)`` returns the
answer to one. ``lab/records`` has the rows, which `helpers.read_record` reads. Each row is written
as soon as it is there, and what is recorded is not asked again: an interrupted command goes on
where it stopped, and to ask anew, delete rows. Processes may work at once on one subject, if their
``--only`` differs.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path
from types import ModuleType

import jax

from course.tpu import records
from course.tpu.chips import require_compiler
from helpers import quiet_warnings

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "lab" / "records"
SUBJECTS = (
    "ask/questions",
    "ask/products",
    "ask/programs",
    "ask/shardings",
    "ask/plans",
    "ask/rooflines",
    "ask/options",
    "ask/finetune",
    "ask/flux2",
    "ask/int8",
    "ask/kernels",
    "ask/tiles",
    "score/sd",
    "score/flux2",
    "score/few_steps",
    "score/splits",
    "score/finetune",
    "clock/cpu",
    "clock/draw",
    "clock/reading",
    "clock/training",
)
PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "diffusers", "transformers", "numpy", "scipy")
PACKAGES += ("optax", "orbax-checkpoint", "ray", "pyarrow", "safetensors")
# With some large batches libtpu 0.0.42.1 overflows the stacks of its threads, and ends its process.
# These are its own flags. A libtpu that lacks one ends its process, too, and names it.
STACKS = (
    "--xla_internal_thread_stack_size_bytes=16777216 "
    "--default_thread_stack_size=16777216 "
    "--fibers_default_thread_stack_size=16777216"
)


def read_rows(name: str) -> list[dict]:
    """Return the rows of a record, and none if there is no such record yet."""
    return records.read_rows(FOLDER / f"{name}.json")


def write_rows(name: str, rows: list[dict]) -> None:
    """Write the rows of a record, see `course.tpu.records.write_rows`."""
    records.write_rows(FOLDER / f"{name}.json", rows)


def make_row(question: dict, answer: dict) -> dict:
    """Return a row of a record: an answer, when, with which versions, and on which machine."""
    return records.make_row(question, answer, *PACKAGES) | {"machine": machine()}


def machine() -> dict:
    """Return this machine's processor, as Linux calls it or by its architecture, and its cores."""
    name = platform.machine()
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": os.cpu_count()}


def find_left(subject: ModuleType, rows: list[dict]) -> dict[str, dict]:
    """Return the questions that have no answer yet, by their names."""
    known = [row["question"] for row in rows]
    return {name_of(asked): asked for asked in subject.questions(rows) if asked not in known}


def name_of(question: dict) -> str:
    """Return what a question is called in the list of what is left.

    >>> name_of({"model": "sd", "batch": 4, "attention": None})
    'model sd, batch 4'
    """
    return ", ".join(f"{key} {value}" for key, value in question.items() if value is not None)


def work_through(name: str, subject: ModuleType, only: str, minutes: float) -> list[str]:
    """Record what is left, one after another, and return the names of what failed.

    What failed is tried once. Begin nothing after so many minutes, and only what has ``only`` in
    its name.
    """
    failed = []
    start = time.monotonic()
    while time.monotonic() - start < 60 * minutes:
        left = find_left(subject, read_rows(name))
        wanted = [each for each in left if only in each and each not in failed]
        if not wanted:
            break
        asked = left[wanted[0]]
        print(f"== {wanted[0]}; {len(wanted)} left", flush=True)
        try:
            row = make_row(asked, subject.answer(**asked))
        except RuntimeError as error:
            print(f"It failed: {error}", flush=True)
            failed.append(wanted[0])
            continue
        print(json.dumps(row["answer"])[:400], flush=True)
        write_rows(name, [*read_rows(name), row])  # read again: others may have written, too
    return failed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("subject", choices=SUBJECTS, metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--list", action="store_true", help="say what is left, and do nothing")
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin nothing after so many minutes"
    )
    options = parser.parse_args(arguments)
    quiet_warnings()
    jax.config.update("jax_platforms", "cpu")
    subject = importlib.import_module(f"lab.{options.subject.replace('/', '.')}")
    if options.list:
        left = find_left(subject, read_rows(options.subject))
        print("\n".join(name for name in left if options.only in name) or "Nothing is left.")
        return 0
    if options.subject.startswith("ask/"):
        os.environ.setdefault("LIBTPU_INIT_ARGS", STACKS)
        try:
            require_compiler()
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("course").setLevel(logging.INFO)
    failed = work_through(options.subject, subject, options.only, options.minutes)
    left = find_left(subject, read_rows(options.subject))
    print(f"Left: {len(left)}. Failed: {'; '.join(failed) or 'nothing'}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
