"""Record what the TPU compiler says about Stable Diffusion 1.4 and XL: ``make tpu-report``.

Writes a file to ``benchmarks/tpu`` for each program as soon as its answer is there, and leaves out those that have one.
Every single compilation is kept in the tool's cache as well, so an interrupted run goes on where it stopped. All of it
takes many hours on 2 cores: ``--minutes`` and ``--only`` take a part of it.
"""

import argparse
import dataclasses
import sys
import time
from pathlib import Path

import diffusers
import jax
import transformers

from helpers import tpu

FOLDER = Path(__file__).with_name("tpu")


def programs() -> dict[str, tuple[tpu.Program, bool]]:
    """The programs of the report by name, the most useful first; True where the largest batch is to be looked for."""
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    models = {"sd": {"steps": 50}, "sdxl": {"steps": 20}}
    found = {}
    for dtype in ("bfloat16", "float32"):
        for largest in (False, True):
            for chip in ("v5e", "v4", "v6e"):
                for model, settings in models.items():
                    name = f"{model}-{dtype}-{chip}-{'largest-batch' if largest else 'batch-1'}"
                    found[name] = (tpu.Program(model, chip, dtype=dtype, **settings), largest)
        if dtype == "bfloat16":
            for model, settings in models.items():
                heads = model != "sdxl"  # the other way than usual
                program = tpu.Program(model, "v5e", dtype=dtype, split_head_dim=heads, **settings)
                found[f"{model}-{dtype}-v5e-other-heads"] = (program, False)
    return found


def record(program: tpu.Program, largest: bool, cache: Path, say) -> dict:
    found = None
    if largest:
        found = tpu.largest_batch(program, cache=cache, say=say)
        program = dataclasses.replace(program, batch=max(1, found["largest"]))
    return tpu.compile_report(program, cache=cache, say=say) | {"largest_batch": found}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="start no program after so many minutes")
    parser.add_argument("--only", default="", help="only programs whose name has this in it")
    parser.add_argument(
        "--list", action="store_true", help="say what is recorded and what is left, and compile nothing"
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder of the report (%(default)s)")
    parser.add_argument("--cache", type=Path, default=tpu.default_cache(), help="folder of answers (%(default)s)")
    options = parser.parse_args(arguments)
    wanted = {name: what for name, what in programs().items() if options.only in name}
    if not wanted:
        parser.error(f"no program has {options.only!r} in its name; there are {', '.join(programs())}")
    left = [name for name in wanted if not (options.to / f"{name}.json").exists()]
    if options.list:
        for name in wanted:
            print(f"{name:<36}{'to do' if name in left else 'recorded'}")
        return 0

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        tpu.require_compiler()
    except RuntimeError as error:
        say(str(error))
        return 1
    diffusers.logging.set_verbosity_error()
    transformers.logging.set_verbosity_error()
    jax.config.update("jax_platforms", "cpu")
    start = time.monotonic()
    for name in list(left):
        if options.minutes is not None and time.monotonic() - start > options.minutes * 60:
            break
        say(f"== {name}")
        tpu.write_json(options.to / f"{name}.json", record(*wanted[name], options.cache, say))
        left.remove(name)
        say(f"recorded; left: {', '.join(left) or 'nothing'}")
    print(f"{len(wanted) - len(left)} of {len(wanted)} programs are recorded.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
