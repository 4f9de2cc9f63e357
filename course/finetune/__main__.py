"""Fine-tuning by LoRA: ``python -m course.finetune PHOTOS FILE --word bowtie --like star``.

PHOTOS is a folder of pictures in any size. Captions are in ``metadata.jsonl``, as Hugging Face's
datasets have them, or beside each picture in a text file of its name, as kohya's scripts have them;
``--caption`` is for pictures without one. The command trains a LoRA on them, for any model that
this course knows, and of Stable Diffusion the embedding of a new word if one is given. It writes
FILE, a LoRA for PyTorch's diffusers, ComfyUI and this course, and the embedding beside it. You may
interrupt it at any time: the same command goes on from the state that was saved last, and ends in
the same numbers.

FLUX.2-klein learns edits from pairs of pictures: ``--references`` is the folder of those before the
edit, by the same names as those after it in PHOTOS, whose captions say what to change.

So that the model does not forget what it can draw already, each step may also *rehearse*: some of
its examples are pictures of the model's own kind. This is called prior preservation, and DreamBooth
introduced it (arXiv:2208.12242).
"""

import argparse
import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from course import sd
from course.commands import check_writable, make_parser, run, writing_to
from course.families import Config, find_code
from course.finetune.photos import read_folder, read_references
from course.finetune.training import (
    FOR_KLEIN,
    FOR_SD,
    FOR_XL,
    Recipe,
    Saver,
    check_between,
    check_word,
    compile_step,
    describe,
    init_state,
    make_data,
    room_for,
    train,
    trained_parts,
    usual_recipe,
)
from course.sd.words import add_word, save_word, word_file
from course.tpu.programs import LARGEST_SIDE
from helpers import find_model, simulate_devices
from helpers.models import NO_WEIGHTS

FOR = {"SD": FOR_SD, "XL": FOR_XL, "klein": FOR_KLEIN}  # recipes for models that everybody has


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser("course.finetune", __doc__)
    add = parser.add_argument
    add("images", type=Path, metavar="photos", help="a folder of pictures with captions")
    add("file", type=Path, help="the LoRA to write, FILE.safetensors")
    add(
        "--model",
        default="shapes-sd",
        help="a folder in diffusers' format, a Hub id or a bundled name (default: %(default)s)",
    )
    add("--caption", help="of the pictures that have none of their own")
    add("--references", type=Path, help="a folder of what the pictures are edits of")
    add("--word", help="a new word in the captions")
    add("--like", default="", help="what the word may mean at first, in words the model knows")
    add("--rehearse", type=Path, help="such a folder of what the model should not forget")
    add("--rehearse-caption", help="of the rehearsed pictures that have none of their own")
    add("--rehearse-references", type=Path, help="likewise, of what those are edits of")
    add(
        "--prior-weight",
        type=float,
        default=1.0,
        help="how much the loss of a rehearsed example counts (default: %(default)s)",
    )
    add("--mirror", action="store_true", help="use the new images mirrored as well")
    add("--size", type=int, help="height and width to train at (default: the model's own)")
    add("--state", type=Path, help="where states are saved (default: FILE.state)")
    add("--save-every", type=int, default=50, metavar="STEPS", help="default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        usual = [getattr(recipe, field.name) for recipe in (Recipe(), *FOR.values())]
        meaning = field.metadata["help"]
        if len(set(usual)) == 1:
            said = f"{meaning} (default: {field.default})"
        else:
            names = ", ".join(f"{value} {of}" for of, value in zip(FOR, usual[1:], strict=True))
            said = f"{meaning} (default: {usual[0]} bundled, {names})"
        if isinstance(field.default, bool):
            add(name, action=argparse.BooleanOptionalAction, default=None, help=said)
        else:
            add(name, type=type(field.default), help=said)
    return run(
        parser,
        fine_tune,
        arguments,
        interrupted="Interrupted: the same command goes on from the last state that was saved.",
    )


def read_recipe(options: argparse.Namespace, config: Config) -> Recipe:
    """Return the usual recipe for a model, with what the command's options say otherwise."""
    given = {} if options.rehearse else {"rehearsed": 0}
    for field in dataclasses.fields(Recipe):
        value = getattr(options, field.name)
        if value is not None:
            given[field.name] = value
    return dataclasses.replace(usual_recipe(config), **given)


def check_arguments(options: argparse.Namespace) -> None:
    """Raise ``ValueError`` if options are out of range or do not go together."""
    check_between(1, np.inf, save_every=options.save_every)
    check_between(0, np.inf, prior_weight=options.prior_weight)
    if bool(options.word) != bool(options.like):
        raise ValueError(
            "Give --word and --like together: the new word, and what it may mean at first."
        )
    if options.rehearsed and not options.rehearse:
        raise ValueError(
            f"--rehearsed {options.rehearsed} needs examples to rehearse: "
            "give their folder by --rehearse."
        )
    if bool(options.rehearse and options.references) != bool(options.rehearse_references):
        raise ValueError(
            "Give --rehearse, --references and --rehearse-references together, or leave out the "
            "last: a batch has edits alone, or none."
        )
    if options.file.suffix != ".safetensors" or options.file.is_dir():
        raise ValueError(f"{options.file} is no name for a LoRA: choose one as lora.safetensors.")


def check_model(options: argparse.Namespace, config: Config, recipe: Recipe) -> int:
    """Return the side of images; raise ``ValueError`` if a model has not what options ask for."""
    is_sd = isinstance(config, sd.Config)
    if is_sd and options.references:
        raise ValueError(
            f"{options.model} is Stable Diffusion, which is not trained on pairs: leave out "
            "--references, or give FLUX.2-klein by --model."
        )
    if not is_sd and options.word:
        raise ValueError(
            f"{options.model} is FLUX.2, whose text encoder is not trained: leave out --word and "
            "--like, and write a rare word into the captions."
        )
    if not is_sd and config.transformer.guidance_embeds:
        raise ValueError(
            f"{options.model} is a flow map, whose steps know where they go to, and fine-tuning "
            "teaches no such steps: give its teacher by --model, such as shapes-flux2."
        )
    if not is_sd and recipe.attention != "automatic":
        raise ValueError(
            f"--attention {recipe.attention} is for Stable Diffusion, and {options.model} is "
            "FLUX.2: leave it out."
        )
    if recipe.attention == "flash" and jax.device_count() > 1:
        raise ValueError(
            f"The compiler cannot split the flash kernel over {jax.device_count()} devices: "
            "leave --attention out."
        )
    side = config.side if options.size is None else options.size
    if side < 1 or side % config.side_multiple:
        raise ValueError(f"--size is {side}: give a multiple of {config.side_multiple}.")
    if side > LARGEST_SIDE:
        raise ValueError(f"--size is {side}: give at most {LARGEST_SIDE}.")
    return side


def fine_tune(options: argparse.Namespace) -> None:
    """Do what the command does."""
    check_arguments(options)
    folder = options.state or options.file.with_suffix(".state")
    check_writable(options.file.absolute().parent)
    with writing_to(folder):
        _train_into(folder, options)


def _train_into(folder: Path, options: argparse.Namespace) -> None:
    """Train, with states in a folder, and write the LoRA."""
    source = find_model(options.model, only=NO_WEIGHTS)  # which may be gigabytes
    code = find_code(source)
    config = code.read_config(source)
    recipe = read_recipe(options, config)
    side = check_model(options, config, recipe)
    print(recipe)
    source = find_model(options.model)
    params, config, tokenize = code.load(source, options.dtype)
    images, captions = read_folder(options.images, side, side, options.caption)
    rehearsed, references = None, None
    if options.references:
        references = read_references(
            options.references, options.images, side, side, options.caption
        )
    if options.rehearse:
        rehearsed = read_folder(options.rehearse, side, side, options.rehearse_caption)
    if options.word:
        params, config, tokenize = add_word(params, config, tokenize, options.word, options.like)
        check_word(options.word, captions, tokenize, config)
    if options.mirror:
        mirrored = images[:, :, ::-1]
        images = np.concatenate([images, mirrored])
        captions = captions + captions
        if references is not None:
            references = np.concatenate([references, references[:, :, ::-1]])
    if options.rehearse_references:
        more = read_references(
            options.rehearse_references, options.rehearse, side, side, options.rehearse_caption
        )
        references = np.concatenate([references, more])
    has_word = bool(options.word)
    data = make_data(
        params,
        config,
        tokenize,
        (images, captions),
        rehearsed,
        word=has_word,
        prior_weight=options.prior_weight,
        references=references,
    )
    params = trained_parts(params, has_word)

    saver = Saver(folder, describe(params, recipe, data))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    state = init_state(params, recipe, has_word)
    check_writable(folder, room_for(state))
    state, params, data = jax.device_put((state, params, data), NamedSharding(mesh, P()))
    state = saver.restore(state)
    print(
        f"Training on {len(captions)} images, {jax.device_count()} device(s), "
        f"from step {int(state.step)} on"
    )
    step = compile_step(config, recipe, mesh)
    state = train(step, state, params, data, saver=saver, every=options.save_every)

    code.save_lora(options.file, state.trained["lora"], config)
    written = [options.file]
    if options.word:
        save_word(options.file, options.word, state.trained["word"])
        written.append(word_file(options.file))
    size = sum(file.stat().st_size for file in written)
    print(f"Wrote {options.file}, {size / 1000:.0f} kB.")


if __name__ == "__main__":
    simulate_devices(1)  # which is faster than several; TUTORIAL_DEVICES says otherwise
    sys.exit(main())
