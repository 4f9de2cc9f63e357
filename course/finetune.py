"""Fine-tuning by LoRA: ``python -m course.finetune IMAGES FILE --word bowtie --like star``.

IMAGES is a folder of images with captions, as Hugging Face's datasets have them: ``metadata.jsonl``
has a line for each image, with ``file_name`` and ``text``. The command trains a LoRA on them, and
the embedding of a new word if one is given. It writes FILE, a LoRA for PyTorch's diffusers and
``stable_diffusion.lora``, and the embedding beside it. You may interrupt it at any time: the same
command goes on from the state that was saved last, and ends in the same numbers.

So that the model does not forget what it can draw already, each step may also *rehearse*: some of
its examples are images of the model's own kind. This is called prior preservation, and DreamBooth
introduced it (arXiv:2208.12242).
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image

import stable_diffusion as sd
from helpers import bundled_checkpoint, simulate_devices
from stable_diffusion import Config, ScheduleConfig
from stable_diffusion.lora import Pair, add_word, attach, save_lora, save_word, word_file
from stable_diffusion.samplers import alphas
from stable_diffusion.text import EMBEDDINGS
from stable_diffusion.unet import Condition, project_text
from stable_diffusion.vae import encode

# The weights of the UNet that get a LoRA, as regular expressions for their names.
LAYERS = {
    "attention": r".*\.(to_q|to_k|to_v|to_out\.0)\.weight",
    "all": r".*_blocks?\..*\.(to_q|to_k|to_v|to_out\.0|net\.0\.proj|net\.2|proj_in|proj_out"
    r"|conv1|conv2|conv_shortcut|time_emb_proj|conv)\.weight",
}


def check_at_least(low: float, **numbers: float) -> None:
    """Raise ``ValueError`` if one of these numbers is lower."""
    for name, number in numbers.items():
        if number < low:
            raise ValueError(f"{name} is {number}: choose {low} or more.")


@dataclass(frozen=True)
class Recipe:
    """How to train: the same recipe, model and examples give the same numbers.

    Numbers that are too small, and layers that are not in ``LAYERS``, raise ``ValueError``.
    """

    rank: int = 8  #: of the LoRA
    layers: str = "all"  #: a key of ``LAYERS``
    steps: int = 500
    batch: int = 16  #: examples in each step
    rehearsed: int = 4  #: how many of these are rehearsed, if there are examples to rehearse
    rate: float = 2e-3  #: the highest learning rate, of the LoRA
    word_rate: float = 2e-2  #: the highest learning rate of the new word's embedding
    dropped: float = 0.1  #: the share of captions that are replaced by the empty one, for guidance
    seed: int = 0
    remat: bool = False  #: rematerialisation: compute activations again rather than keep them

    def __post_init__(self) -> None:
        check_at_least(1, rank=self.rank, batch=self.batch)
        # The first step has a rate of 0, and optax needs one more.
        check_at_least(2, steps=self.steps)
        check_at_least(0, rehearsed=self.rehearsed, dropped=self.dropped)
        check_at_least(0, rate=self.rate, word_rate=self.word_rate)
        if self.rehearsed >= self.batch:
            raise ValueError(
                f"{self.rehearsed} of {self.batch} examples in a step are rehearsed: "
                "leave some for the new."
            )
        if self.layers not in LAYERS:
            raise ValueError(f"There are no layers {self.layers!r}: choose {' or '.join(LAYERS)}.")


class Data(NamedTuple):
    """All examples, the new ones first."""

    latents: jax.Array  # float32, (examples, height / 8, width / 8, 4)
    ids: jax.Array  # of captions, int32, (examples, text encoders, tokens)
    empty: jax.Array  # of the empty caption, int32, (1, text encoders, tokens)
    new: jax.Array  # how many are new, int32, (); the others are there to be rehearsed


class Batch(NamedTuple):
    """The examples of one step. The first axis of each array is the batch."""

    latents: jax.Array  # float32, (batch, height / 8, width / 8, 4)
    ids: jax.Array  # int32, (batch, text encoders, tokens)
    is_empty: jax.Array  # whether the caption was replaced by the empty one, bool, (batch,)
    timesteps: jax.Array  # int32, (batch,)
    noise: jax.Array  # float32, (batch, height / 8, width / 8, 4)
    weights: jax.Array  # 1, or 0 for an example that does not count, float32, (batch,)


class State(NamedTuple):
    """All that changes in training."""

    step: jax.Array  # how many steps were taken, int32, ()
    # float32: under "lora" a dictionary of pairs for each part of the model, and under "word", if
    # there is a new one, its embedding, (channels,)
    trained: dict
    moments: tuple  # Adam's means of the gradients and of their squares, as optax keeps them
    losses: jax.Array  # float32, (steps,), zero for the steps to come


def read_folder(folder: str | Path, height: int, width: int) -> tuple[np.ndarray, list[str]]:
    """Read a folder of images with captions.

    Parameters
    ----------
    folder : str or Path
        With ``metadata.jsonl``, in which each line is an object with ``file_name`` and ``text``.
    height, width : int
        Of all images, in pixels.

    Returns
    -------
    tuple of numpy.ndarray and list of str
        Images from 0 to 1, float32, (images, height, width, 3), and a caption for each.

    Raises
    ------
    FileNotFoundError, ValueError
        If there are no images, images and captions do not match, or an image has a different size.
    """
    folder = Path(folder)
    endings = (".png", ".jpg", ".jpeg", ".webp")
    names = {file.name for file in folder.glob("*") if file.suffix.lower() in endings}
    if not names:
        raise FileNotFoundError(f"{folder} has no images: put some there, as {', '.join(endings)}.")
    captions = _read_captions(folder)
    odd = sorted(captions.keys() ^ names)
    if odd:
        lacks = "is not there" if odd[0] in captions else "has no caption"
        raise ValueError(
            f"{folder / odd[0]} {lacks}: metadata.jsonl must have a line for each image, "
            "and no other."
        )
    images = [_read_image(folder / name, height, width) for name in captions]
    return np.stack(images), list(captions.values())


def _read_captions(folder: Path) -> dict[str, str]:
    """The caption of each image, by the name of its file."""
    listed = folder / "metadata.jsonl"
    if not listed.exists():
        raise FileNotFoundError(
            f"{folder} has no metadata.jsonl: write one, with file_name and text for each image."
        )
    captions = {}
    for number, line in enumerate(listed.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            captions[entry["file_name"]] = entry["text"].strip()
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            wanted = '{"file_name": "a.png", "text": "a caption"}'
            raise ValueError(
                f"Line {number} of {listed} is {line[:50]!r}: write it as {wanted}."
            ) from None
    return captions


def _read_image(file: Path, height: int, width: int) -> np.ndarray:
    """An image's colours from 0 to 1, float32, (height, width, 3)."""
    try:
        with Image.open(file) as opened:
            pixels = np.asarray(opened.convert("RGB"), np.float32) / 255
    except OSError:
        raise ValueError(f"{file} is no image that can be read: get it again.") from None
    if pixels.shape[:2] != (height, width):
        found = f"{pixels.shape[0]} × {pixels.shape[1]}"
        raise ValueError(f"{file} has {found} pixels: crop and resize it to {height} × {width}.")
    return pixels


def start_lora(params: dict, recipe: Recipe) -> dict[str, dict[str, Pair]]:
    """A pair of matrices for each chosen weight, whose product is zero at first.

    Beside a weight of (inputs, outputs), ``down`` is (inputs, rank) and ``up`` (rank, outputs), in
    float32. Beside a convolution's, (height, width, inputs, outputs), they are (height, width,
    inputs, rank) and (1, 1, rank, outputs). Of stacked layers, each has its own.
    """
    random = np.random.default_rng(recipe.seed)
    pairs = {}
    for name, weight in params["unet"].items():
        if not re.fullmatch(LAYERS[recipe.layers], name):
            continue
        # In front of inputs and outputs, a convolution has height and width, and what is stacked
        # the number of layers.
        *before, inputs, outputs = weight.shape
        down_shape = (*before, inputs, recipe.rank)
        if len(before) == 2:
            read = before[0] * before[1] * inputs  # numbers that an output is made of
            up_shape = (1, 1, recipe.rank, outputs)
        else:
            read = inputs
            up_shape = (*before, recipe.rank, outputs)
        down = random.standard_normal(down_shape, np.float32)
        down /= np.sqrt(read, dtype=np.float32)
        pairs[name] = Pair(down=down, up=np.zeros(up_shape, np.float32))
    return {"unet": pairs}


def insert_trained(params: dict, trained: dict) -> dict:
    """A model's parameters with what was trained: pairs beside weights, and the new word."""
    params = attach(params, trained["lora"], 1.0)
    if "word" in trained:
        table = params["text_encoder"][EMBEDDINGS]
        table = table.at[-1].set(trained["word"].astype(table.dtype))
        params = params | {"text_encoder": params["text_encoder"] | {EMBEDDINGS: table}}
    return params


def encode_captions(params: dict, config: Config, batch: Batch) -> Condition:
    """What the UNet reads of a batch's captions."""
    context, pooled = sd.encode_prompts(params, config, batch.ids)
    if config.is_xl:  # without a negative prompt, its pipeline has zeros in place of encoded text
        context = jnp.where(batch.is_empty[:, None, None], 0, context)  # (batch, tokens, channels)
        pooled = jnp.where(batch.is_empty[:, None], 0, pooled)  # (batch, channels)
    height = config.pixels_per_latent * batch.latents.shape[1]
    width = config.pixels_per_latent * batch.latents.shape[2]
    sizes = jnp.array([height, width, 0, 0, height, width])
    return project_text(params["unet"], config.unet, context, pooled, sizes)


def add_noise(schedule: ScheduleConfig, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """A batch's latents under noise, and what the model should say of them, each in their shape."""
    alpha = jnp.asarray(alphas(schedule))[batch.timesteps]  # the image's share of the variance
    alpha = alpha[:, None, None, None]
    image_scale = jnp.sqrt(alpha)
    noise_scale = jnp.sqrt(1 - alpha)
    noisy = image_scale * batch.latents + noise_scale * batch.noise
    if schedule.prediction_type == "epsilon":
        target = batch.noise
    else:  # "v_prediction" (Salimans and Ho, 2022)
        target = image_scale * batch.noise - noise_scale * batch.latents
    return noisy, target


def loss_fn(trained: dict, params: dict, batch: Batch, config: Config, recipe: Recipe) -> jax.Array:
    """How wrong the model is about noise: the mean of the squared errors, float32, ()."""
    params = insert_trained(params, trained)
    condition = encode_captions(params, config, batch)
    noisy, target = add_noise(config.schedule, batch)
    predicted = sd.denoise_step(
        params, config, noisy, batch.timesteps, condition, guided=False, remat=recipe.remat
    )
    errors = jnp.square(predicted - target).mean(axis=(1, 2, 3))  # (batch,)
    return (batch.weights * errors).sum() / batch.weights.sum()


def draw_batch(key: jax.Array, config: Config, recipe: Recipe, data: Data) -> Batch:
    """Choose a step's examples, timesteps and noise by its key."""
    batch = recipe.batch
    old_key, new_key, order_key, place_key, noise_key, empty_key = jax.random.split(key, 6)

    examples = len(data.ids)
    chosen = jax.random.randint(new_key, (batch,), 0, data.new)
    # Without examples to rehearse, this range would be empty, and all that are chosen are new.
    end = jnp.maximum(examples, data.new + 1)
    rehearsed = jax.random.randint(old_key, (recipe.rehearsed,), data.new, end)
    first = batch - recipe.rehearsed
    rehearsed = jnp.where(examples > data.new, rehearsed, chosen[first:])
    chosen = chosen.at[first:].set(rehearsed)

    # One timestep from each of as many intervals as there are examples: the same mean as of
    # independent ones, with less variance.
    order = jax.random.permutation(order_key, batch)
    places = (order + jax.random.uniform(place_key, (batch,))) / batch  # from 0 to 1
    total = config.schedule.num_train_timesteps
    timesteps = jnp.minimum(jnp.int32(places * total), total - 1)

    is_empty = jax.random.uniform(empty_key, (batch,)) < recipe.dropped
    return Batch(
        latents=data.latents[chosen],
        ids=jnp.where(is_empty[:, None, None], data.empty, data.ids[chosen]),
        is_empty=is_empty,
        timesteps=timesteps,
        noise=jax.random.normal(noise_key, (batch, *data.latents.shape[1:])),
        weights=jnp.ones(batch),
    )


def fill_up(batch: Batch, devices: int) -> Batch:
    """Append examples that do not count, until the devices divide the batch."""
    missing = -len(batch.weights) % devices

    def repeat_first(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])

    filled = jax.tree.map(repeat_first, batch)
    return filled._replace(weights=jnp.concatenate([batch.weights, jnp.zeros(missing)]))


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Adam with clipped gradients.

    The learning rate rises over the first twentieth of the steps, and falls as a cosine does.
    """

    def adam(rate: float) -> optax.GradientTransformation:
        warmup = max(1, recipe.steps // 20)
        return optax.adam(
            optax.warmup_cosine_decay_schedule(0, rate, warmup, decay_steps=recipe.steps)
        )

    def which_adam(trained: dict) -> dict[str, str]:
        return {name: name for name in trained}  # "lora", and "word" if there is one

    adams = {"lora": adam(recipe.rate), "word": adam(recipe.word_rate)}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(adams, which_adam))


def train_step(
    state: State, params: dict, data: Data, config: Config, recipe: Recipe, mesh: Mesh
) -> State:
    """One step: each device works on its share of the batch, and the gradients are added up."""
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    batch = fill_up(draw_batch(key, config, recipe, data), mesh.size)
    batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
    loss, gradients = jax.value_and_grad(loss_fn)(state.trained, params, batch, config, recipe)
    updates, moments = optimizer(recipe).update(gradients, state.moments)
    return State(
        step=state.step + 1,
        trained=optax.apply_updates(state.trained, updates),
        moments=moments,
        losses=state.losses.at[state.step].set(loss),
    )


def compile_step(
    config: Config, recipe: Recipe, mesh: Mesh
) -> Callable[[State, dict, Data], State]:
    """``train_step`` as a program, which takes the old state's memory for the new one."""
    step = partial(train_step, config=config, recipe=recipe, mesh=mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))


def init_state(params: dict, recipe: Recipe, word: bool) -> State:
    """The state before the first step, not yet placed on devices.

    With ``word``, the last row of the embeddings is trained, too.
    """
    trained = {"lora": start_lora(params, recipe)}
    if word:
        trained["word"] = jnp.float32(params["text_encoder"][EMBEDDINGS][-1])
    return State(
        step=jnp.int32(0),
        trained=trained,
        moments=jax.jit(optimizer(recipe).init)(trained),
        losses=jnp.zeros(recipe.steps),
    )


def make_data(
    params: dict, config: Config, tokenize: Callable, new: tuple, rehearsed: tuple | None = None
) -> Data:
    """Encode all examples once, before training.

    ``new`` and ``rehearsed`` are what ``read_folder`` gives: images from 0 to 1, float32, (images,
    height, width, 3), and their captions. Latents are the mean of what the VAE's encoder says,
    times the VAE's scaling factor.
    """
    images, captions = new
    if rehearsed:
        images = np.concatenate([images, rehearsed[0]])
        captions = captions + rehearsed[1]

    @jax.jit
    def to_latents(p: dict, image: jax.Array) -> jax.Array:
        return encode(p, config.vae, image[None])[0]

    # One image after another needs little memory.
    latents = [to_latents(params["vae"], image) for image in images]
    return Data(
        latents=jnp.asarray(np.concatenate(latents)),
        ids=jnp.asarray(tokenize(captions)),
        empty=jnp.asarray(tokenize([""])),
        new=jnp.int32(len(new[1])),
    )


def describe(params: dict, recipe: Recipe, data: Data) -> dict:
    """What a saved state depends on: the recipe, and fingerprints of the model and the examples.

    Of the model they cover the first outputs of each layer, which is quick to read, and differs in
    nearly every other model. The VAE's work is in the examples.
    """

    @jax.jit
    def first_outputs(model: dict) -> dict:
        return jax.tree.map(lambda value: value[..., :1], model)

    model = {part: weights for part, weights in params.items() if part != "vae"}
    return dataclasses.asdict(recipe) | {
        "model": _fingerprint(first_outputs(model)),
        "examples": _fingerprint(data),
    }


def _fingerprint(tree) -> str:
    """16 hexadecimal digits that depend on the names, shapes and numbers of a tree."""
    digest = hashlib.sha256()
    for path, value in jax.tree.leaves_with_path(tree):
        digest.update(f"{jax.tree_util.keystr(path)} {value.shape}".encode())
        digest.update(np.asarray(value, np.float32).tobytes())
    return digest.hexdigest()[:16]


class Saver:
    """Saves states in a folder by Orbax, each whole or not at all, and finds the last one again.

    Parameters
    ----------
    folder : str or Path
        It is made if it is not there.
    about : dict
        From ``describe``. It is saved with each state.

    Raises
    ------
    ValueError
        If the folder has a state that was saved with a different ``about``.
    """

    def __init__(self, folder: str | Path, about: dict) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)
        self._about = about
        last = self._manager.latest_step()
        if last is None:
            return
        args = ocp.args.Composite(about=ocp.args.JsonRestore())
        saved = self._manager.restore(last, args=args).about
        for name, value in about.items():
            if saved.get(name) != value:
                raise ValueError(
                    f"The state in {folder} was saved with {name} = {saved.get(name)!r}, "
                    f"and now it is {value!r}: give what it was, or a different folder."
                )

    def restore(self, state: State) -> State:
        """The state that was saved last, placed as ``state`` is; or ``state``, if there is none."""
        last = self._manager.latest_step()
        if last is None:
            return state
        shapes = jax.tree.map(_shape_and_place, state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        return self._manager.restore(last, args=args).state

    def save(self, state: State) -> None:
        """Save a state under the number of its step, if it is not there."""
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self._about)
        )
        self._manager.save(step, args=args, force=True)


def _shape_and_place(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def train(
    step: Callable,
    state: State,
    params: dict,
    data: Data,
    *,
    until: int | None = None,
    seconds: float = np.inf,
    saver: Saver | None = None,
    every: int = 50,
) -> State:
    """Train until a step, by default the recipe's last one, and show the loss meanwhile.

    Parameters
    ----------
    step : callable
        From ``compile_step``. It takes the memory of ``state``, which cannot be used afterwards.
    state, params, data : State, dict, Data
        Placed on all devices already; else the first two steps compile a program each.
    until : int, optional
        How many steps are taken in all, counted from the recipe's first.
    seconds : float
        Stop earlier if that much time has passed.
    saver : Saver, optional
        Saves the state ``every`` so many steps, at the end, and when Ctrl-C is pressed.

    Raises
    ------
    ValueError
        If ``every`` is below 1.
    """
    check_at_least(1, every=every)
    total = len(state.losses)
    last = total if until is None else min(until, total)
    first = int(state.step) + 1
    start = time.monotonic()
    try:
        for done in range(first, last + 1):
            # Without waiting, states and batches would queue in memory.
            state = jax.block_until_ready(step(state, params, data))
            if done == first:
                _return_memory()
            passed = time.monotonic() - start
            is_over = passed > seconds
            if done % 10 == 0 or done in (first, last) or is_over:
                recent = float(state.losses[max(0, done - 50) : done].mean())
                line = f"step {done} of {total}, loss {recent:.4f}, {passed:.0f} s "
                print(f"\r{line}", end="", flush=True)
            if saver and done % every == 0:
                saver.save(state)
            if is_over:
                break
    except KeyboardInterrupt:
        # A step that was interrupted may have taken the old state's memory, and given no new one.
        if saver and not state.step.is_deleted():
            saver.save(state)
        raise
    finally:
        print()
    if saver:
        saver.save(state)
    return state


def _return_memory() -> None:
    """Return to the system the hundreds of MB that the compiler leaves to the C library."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("images", type=Path, help="a folder of images with captions")
    add("file", type=Path, help="the LoRA to write, FILE.safetensors")
    add("--model", type=Path, help="a folder in diffusers' format (default: the bundled shapes-sd)")
    add("--rehearse", type=Path, help="such a folder of what the model should not forget")
    add("--word", help="a new word in the captions")
    add("--like", default="", help="what the word may mean at first, in words the model knows")
    add("--mirror", action="store_true", help="use the new images mirrored as well")
    add("--state", type=Path, help="where states are saved (default: FILE.state)")
    add("--save-every", type=int, default=50, metavar="STEPS", help="default: %(default)s")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            add(name, action="store_true")
        else:
            add(name, type=type(field.default), default=field.default, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        fine_tune(options)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "Interrupted: the same command goes on from the last state that was saved.",
            file=sys.stderr,
        )
        return 130
    return 0


def fine_tune(options: argparse.Namespace) -> None:
    """What the command does."""
    names = [field.name for field in dataclasses.fields(Recipe)]
    recipe = Recipe(**{name: getattr(options, name) for name in names})
    check_at_least(1, save_every=options.save_every)
    if bool(options.word) != bool(options.like):
        raise ValueError(
            "Give --word and --like together: the new word, and what it may mean at first."
        )

    model = options.model or bundled_checkpoint("shapes-sd").source
    params, config, tokenize = sd.load(model, options.dtype)
    side = config.unet.sample_size * config.pixels_per_latent
    images, captions = read_folder(options.images, side, side)
    if options.mirror:
        mirrored = images[:, :, ::-1]
        images = np.concatenate([images, mirrored])
        captions = captions + captions
    rehearsed = None
    if options.rehearse:
        rehearsed = read_folder(options.rehearse, side, side)
    if options.word:
        params, config, tokenize = add_word(params, config, tokenize, options.word, options.like)
    data = make_data(params, config, tokenize, (images, captions), rehearsed)
    del params["vae"]  # which made the latents, and is not needed again

    folder = options.state or options.file.with_suffix(".state")
    saver = Saver(folder, describe(params, recipe, data))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    state = init_state(params, recipe, bool(options.word))
    state, params, data = jax.device_put((state, params, data), NamedSharding(mesh, P()))
    state = saver.restore(state)
    print(
        f"Training on {len(captions)} images, {jax.device_count()} device(s), "
        f"from step {int(state.step)} on"
    )
    step = compile_step(config, recipe, mesh)
    state = train(step, state, params, data, saver=saver, every=options.save_every)

    save_lora(options.file, state.trained["lora"])
    written = [options.file]
    if options.word:
        save_word(options.file, options.word, state.trained["word"])
        written.append(word_file(options.file))
    size = sum(file.stat().st_size for file in written)
    print(f"Wrote {options.file}, {size / 1000:.0f} kB.")


if __name__ == "__main__":
    simulate_devices(1)  # which is faster than several; TUTORIAL_DEVICES says otherwise
    sys.exit(main())
