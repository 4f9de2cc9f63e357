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
from helpers.tpu.compiler import write_json

FOLDER = Path(__file__).with_name("tpu")


def programs() -> dict[str, tuple[tpu.Program, bool]]:
    """The programs of the report by name, the most useful first; True where the largest batch is to be looked for."""
    # The bundled checkpoint compiles in seconds: it shows what chips and steps change (nothing), and what heads do.
    small = {"chips": 8, "steps": 20}
    heads = {"split_head_dim": True}
    variants = {"8-chips": {}, "1-chip": {"chips": 1}, "50-steps": {"steps": 50}, "other-heads": heads}
    found = {f"shapes-sd-bfloat16-v5e-{n}": (tpu.Program("shapes-sd", **small | v), False) for n, v in variants.items()}
    # What was published for SDXL took 20 steps; the step count changes no program's size.
    steps = {"sd": 50, "sdxl": 20}
    for largest in (False, True):
        for dtype in ("bfloat16", "float32"):
            # Published are times of SDXL on v5e and v4, so these come first.
            for name in ("sd-v5e", "sdxl-v5e", "sdxl-v4", "sd-v6e", "sdxl-v6e", "sd-v4"):
                model, chip = name.split("-")
                program = tpu.Program(model, chip, dtype=dtype, steps=steps[model])
                found[f"{model}-{dtype}-{chip}-{'largest-batch' if largest else 'batch-1'}"] = (program, largest)
        if not largest:
            for model in steps:  # attention laid out the other way than usual
                program = tpu.Program(model, "v5e", steps=steps[model], split_head_dim=model != "sdxl")
                found[f"{model}-bfloat16-v5e-other-heads"] = (program, False)
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
        tpu.tpu_devices()
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
        write_json(options.to / f"{name}.json", record(*wanted[name], options.cache, say))
        left.remove(name)
        say(f"recorded; left: {', '.join(left) or 'nothing'}")
    print(f"{len(wanted) - len(left)} of {len(wanted)} programs are recorded.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
