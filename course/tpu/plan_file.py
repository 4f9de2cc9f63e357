"""Write a plan's way to split as a file of Python that draws: ``python FILE PROMPT … FOLDER``."""

import json
from pathlib import Path
from string import Template

from course import flux2
from course.commands import in_one_line
from course.model.files import write_bytes
from course.tpu.pieces import FLUX2_GUIDANCE, load_config
from course.tpu.plan import Job, suitable_draw
from course.tpu.splits import TENSOR_BY_HAND, Call, Way, flux2_call, sd_call
from helpers.models import MODELS, bundled_names

NO_QUOTES = str.maketrans({'"': "'", "\\": "/"})  # so that no model's name ends the docstring
PLAIN = '"plain"'
SHARDINGS = """\
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
"""
# Where models are of which the configuration comes with the course.
HUB_IDS = {name: model.hub_id for name, model in MODELS.items()}
HUB_IDS["flux2-9b"] = "black-forest-labs/FLUX.2-klein-9B"

WRITER = "`python -m course.tpu plan` wrote this file"  # which a later plan may replace
HEAD = '''\
"""$title.

$writer for $way. It draws an image for each prompt:

    python $name "a prompt"$more pictures

Import the file to give `load` a folder of your own.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
${imports}from PIL import Image

from course import $package
from course.tpu.splits import mesh_of
from helpers.models import find_model

MODEL = $model
PROMPTS = $batch  # at a time
HEIGHT, WIDTH = $height, $width  # in pixels
STEPS = $steps
GUIDANCE = $guidance
SIZES = $sizes  # of the mesh

chips = int(np.prod(list(SIZES.values())))
if len(jax.devices()) < chips:
    raise SystemExit(f"This file is for {chips} devices, and here are {len(jax.devices())}.")
mesh = mesh_of(jax.devices()[:chips], SIZES)
'''

TAIL = '''

def check_prompts(prompts):
    """Raise ``ValueError`` unless there are as many prompts as the plan is for."""
    if len(prompts) != PROMPTS:
        raise ValueError(f"This file is for {PROMPTS} prompt(s) at a time: give so many.")


def main(prompts, folder):
    """Draw the prompts, and write the images into a folder."""
    check_prompts(prompts)
    images = draw(*load(find_model(MODEL)), prompts)
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number, image in enumerate(np.asarray(images)):
        pixels = np.uint8(np.round(255 * np.float32(image)))
        Image.fromarray(pixels).save(Path(folder) / f"{number}.png")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(f"Usage: python {sys.argv[0]} PROMPT … FOLDER")
    main(sys.argv[1:-1], sys.argv[-1])
'''

FLUX2 = '''$velocity
generate = jax.jit(flux2.generate, static_argnames=flux2.STATIC)


def load(folder, dtype=jnp.bfloat16):
    """Read a model so that each chip gets its part: parameters, configuration and tokenizer."""
    config = flux2.read_config(folder)
    $loading


def draw(params, config, tokenize, prompts, seed=0):
    """Draw an image for each prompt: from 0 to 1, (prompts, height, width, 3)."""
    check_prompts(prompts)
    noise = flux2.random_tokens(jax.random.key(seed), config, len(prompts), HEIGHT, WIDTH)
    empty = None if GUIDANCE is None else tokenize([""])
    return generate(
        params,
        config,
        *tokenize(prompts),
        noise,
        HEIGHT,
        WIDTH,
        STEPS,
        GUIDANCE,
        empty,
        velocity=velocity,
    )
'''

LOADED = "return flux2.load(folder, dtype, flux2.shardings(config, mesh, flux2.$rules))"
SORTED = """where = flux2.shardings(config, mesh, flux2.$rules)
    params, config, tokenize = flux2.load(folder, dtype, where)
    # In each block, what a chip needs lies together.
    p = flux2.sort_columns(params["transformer"], config.transformer, mesh.shape["model"])
    params["transformer"] = jax.device_put(p, where["transformer"])
    return params, config, tokenize"""

SD = '''$attention
generate = jax.jit(sd.generate, static_argnames=sd.STATIC)


def load(folder, dtype=jnp.bfloat16):
    """Read a model so that each chip gets its part: parameters, configuration and tokenizer."""
    config = sd.read_config(folder)
    return sd.load(folder, dtype, sd.shardings(config, mesh, sd.$rules))


def draw(params, config, tokenize, prompts, seed=0):
    """Draw an image for each prompt: from 0 to 1, (prompts, height, width, 3)."""
    check_prompts(prompts)
    side = config.pixels_per_latent
    shape = (len(prompts), HEIGHT // side, WIDTH // side, config.unet.in_channels)
    noise = jax.random.normal(jax.random.key(seed), shape)
    noise = jax.device_put(noise, NamedSharding(mesh, P($noise)))
    # The model keeps its batch where the mesh says.
    with jax.set_mesh(mesh):
        return generate(
            params,
            config,
            tokenize(prompts),
            None,
            tokenize([""]),
            STEPS,
            1.0 if GUIDANCE is None else GUIDANCE,
            noise,
            attention=attention,
            height=HEIGHT,
            width=WIDTH,
            guided=GUIDANCE is not None,
        )
'''


def check_place(file: Path) -> None:
    """Raise ``RuntimeError``, of one sentence, if what is in a file's place is none of a plan's."""
    if file.exists() and not (file.is_file() and WRITER.encode() in file.read_bytes()):
        raise RuntimeError(
            f"{file} was not written by a plan: move it away, or give a different folder."
        )


def write_plan(job: Job, way: Way, file: Path) -> None:
    """Write the file for one way.

    Parameters
    ----------
    job : Job
    way : Way
        One that the model can be split in.
    file : Path
        Where to; what is there is replaced.
    """
    program = job.program
    model = HUB_IDS.get(program.model, program.model)
    if model not in bundled_names() and Path(model).is_dir():
        model = str(Path(model).absolute())  # so the file can be started in any folder
    config = load_config(program.model)
    _, guidance = suitable_draw(config)
    if guidance <= 1:  # a distilled model, whose guidance somebody asked for
        guidance = FLUX2_GUIDANCE
    values = {
        "writer": WRITER,
        "title": in_one_line(str(job)).translate(NO_QUOTES),
        "way": way,
        "name": file.name,
        "more": " …" if program.batch > 1 else "",
        "model": repr(model),
        "batch": program.batch,
        "height": program.height,
        "width": program.width,
        "steps": program.steps,
        "guidance": guidance if job.guided else None,
        "sizes": json.dumps(way.mesh),
        "rules": way.rules,
    }
    if isinstance(config, flux2.Config):
        body = FLUX2
        values |= {
            "package": "flux2",
            "imports": "",
            "velocity": f"velocity = {python_of('flux2', flux2_call(way))}",
            "loading": SORTED if way.kind == TENSOR_BY_HAND else LOADED,
        }
    else:
        body = SD
        call = sd_call(way)
        axes = ['"data"' if program.batch % way.groups == 0 else "None"]
        if "tokens" in way.mesh:
            axes.append('"tokens"')
        values |= {
            "package": "sd",
            "imports": SHARDINGS,
            "attention": f"attention = {python_of('sd', call) if call else PLAIN}",
            "noise": ", ".join(axes),
        }
    body = body.replace("$loading", values.pop("loading", ""))
    text = Template(HEAD + body + TAIL).substitute(values)
    write_bytes(file, text.encode())


def python_of(package: str, call: Call) -> str:
    """Return a call as Python has it.

    >>> python_of("sd", Call("split_pixels", {"way": "ring"}))
    'sd.split_pixels(mesh, way="ring")'
    """
    options = [f', {name}="{value}"' for name, value in call.options.items()]
    return f"{package}.{call.name}(mesh{''.join(options)})"
