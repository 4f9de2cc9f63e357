"""How fast FLUX.2-klein-4B and Stable Diffusion XL draw on a GPU: this course beside PyTorch.

``python -m lab.clock.gpu`` writes ``lab/records/clock/gpu.json``, and goes on where it stopped.
Weights are made up, in bfloat16. Each program draws one image at a time, in a process of its own:
``course.measure``'s, and diffusers', whose denoiser and decoder ``torch.compile`` may compile. Of
each are recorded the seconds of an image and of a step, those of the first image, compiled or not,
and the most memory that was in use. PyTorch is in ``.venv-pytorch``, as for `lab.clock.cpu`.

``python -m lab.clock.gpu MODEL PROGRAM`` runs one of them, and prints what it found: a bundled
model does on a CPU, too, in float32.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from lab.clock.cpu import PYTORCH
from lab.record import ROOT, work_through

JAX, EAGER, COMPILED = "this course", "diffusers", "diffusers, compiled"
STEPS = {"flux2": 4, "sdxl": 20}  # of an image
CALLS = 3


def questions(rows: list[dict]) -> list[dict]:
    card = find_card()
    programs = [{"program": program} for program in (JAX, EAGER, COMPILED)]
    return [
        {"card": card, "model": model, "steps": steps} | program
        for model, steps in STEPS.items()
        for program in programs
    ]


def find_card() -> str:
    """Return the name of the first GPU, as its driver has it."""
    if not shutil.which("nvidia-smi"):
        sys.exit("There is no nvidia-smi, so no GPU of NVIDIA's: name a model and a program.")
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.splitlines()[0]


def answer(card: str, model: str, program: str, steps: int) -> dict:
    python = sys.executable if program == JAX else PYTORCH
    if not Path(python).exists():
        raise RuntimeError(f"there is no {python}: see CONTRIBUTING.md.")
    command = [python, "-m", "lab.clock.gpu", model, program]
    # JAX takes only what it needs, so that it can be counted.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"its process ended with the status {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


def summarize(first: float, image: float, longer: float, steps: int, peak: int | None) -> dict:
    """Return an answer, from the seconds of images in so many steps, and in twice as many."""
    return {
        "first": round(first, 1),
        "image": round(image, 4),
        "step": round((longer - image) / steps, 4),
        "peak bytes": peak,
    }


def run_jax(model: str, steps: int) -> dict:
    """Draw by ``course.sd`` or ``course.flux2``."""
    import jax

    from course.measure import measure

    short, long = (measure(model, each, calls=CALLS) for each in (steps, 2 * steps))
    first = short.compile_seconds + short.steady
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return summarize(first, short.steady, long.steady, steps, peak)


def run_diffusers(model: str, steps: int, is_compiled: bool) -> dict:
    """Draw by diffusers, with the numbers that PyTorch makes up."""
    os.environ["USE_FLAX"] = "0"  # or diffusers imports JAX, because it is installed
    import torch

    from course.tpu.programs import make_program

    program = make_program(model, attention="automatic")
    size = {"height": program.height, "width": program.width}
    has_gpu = torch.cuda.is_available()
    with torch.device("cuda" if has_gpu else "cpu"), torch.no_grad():
        torch.set_default_dtype(torch.bfloat16 if has_gpu else torch.float32)
        pipeline, denoiser, encode = build(model)
        torch.set_default_dtype(torch.float32)  # of what is not a weight, such as masks
        pipeline.set_progress_bar_config(disable=True)
        if is_compiled:
            setattr(pipeline, denoiser, torch.compile(getattr(pipeline, denoiser), dynamic=False))
            pipeline.vae.decode = torch.compile(pipeline.vae.decode, dynamic=False)

        def clock(steps: int) -> float:
            start = time.perf_counter()
            pipeline(**encode(), **size, num_inference_steps=steps, output_type="np")
            return time.perf_counter() - start

        first = clock(steps)
        image = statistics.median(clock(steps) for _ in range(CALLS))
        clock(2 * steps)  # which may compile more
        longer = statistics.median(clock(2 * steps) for _ in range(CALLS))
    peak = torch.cuda.max_memory_allocated() if has_gpu else None
    return summarize(first, image, longer, steps, peak) | {"torch": torch.__version__}


def build(model: str) -> tuple:
    """Return a pipeline, the name of its denoiser, and a function that encodes a prompt."""
    import diffusers
    import torch
    import transformers

    from course.tpu.programs import configured_folder
    from helpers.models import which_model

    folder = configured_folder(model)

    def make(part: str, kind: type):
        options = json.loads((folder / part / "config.json").read_text(encoding="utf-8"))
        if hasattr(kind, "from_config"):
            made = kind.from_config(options)
        else:
            made = kind(kind.config_class(**options))
        return made.to(torch.get_default_dtype())

    if which_model(folder) == "flux2":
        text = make("text_encoder", transformers.Qwen3ForCausalLM)
        ids = torch.zeros(1, min(512, text.config.max_position_embeddings), dtype=torch.int64)
        depth = text.config.num_hidden_layers
        layers = [depth // 4, depth // 2, 3 * depth // 4]

        def encode() -> dict:
            states = text(ids, output_hidden_states=True, use_cache=False).hidden_states
            return {"prompt_embeds": torch.cat([states[layer] for layer in layers], dim=-1)}

        pipeline = diffusers.Flux2KleinPipeline(
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
                folder / "scheduler"
            ),
            vae=make("vae", diffusers.AutoencoderKLFlux2),
            text_encoder=text,
            tokenizer=None,
            transformer=make("transformer", diffusers.Flux2Transformer2DModel),
            is_distilled=True,
        )
        return pipeline, "transformer", encode

    ids = torch.zeros(1, 77, dtype=torch.int64)
    first = make("text_encoder", transformers.CLIPTextModel)
    second = make("text_encoder_2", transformers.CLIPTextModelWithProjection)

    def encode() -> dict:
        # The empty prompt is encoded, too, for guidance.
        found = {}
        for which in ("", "negative_"):
            both = [encoder(ids, output_hidden_states=True) for encoder in (first, second)]
            states = torch.cat([said.hidden_states[-2] for said in both], dim=-1)
            found[f"{which}prompt_embeds"] = states
            found[f"{which}pooled_prompt_embeds"] = both[1].text_embeds
        return found

    pipeline = diffusers.StableDiffusionXLPipeline(
        vae=make("vae", diffusers.AutoencoderKL),
        text_encoder=first,
        text_encoder_2=second,
        tokenizer=None,
        tokenizer_2=None,
        unet=make("unet", diffusers.UNet2DConditionModel),
        scheduler=diffusers.EulerDiscreteScheduler.from_pretrained(folder / "scheduler"),
    )
    return pipeline, "unet", encode


def main(arguments: list[str]) -> int:
    if not arguments:
        failed = work_through("clock/gpu", sys.modules[__name__], "", float("inf"))
        return 1 if failed else 0
    model, program = arguments
    steps = STEPS.get(model, 2)  # of a bundled model
    if program == JAX:
        found = run_jax(model, steps)
    else:
        found = run_diffusers(model, steps, is_compiled=program == COMPILED)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
