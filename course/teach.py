"""Teach a model something new by LoRA: ``python -m course.teach IMAGES FILE --word bowtie --like star``.

IMAGES is a folder of images with captions, as Hugging Face's datasets have them: ``metadata.jsonl`` has a line for each
image, with ``file_name`` and ``text``. The command trains a LoRA on them, and the embedding of a new word if one is
given. It writes FILE, a LoRA for PyTorch's diffusers and ``course.lora``, and the embedding beside it. It may be
interrupted at any time: the same command goes on where the last state was saved, and ends in the same numbers.
"""

import argparse
import ctypes
import dataclasses
import hashlib
import json
import re
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from PIL import Image
from safetensors.numpy import save_file

import stable_diffusion as sd
from course.convert import turn_back
from course.lora import Pair, attach
from helpers import bundled_checkpoint, simulate_devices
from stable_diffusion import Config
from stable_diffusion.samplers import alphas
from stable_diffusion.unet import read_text, run_block, unet
from stable_diffusion.vae import encode
from stable_diffusion.weights import map_safetensors

EMBEDDINGS = "text_model.embeddings.token_embedding.weight"
LAYERS = {  # regular expressions for the names of the UNet's weights that get a LoRA
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
    """How to train. Everything that makes a difference is in it, so that the same recipe gives the same numbers.

    Numbers that are too small, and layers that are not in ``LAYERS``, raise ``ValueError``.
    """

    rank: int = 8  #: of the LoRA
    layers: str = "all"  #: a key of ``LAYERS``
    steps: int = 500
    batch: int = 16  #: examples in each step
    rehearsed: int = 4  #: of them, how many show what the model can do already, if there are such
    rate: float = 2e-3  #: of learning, at most
    word_rate: float = 2e-2  #: the same for the new word's embedding
    dropped: float = 0.1  #: the share of captions that are replaced by the empty one, for guidance
    seed: int = 0
    checkpoint: bool = False  #: whether blocks are computed a second time, in place of remembering what was in them

    def __post_init__(self) -> None:
        check_at_least(1, rank=self.rank, batch=self.batch)
        check_at_least(2, steps=self.steps)  # the first has a rate of 0, and optax needs one more
        check_at_least(0, rehearsed=self.rehearsed, rate=self.rate, word_rate=self.word_rate, dropped=self.dropped)
        if self.rehearsed >= self.batch:
            raise ValueError(
                f"{self.rehearsed} of {self.batch} examples in a step are rehearsed: leave some for the new."
            )
        if self.layers not in LAYERS:
            raise ValueError(f"There are no layers {self.layers!r}: choose {' or '.join(LAYERS)}.")


class Data(NamedTuple):
    """Examples as the step reads them, the new ones first."""

    latents: jax.Array  # float32, (examples, height / 8, width / 8, 4)
    ids: jax.Array  # of captions, int32, (examples, text encoders, tokens)
    empty: jax.Array  # of the empty caption, int32, (1, text encoders, tokens)
    new: jax.Array  # how many are new, int32, (); the others are rehearsed


class State(NamedTuple):
    """All that changes in training, in float32, but for counts of steps."""

    step: jax.Array  # how many were taken, int32, ()
    trained: dict  # "lora": pairs by name for each part; "word": the new word's embedding, (channels,), if there is one
    moments: tuple  # Adam's, as optax keeps them
    losses: jax.Array  # (steps,), zero for those to come


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
    kinds = (".png", ".jpg", ".jpeg", ".webp")
    found = sorted(file.name for file in folder.glob("*") if file.suffix.lower() in kinds)
    if not found:
        raise FileNotFoundError(f"{folder} has no images: put some there, as {', '.join(kinds)}.")
    listed = folder / "metadata.jsonl"
    if not listed.exists():
        raise FileNotFoundError(f"{folder} has no metadata.jsonl: write one, with file_name and text for each image.")
    captions = {}
    for number, line in enumerate(listed.read_text(encoding="utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            captions[entry["file_name"]] = entry["text"].strip()
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            wanted = '{"file_name": "a.png", "text": "a caption"}'
            raise ValueError(f"Line {number} of {listed} is {line[:50]!r}: write it as {wanted}.") from None
    if odd := sorted(captions.keys() ^ set(found)):
        lacks = "is not there" if odd[0] in captions else "has no caption"
        raise ValueError(f"{folder / odd[0]} {lacks}: metadata.jsonl must have a line for each image, and no other.")
    images = []
    for name in captions:
        try:
            with Image.open(folder / name) as opened:
                size, pixels = opened.size[::-1], np.asarray(opened.convert("RGB"), np.float32) / 255
        except OSError:
            raise ValueError(f"{folder / name} is no image that can be read: get it again.") from None
        if size != (height, width):
            size = " × ".join(map(str, size))
            raise ValueError(f"{folder / name} has {size} pixels: crop and resize it to {height} × {width}.")
        images.append(pixels)
    return np.stack(images), list(captions.values())


def add_word(params: dict, config: Config, tokenize: Callable, word: str, like: str) -> tuple[dict, Config, Callable]:
    """Give a model one more word, which starts with the mean of the embeddings of ``like``.

    Without that, the tokenizer cuts a word that it does not know into pieces, which have meanings of their own.

    Parameters
    ----------
    params, config, tokenize : dict, Config, callable
        From ``stable_diffusion.load``.
    word, like : str
        A new word, of letters and digits; and words that the model knows.

    Returns
    -------
    tuple of dict, Config and callable
        Parameters with one more row in the table of embeddings, (tokens of the vocabulary + 1, channels), the
        configuration for them, and a function from prompts to token ids, int32, (prompts, 1, tokens), that knows the
        word.

    Raises
    ------
    ValueError
        If the model has two text encoders, or has the word already, or it is no word.
    """
    if config.is_xl:
        raise ValueError(
            "Stable Diffusion XL has two text encoders, and gets no new word here: use words that it knows."
        )
    start, end, fill = tokenize([""])[0, 0, :3]  # of any prompt; what fills up is the end again in Stable Diffusion 1

    def cut(text: str) -> list[int]:
        row = tokenize([text])[0, 0, 1:]
        return row[: np.argmax(row == end)].tolist()

    if not re.fullmatch(r"\w+", word) or len(cut(word)) == 1:
        raise ValueError(f"{word!r} is no new word: choose one without spaces and signs that the model does not know.")
    table, text = params["text_encoder"][EMBEDDINGS], config.text[0]
    number, room = len(table), text.max_position_embeddings
    whole_word = re.compile(rf"\b{re.escape(word)}\b", re.IGNORECASE)

    def tokenize_with_word(prompts: list[str]) -> np.ndarray:
        rows = np.full((len(prompts), 1, room), fill, np.int32)
        for row, prompt in zip(rows[:, 0], prompts, strict=True):
            first, *others = map(cut, whole_word.split(prompt))
            ids = [*first, *(token for piece in others for token in (number, *piece))]
            if len(ids) > room - 2:
                warnings.warn(f"A prompt has {len(ids)} tokens, and {room - 2} are read.", stacklevel=2)
            ids = [start, *ids[: room - 2], end]
            row[: len(ids)] = ids
        return rows

    vector = table[np.array(cut(like))].mean(axis=0, keepdims=True)
    params = params | {"text_encoder": params["text_encoder"] | {EMBEDDINGS: jnp.concatenate([table, vector])}}
    # Where a configuration does not know its end token, the largest number is taken for it, which is now the word's.
    text = dataclasses.replace(text, vocab_size=number + 1, eos_token_id=int(end))
    return params, dataclasses.replace(config, text=(text,)), tokenize_with_word


def start_lora(params: dict, recipe: Recipe) -> dict[str, dict[str, Pair]]:
    """A pair of matrices beside each chosen weight. ``up`` is zero, so at first the product changes nothing.

    Beside a weight of (inputs, outputs), ``down`` is (inputs, rank) and ``up`` (rank, outputs), in float32. Beside a
    convolution's, (height, width, inputs, outputs), they are (height, width, inputs, rank) and (1, 1, rank, outputs).
    """
    chosen = [name for name in params["unet"] if re.fullmatch(LAYERS[recipe.layers], name)]
    random, pairs = np.random.default_rng(recipe.seed), {}
    for name in chosen:
        *inputs, outputs = params["unet"][name].shape  # a convolution's are height, width and channels
        down = random.standard_normal((*inputs, recipe.rank), np.float32) / np.sqrt(np.prod(inputs), dtype=np.float32)
        pairs[name] = Pair(down, np.zeros((*(1 for _ in inputs[1:]), recipe.rank, outputs), np.float32))
    return {"unet": pairs}


def put_in(params: dict, trained: dict) -> dict:
    """A model's parameters with what was trained: pairs beside weights, and the last row of the embeddings."""
    params = attach(params, trained["lora"], 1.0)
    if "word" in trained:
        table = params["text_encoder"][EMBEDDINGS]
        table = table.at[-1].set(trained["word"].astype(table.dtype))
        params = params | {"text_encoder": params["text_encoder"] | {EMBEDDINGS: table}}
    return params


def find_loss(trained: dict, params: dict, config: Config, recipe: Recipe, latents, ids, empty, timesteps, noise, real):
    """How wrong the model is about noise: the mean of squares, over those examples of a batch that are ``real``.

    Latents and noise are (batch, height / 8, width / 8, 4), in float32, and ids (batch, text encoders, tokens).
    The others are (batch,): timesteps, int32; ``empty``, whether a caption is left out; ``real``, 1 or 0 in float32.
    """
    params = put_in(params, trained)
    context, pooled = sd.encode_prompts(params, config, ids)
    if config.is_xl:  # its pipeline has zeros in place of an empty prompt
        context, pooled = (jnp.where(empty.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in (context, pooled))
    height, width = (config.pixels_per_latent * side for side in latents.shape[1:3])
    sizes = jnp.array([height, width, 0, 0, height, width])
    condition = read_text(params["unet"], config.unet, context, pooled, sizes)
    alpha = jnp.asarray(alphas(config.schedule))[timesteps][:, None, None, None]  # the latents' share of the variance
    image, rest = jnp.sqrt(alpha), jnp.sqrt(1 - alpha)
    noisy = image * latents + rest * noise
    target = noise if config.schedule.prediction_type == "epsilon" else image * noise - rest * latents
    run = jax.checkpoint(run_block, static_argnums=(1, 2, 6)) if recipe.checkpoint else run_block
    answer = unet(params["unet"], config.unet, noisy, timesteps, condition, run=run)
    errors = jnp.square(answer.astype(jnp.float32) - target).mean(axis=(1, 2, 3))
    return (real * errors).sum() / real.sum()


def draw_batch(key: jax.Array, config: Config, recipe: Recipe, data: Data, devices: int) -> tuple:
    """Choose a step's examples, timesteps and noise by its key, whatever the number of devices is.

    If the devices do not divide the batch, it is filled up with examples that do not count. The arrays are what
    ``find_loss`` takes after the recipe, in its order.
    """
    batch, new = recipe.batch, recipe.batch - recipe.rehearsed
    keys = jax.random.split(key, 6)
    rehearsed = jax.random.randint(keys[0], (recipe.rehearsed,), data.new, jnp.maximum(len(data.ids), data.new + 1))
    some_new = jax.random.randint(keys[1], (batch,), 0, data.new)
    chosen = some_new.at[new:].set(jnp.where(len(data.ids) > data.new, rehearsed, some_new[new:]))
    # One timestep from each of as many intervals as there are examples: the same mean with less variance.
    total = config.schedule.num_train_timesteps
    places = (jax.random.permutation(keys[2], batch) + jax.random.uniform(keys[3], (batch,))) / batch
    timesteps = jnp.minimum(jnp.int32(places * total), total - 1)
    noise = jax.random.normal(keys[4], (batch, *data.latents.shape[1:]))
    empty = jax.random.uniform(keys[5], (batch,)) < recipe.dropped
    ids = jnp.where(empty[:, None, None], data.empty, data.ids[chosen])
    drawn = data.latents[chosen], ids, empty, timesteps, noise, jnp.ones(batch)
    more = -batch % devices
    filled = [jnp.concatenate([x, jnp.repeat(x[:1], more, axis=0)]) for x in drawn[:-1]]
    return *filled, jnp.concatenate([drawn[-1], jnp.zeros(more)])


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Adam. The rate rises over the first twentieth of the steps, and falls as a cosine does; gradients are clipped."""

    def adam(rate: float) -> optax.GradientTransformation:
        return optax.adam(optax.warmup_cosine_decay_schedule(0, rate, max(1, recipe.steps // 20), recipe.steps))

    def label(trained: dict) -> dict:
        return {name: jax.tree.map(lambda _, name=name: name, of) for name, of in trained.items()}

    kinds = {"lora": adam(recipe.rate), "word": adam(recipe.word_rate)}
    return optax.chain(optax.clip_by_global_norm(1.0), optax.multi_transform(kinds, label))


def train_step(state: State, params: dict, data: Data, config: Config, recipe: Recipe, mesh: Mesh) -> State:
    """One step: each device works on its share of the batch, and the gradients are added up."""
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    batch = draw_batch(key, config, recipe, data, mesh.size)
    batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
    loss, gradients = jax.value_and_grad(find_loss)(state.trained, params, config, recipe, *batch)
    updates, moments = optimizer(recipe).update(gradients, state.moments)
    trained = optax.apply_updates(state.trained, updates)
    return State(state.step + 1, trained, moments, state.losses.at[state.step].set(loss))


def compile_step(config: Config, recipe: Recipe, mesh: Mesh) -> Callable[[State, dict, Data], State]:
    """``train_step`` as a program, which takes the old state's memory for the new one."""
    step = partial(train_step, config=config, recipe=recipe, mesh=mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))


def begin(params: dict, recipe: Recipe, word: bool) -> State:
    """The state before the first step, not yet placed on devices.

    With ``word``, the last row of the embeddings is trained, too.
    """
    trained = {"lora": start_lora(params, recipe)}
    if word:
        trained["word"] = jnp.float32(params["text_encoder"][EMBEDDINGS][-1])
    return State(jnp.int32(0), trained, jax.jit(optimizer(recipe).init)(trained), jnp.zeros(recipe.steps))


def make_data(params: dict, config: Config, tokenize: Callable, new: tuple, rehearsed: tuple | None = None) -> Data:
    """Encode examples, once.

    ``new`` and ``rehearsed`` are what ``read_folder`` gives: images from 0 to 1, float32, (images, height, width, 3),
    and their captions. Latents are the mean of what the VAE's encoder says, times the VAE's scaling factor.
    """
    images, captions = list(new[0]), list(new[1])
    if rehearsed:
        images, captions = images + list(rehearsed[0]), captions + list(rehearsed[1])
    to_latents = jax.jit(lambda p, image: encode(p, config.vae, image[None])[0])
    latents = np.concatenate([to_latents(params["vae"], image) for image in images])  # one by one: little memory
    ids, empty = jnp.asarray(tokenize(captions)), jnp.asarray(tokenize([""]))
    return Data(jnp.asarray(latents), ids, empty, jnp.int32(len(new[1])))


def describe(params: dict, recipe: Recipe, data: Data) -> dict:
    """What a saved state depends on: the recipe, and fingerprints of the model and of the examples.

    The VAE's work is in the examples.
    """

    def fingerprint(tree) -> str:
        digest = hashlib.sha256()
        for path, value in jax.tree.leaves_with_path(tree):
            digest.update(f"{jax.tree_util.keystr(path)} {value.shape}".encode())
            digest.update(np.asarray(value, np.float32).tobytes())
        return digest.hexdigest()[:16]

    @jax.jit
    def first_outputs(model: dict) -> dict:  # of each layer, to be quick: in nearly every other model these differ
        return jax.tree.map(lambda value: value[..., :1], model)

    model = first_outputs({part: of for part, of in params.items() if part != "vae"})
    return dataclasses.asdict(recipe) | {"model": fingerprint(model), "examples": fingerprint(data)}


class Saver:
    """Saves states in a folder by Orbax, each whole or not at all, and finds the last one again."""

    def __init__(self, folder: str | Path, about: dict) -> None:
        """``about`` is what ``describe`` gives. Raises ``ValueError`` if the folder's state is of something else."""
        import orbax.checkpoint as ocp  # slow to import

        self._ocp = ocp
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(Path(folder).resolve(), options=options)
        self._about = about
        if self._manager.latest_step() is not None:
            args = ocp.args.Composite(about=ocp.args.JsonRestore())
            known = self._manager.restore(self._manager.latest_step(), args=args).about
            for name, value in about.items():
                if known.get(name) != value:
                    raise ValueError(
                        f"The state in {folder} was saved with {name} = {known.get(name)!r}, and now it is {value!r}: "
                        "give what it was, or a different folder."
                    )

    def restore(self, state: State) -> State:
        """The state that was saved last, placed as ``state`` is; or ``state``, if there is none."""
        step = self._manager.latest_step()
        if step is None:
            return state
        args = self._ocp.args.Composite(state=self._ocp.args.StandardRestore(jax.tree.map(_shape_and_place, state)))
        return self._manager.restore(step, args=args).state

    def save(self, state: State) -> None:
        """Save a state under the number of its step, if it is not there."""
        step, args = int(state.step), self._ocp.args
        if step != self._manager.latest_step():
            saved = args.Composite(state=args.StandardSave(state), about=args.JsonSave(self._about))
            self._manager.save(step, args=saved, force=True)


def _shape_and_place(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def take_steps(
    step: Callable,
    state: State,
    params: dict,
    data: Data,
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
    first, total = int(state.step), len(state.losses)
    last, start = min(total if until is None else until, total), time.monotonic()
    try:
        for done in range(first + 1, last + 1):
            state = jax.block_until_ready(step(state, params, data))  # or states and batches would queue in memory
            if done == first + 1 and sys.platform == "linux":
                ctypes.CDLL(None).malloc_trim(0)  # the compiler leaves hundreds of MB to the C library
            passed = time.monotonic() - start
            if done % 10 == 0 or done in (first + 1, last) or passed > seconds:
                recent = float(state.losses[max(0, done - 50) : done].mean())
                print(f"\rstep {done} of {total}, loss {recent:.4f}, {passed:.0f} s ", end="", flush=True)
            if saver and done % every == 0:
                saver.save(state)
            if passed > seconds:
                break
    except KeyboardInterrupt:
        if saver and not state.step.is_deleted():  # else it came while the step took the old state's memory
            saver.save(state)
        raise
    finally:
        print()
    if saver:
        saver.save(state)
    return state


def word_file(file: str | Path) -> Path:
    """Where the embedding of a LoRA's word is."""
    return Path(file).with_suffix(".word.safetensors")


def save_lora(file: str | Path, trained: dict, word: str | None = None, dtype=np.float16) -> None:
    """Write a LoRA for PyTorch's diffusers (``load_lora_weights``) and ``course.lora.read_lora``.

    The embedding of a new word goes into a file beside it, for diffusers' ``load_textual_inversion``.
    """
    file, tensors = Path(file), {}
    for part, pairs in trained["lora"].items():
        for name, pair in pairs.items():
            layer = f"{part}.{name.removesuffix('.weight')}"
            tensors[f"{layer}.lora_A.weight"] = turn_back(name, pair.down).astype(dtype)
            tensors[f"{layer}.lora_B.weight"] = turn_back(name, pair.up).astype(dtype)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, metadata={"format": "pt"})
    if word:
        save_file({word: np.asarray(trained["word"], np.float32)}, word_file(file), metadata={"format": "pt"})


def read_word(file: str | Path, params: dict, config: Config, tokenize: Callable) -> tuple[dict, Config, Callable]:
    """Give a model the word of a LoRA: what ``add_word`` gives, with the embedding that was trained.

    The file holds one vector, (channels,). ``FileNotFoundError`` or ``ValueError`` if it is missing, damaged or for a
    different model.
    """
    found = map_safetensors(word_file(file))
    if len(found) != 1:
        raise ValueError(
            f"{word_file(file)} has {len(found)} arrays: give one with one array, the embedding, named by its word."
        )
    ((word, vector),) = found.items()
    width = params["text_encoder"][EMBEDDINGS].shape[1]
    if vector.shape != (width,):
        raise ValueError(f"{word_file(file)} has a vector of {vector.shape}, and this model's have {width} numbers.")
    params, config, tokenize = add_word(params, config, tokenize, word, word)
    return put_in(params, {"lora": {}, "word": jnp.asarray(vector)}), config, tokenize


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("images", type=Path, help="a folder of images with captions")
    parser.add_argument("file", type=Path, help="the LoRA to write, FILE.safetensors")
    parser.add_argument("--model", type=Path, help="a folder in diffusers' format (default: the bundled shapes-sd)")
    parser.add_argument("--rehearse", type=Path, help="such a folder of what the model should not forget")
    parser.add_argument("--word", help="a new word in the captions")
    parser.add_argument("--like", default="", help="what the new word may mean at first, in words that the model knows")
    parser.add_argument("--mirror", action="store_true", help="use the new images mirrored as well")
    parser.add_argument("--state", type=Path, help="where states are saved (default: FILE.state)")
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    for field in dataclasses.fields(Recipe):
        name = "--" + field.name.replace("_", "-")
        if field.type in (bool, "bool"):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        recipe = Recipe(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Recipe)})
        teach(options, recipe)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on from the last state that was saved.", file=sys.stderr)
        return 130
    return 0


def teach(options: argparse.Namespace, recipe: Recipe) -> None:
    """What the command does."""
    check_at_least(1, save_every=options.save_every)
    if bool(options.word) != bool(options.like):
        raise ValueError("Give --word and --like together: the new word, and what it may mean at first.")
    params, config, tokenize = sd.load(options.model or bundled_checkpoint("shapes-sd").source, options.dtype)
    side = config.unet.sample_size * config.pixels_per_latent
    new = read_folder(options.images, side, side)
    rehearsed = read_folder(options.rehearse, side, side) if options.rehearse else None
    if options.mirror:
        new = np.concatenate([new[0], new[0][:, :, ::-1]]), new[1] * 2
    if options.word:
        params, config, tokenize = add_word(params, config, tokenize, options.word, options.like)
    data = make_data(params, config, tokenize, new, rehearsed)
    del params["vae"]  # which made the latents, and is not needed again
    saver = Saver(options.state or options.file.with_suffix(".state"), describe(params, recipe, data))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    placed = jax.device_put((begin(params, recipe, bool(options.word)), params, data), NamedSharding(mesh, P()))
    state = saver.restore(placed[0])
    print(f"Training on {len(new[1])} images, {jax.device_count()} device(s), from step {int(state.step)} on")
    state = take_steps(compile_step(config, recipe, mesh), state, *placed[1:], saver=saver, every=options.save_every)
    save_lora(options.file, state.trained, options.word)
    size = sum(file.stat().st_size for file in (options.file, word_file(options.file)) if file.exists())
    print(f"Wrote {options.file}, {size / 1000:.0f} kB.")


if __name__ == "__main__":
    simulate_devices(1)  # which is faster than several; TUTORIAL_DEVICES says otherwise
    sys.exit(main())
