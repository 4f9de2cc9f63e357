"""Training a LoRA, and the embedding of a new word: recipe, data, loss, step, and saved states.

All of it is the same for Stable Diffusion and FLUX.2, but for what ``course.sd.training`` and
``course.flux2.training`` have by the same names: how images and captions are encoded, and what the
model has to say of an image under noise.

What it means that a step may also *rehearse*, ``python -m course.finetune --help`` says.
"""

import contextlib
import dataclasses
import hashlib
import re
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from course import flux2, sd
from course.commands import LARGEST, try_to_write
from course.families import Config, code_of
from course.flux2 import training as of_flux2
from course.model.attention import ATTENTION, find_attention
from course.model.lora import Pair, attach
from course.sd import training as of_sd
from course.sd.clip import EMBEDDINGS
from course.sd.training import Encoded
from helpers.inputs import check_seed, create_key

# The weights of the UNet, or of FLUX.2's transformer, that get a LoRA, as regular expressions for
# their names. The transformer has some matrices that the UNet has not, and some in one.
ATTENTION_LAYERS = (
    r"to_q|to_k|to_v|to_out\.0|to_out|add_q_proj|add_k_proj|add_v_proj|to_add_out|to_qkv_mlp_proj"
)
OTHER_LAYERS = (
    r"net\.0\.proj|net\.2|proj_in|proj_out|conv1|conv2|conv_shortcut|time_emb_proj|conv"
    r"|linear_in|linear_out"
)
LAYERS = {
    "attention": rf".*\.({ATTENTION_LAYERS})\.weight",
    "all": rf".*_blocks?\..*\.({ATTENTION_LAYERS}|{OTHER_LAYERS})\.weight",
}


def denoiser_of(params: dict) -> str:
    """Return the part of a model that gets the LoRA."""
    return of_sd.DENOISER if of_sd.DENOISER in params else of_flux2.DENOISER


def check_between(low: float, high: float, **numbers: float) -> None:
    """Raise ``ValueError`` if one of these numbers is outside of a range, or not finite."""
    for name, number in numbers.items():
        most = min(high, LARGEST)
        if low <= number <= most:  # which is false for nan
            continue
        if high == np.inf and not number > most:
            raise ValueError(f"{name} is {number}: choose {low} or more.")
        raise ValueError(f"{name} is {number}: choose {low} to {most:g}.")


def _setting(default, meaning: str):
    """Return a field of a recipe, with what the command's help says of it."""
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Recipe:
    """How to train: the same recipe, model and examples give the same numbers.

    The defaults are for the bundled checkpoints; ``usual_recipe`` has those for other models.
    Numbers that are out of range, and layers that are not in ``LAYERS``, raise ``ValueError``.
    """

    rank: int = _setting(8, "of the LoRA")
    layers: str = _setting("all", f"that get one: {' or '.join(LAYERS)}")
    steps: int = _setting(500, "of training")
    batch: int = _setting(16, "examples in each step")
    rehearsed: int = _setting(4, "how many of these are rehearsed, if there are such examples")
    rate: float = _setting(2e-3, "the highest learning rate, of the LoRA")
    word_rate: float = _setting(2e-2, "the highest learning rate of the new word's embedding")
    dropped: float = _setting(
        0.1, "the share of captions that are replaced by the empty one, for guidance"
    )
    seed: int = _setting(0, "of everything random")
    remat: bool = _setting(
        False, "rematerialisation: compute activations again rather than keep them"
    )
    attention: str = _setting(
        "automatic", f"{' or '.join(ATTENTION)}; flash needs less memory, on one TPU chip"
    )

    def __post_init__(self) -> None:
        # No recipe has larger numbers, which would fill the memory before anything is trained.
        check_between(1, 10**4, rank=self.rank, batch=self.batch)
        # The first step has a rate of 0, and optax needs one more.
        check_between(2, 10**7, steps=self.steps)
        check_between(0, np.inf, rehearsed=self.rehearsed)
        # Adam moves a number by about the rate in each step: at 1, none of what it was is left.
        check_between(0, 1, rate=self.rate, word_rate=self.word_rate, dropped=self.dropped)
        check_seed(self.seed)
        if self.rehearsed >= self.batch:
            raise ValueError(
                f"{self.rehearsed} of {self.batch} examples in a step are rehearsed: "
                "leave some for the new."
            )
        find_attention(self.attention)  # which raises ValueError, too
        if self.layers not in LAYERS:
            raise ValueError(f"There are no layers {self.layers!r}: choose {' or '.join(LAYERS)}.")


# What people take for the models that everybody has. Nobody has run these here.
# - rank 4, layers of attention, a rate of 1e-4, 500 steps: the defaults and the guides of
#   diffusers' scripts train_dreambooth_lora.py and train_dreambooth_lora_sdxl.py.
# - a batch of 4: the latter adds up the gradients of 4 steps; and as many examples rehearsed as
#   new, as both scripts do.
# - 1e-4 for the word: cloneofsimo/lora's pivotal tuning, while it trains a LoRA beside the word.
# - no captions dropped: those scripts drop none.
FOR_SD = Recipe(
    rank=4,
    layers="attention",
    batch=4,
    rehearsed=2,
    rate=1e-4,
    word_rate=1e-4,
    steps=500,
    dropped=0.0,
)
# Where activations are kept, this batch does not fit on a chip of 16 GB: see
# lab/records/ask/finetune.json.
FOR_XL = dataclasses.replace(FOR_SD, remat=True)
# Of FLUX.2-klein, rank and rate are those of the guide in diffusers' README_flux2.md.
FOR_KLEIN = dataclasses.replace(FOR_XL, rank=16)


def usual_recipe(config: Config) -> Recipe:
    """Return the recipe to start from: measured for bundled checkpoints, and else what is usual."""
    if config.side <= 64:
        return Recipe()
    if isinstance(config, flux2.Config):
        return FOR_KLEIN
    return FOR_XL if config.is_xl else FOR_SD


class Data(NamedTuple):
    """All examples, the new ones first.

    Latents are Stable Diffusion's, (examples, height / 8, width / 8, 4), or FLUX.2's tokens,
    (examples, height / 16, width / 16, 128).
    """

    latents: jax.Array  # float32
    caption: jax.Array  # the number of each example's caption in texts, int32, (examples,)
    # Each caption once, the empty one first, as the text encoder gives it. Where a word is trained,
    # that changes with each step, and these are token ids, int32, (captions, text encoders, tokens)
    texts: jax.Array | Encoded
    new: jax.Array  # how many are new, int32, (); the others are there to be rehearsed
    prior_weight: jax.Array  # how much the loss of a rehearsed example counts, float32, ()
    # Latents of what each example is an edit of, in their shape; None where all are drawn.
    reference: jax.Array | None = None


class Batch(NamedTuple):
    """The examples of one step. The first axis of each array is the batch."""

    latents: jax.Array  # float32, as in Data
    texts: jax.Array | Encoded  # of their captions, as in Data, (batch, ...)
    times: jax.Array  # how much noise there is, from 0 to 1, float32, (batch,)
    noise: jax.Array  # float32, in the shape of the latents
    weights: jax.Array  # how much the loss of each example counts, float32, (batch,)
    reference: jax.Array | None = None  # as in Data


class State(NamedTuple):
    """All that changes in training."""

    step: jax.Array  # how many steps were taken, int32, ()
    # float32: under "lora" a dictionary of pairs for each part of the model, and under "word", if
    # there is a new one, its embedding, (channels,)
    trained: dict
    moments: tuple  # Adam's: means of the gradients and of their squares, as optax keeps them
    losses: jax.Array  # float32, (steps,), zero for the steps to come


def start_lora(params: dict, recipe: Recipe) -> dict[str, dict[str, Pair]]:
    """Return a pair of matrices for each chosen weight, whose product is zero at first.

    Beside a weight of (inputs, outputs), ``down`` is (inputs, rank) and ``up`` (rank, outputs), in
    float32. Beside a convolution's, (height, width, inputs, outputs), they are (height, width,
    inputs, rank) and (1, 1, rank, outputs). Of stacked layers, each has its own.
    """
    random = np.random.default_rng(recipe.seed)
    pairs = {}
    denoiser = denoiser_of(params)
    for name, weight in params[denoiser].items():
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
    return {denoiser: pairs}


def insert_trained(params: dict, trained: dict) -> dict:
    """Return a model's parameters with what was trained: pairs beside weights, and the new word."""
    params = attach(params, trained["lora"], 1.0)
    if "word" in trained:
        table = params["text_encoder"][EMBEDDINGS]
        table = table.at[-1].set(trained["word"].astype(table.dtype))
        params = params | {"text_encoder": params["text_encoder"] | {EMBEDDINGS: table}}
    return params


def loss_fn(trained: dict, params: dict, batch: Batch, config: Config, recipe: Recipe) -> jax.Array:
    """Return how wrong the model is about noise: the mean of squared errors, float32, ()."""
    params = insert_trained(params, trained)
    predicted, target = code_of(config).training.predict(
        params, config, batch, recipe.attention, recipe.remat
    )
    errors = jnp.square(predicted - target).mean(axis=(1, 2, 3))  # (batch,)
    return (batch.weights * errors).sum() / batch.weights.sum()


def draw_batch(key: jax.Array, config: Config, recipe: Recipe, data: Data) -> Batch:
    """Choose a step's examples, times and noise by its key.

    Examples are drawn with replacement: one may come twice in a step, and another not for a while.
    So a step depends on its key alone, and there is no order of examples to be saved.
    """
    batch = recipe.batch
    old_key, new_key, order_key, place_key, noise_key, empty_key = jax.random.split(key, 6)

    examples = len(data.latents)
    chosen = jax.random.randint(new_key, (batch,), 0, data.new)
    # Without examples to rehearse, this range would be empty, and all that are chosen are new.
    end = jnp.maximum(examples, data.new + 1)
    rehearsed = jax.random.randint(old_key, (recipe.rehearsed,), data.new, end)
    first = batch - recipe.rehearsed
    rehearsed = jnp.where(examples > data.new, rehearsed, chosen[first:])
    chosen = chosen.at[first:].set(rehearsed)

    # One time from each of as many intervals as there are examples: the same mean as of
    # independent ones, with less variance.
    order = jax.random.permutation(order_key, batch)
    times = (order + jax.random.uniform(place_key, (batch,))) / batch

    is_empty = jax.random.uniform(empty_key, (batch,)) < recipe.dropped
    caption = jnp.where(is_empty, 0, data.caption[chosen])
    return Batch(
        latents=data.latents[chosen],
        texts=jax.tree.map(lambda texts: texts[caption], data.texts),
        times=times,
        noise=jax.random.normal(noise_key, (batch, *data.latents.shape[1:])),
        weights=jnp.where(chosen < data.new, 1.0, data.prior_weight),
        reference=None if data.reference is None else data.reference[chosen],
    )


def loss_at(timestep: int, trained: dict, params: dict, data: Data, config: Config) -> jax.Array:
    """Return the loss of all examples at one timestep of 1000, with the same noise in every call.

    The loss of a training step depends on the times and the noise that were drawn. This one
    depends on the model alone, so that it can be compared before and after training.
    """
    examples = len(data.latents)
    batch = Batch(
        latents=data.latents,
        texts=jax.tree.map(lambda texts: texts[data.caption], data.texts),
        times=jnp.full(examples, (timestep + 0.5) / 1000),
        noise=jax.random.normal(jax.random.key(0), data.latents.shape),
        weights=jnp.ones(examples),
        reference=data.reference,
    )
    return loss_fn(trained, params, batch, config, Recipe())


def fill_up(batch: Batch, devices: int) -> Batch:
    """Append examples that do not count, until the devices divide the batch."""
    missing = -len(batch.weights) % devices

    def repeat_first(x: jax.Array) -> jax.Array:
        return jnp.concatenate([x, jnp.repeat(x[:1], missing, axis=0)])

    filled = jax.tree.map(repeat_first, batch)
    return filled._replace(weights=jnp.concatenate([batch.weights, jnp.zeros(missing)]))


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Return Adam with clipped gradients.

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
    """Take a step: each device works on its share of the batch, and gradients are added up."""
    key = jax.random.fold_in(create_key(recipe.seed), state.step)
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
    """Return ``train_step`` as a program, which takes the old state's memory for the new one."""
    step = partial(train_step, config=config, recipe=recipe, mesh=mesh)
    return jax.jit(step, donate_argnums=0, out_shardings=NamedSharding(mesh, P()))


def init_state(params: dict, recipe: Recipe, word: bool) -> State:
    """Return the state before the first step, not yet placed on devices.

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
    params: dict,
    config: Config,
    tokenize: Callable,
    new: tuple,
    rehearsed: tuple | None = None,
    *,
    word: bool = False,
    prior_weight: float = 1.0,
    references: np.ndarray | None = None,
) -> Data:
    """Encode all examples once, before training.

    Parameters
    ----------
    params, config, tokenize : dict, Config, callable
        The whole model's. The VAE is not needed again, nor are the text encoders without ``word``.
    new, rehearsed : tuple
        What ``read_folder`` gives: images from 0 to 1, float32, (images, height, width, 3), and
        their captions.
    word : bool
        Whether a new word is trained, so that the text encoder has to run in each step.
    prior_weight : float
        How much the loss of a rehearsed example counts, beside that of a new one.
    references : numpy.ndarray, optional
        What each image is an edit of, the new ones first: FLUX.2 learns to edit from such pairs.

    Returns
    -------
    Data
        Latents are the mean of what the VAE's encoder says, as the denoiser gets it. Most scripts
        draw a sample around that mean in each step; without, one encoding is enough.

    Raises
    ------
    ValueError
        If the references are not as many as the images.
    """
    check_between(0, np.inf, prior_weight=prior_weight)
    images, captions = new
    if rehearsed:
        images = np.concatenate([images, rehearsed[0]])
        captions = captions + rehearsed[1]
    if references is not None and len(references) != len(images):
        raise ValueError(
            f"There are {len(images)} images and {len(references)} that they are edits of: give "
            "one for each."
        )

    @jax.jit
    def to_latents(p: dict, image: jax.Array) -> jax.Array:
        return code_of(config).training.encode_images({"vae": p}, config, image[None])

    def encode_all(images: np.ndarray) -> jax.Array:
        # One image after another needs little memory.
        latents = [to_latents(params["vae"], image) for image in images]
        return jnp.asarray(np.concatenate(latents))

    different = ["", *sorted(set(captions) - {""})]
    numbers = {caption: number for number, caption in enumerate(different)}
    ids = tokenize(different)
    return Data(
        latents=encode_all(images),
        caption=jnp.array([numbers[caption] for caption in captions], jnp.int32),
        texts=jnp.asarray(ids) if word else encode_texts(params, config, ids),
        new=jnp.int32(len(new[1])),
        prior_weight=jnp.float32(prior_weight),
        reference=None if references is None else encode_all(references),
    )


def check_word(word: str, captions: list[str], tokenize: Callable, config: sd.Config) -> None:
    """Raise ``ValueError`` if no caption has the new word, and say how many have not."""
    number = config.text[0].vocab_size - 1
    has_word = (tokenize(captions)[:, 0] == number).any(axis=1)
    if not has_word.any():
        raise ValueError(
            f"The word {word!r} stands in no caption, so it would learn nothing: write it into "
            f"them, for example {f'a photo of a {word}'!r}."
        )
    if not has_word.all():
        lacking = captions[int(has_word.argmin())]
        print(
            f"{(~has_word).sum()} of {len(captions)} captions do not have the word {word!r}: "
            f"{lacking!r} is one."
        )


def encode_texts(
    params: dict, config: Config, tokenized: np.ndarray | tuple
) -> jax.Array | Encoded:
    """Encode captions, the first of which is the empty one, as ``tokenize`` gives them."""

    @jax.jit
    def encode_one(params: dict, one: jax.Array | tuple) -> jax.Array | Encoded:
        return code_of(config).training.encode_captions(params, config, one)

    encoders = {part: weights for part, weights in params.items() if part.startswith("text")}
    encoded = []
    for number in range(len(jax.tree.leaves(tokenized)[0])):
        one = jax.tree.map(lambda values, n=number: values[n : n + 1], tokenized)
        encoded.append(jax.device_get(encode_one(encoders, one)))
    texts = jax.tree.map(lambda *arrays: jnp.asarray(np.concatenate(arrays)), *encoded)
    if (
        isinstance(config, sd.Config) and config.is_xl
    ):  # without a negative prompt, its pipeline has zeros in place of encoded text
        texts = jax.tree.map(lambda array: array.at[0].set(0), texts)
    return texts


def trained_parts(params: dict, word: bool) -> dict:
    """Return the parts that a step reads, once ``make_data`` has encoded all examples."""
    parts = [denoiser_of(params), "text_encoder"] if word else [denoiser_of(params)]
    return {part: params[part] for part in parts}


def describe(params: dict, recipe: Recipe, data: Data) -> dict:
    """Return what a state depends on: the recipe, and fingerprints of model and examples.

    Of the model they cover the first outputs of each layer, which is quick to read, and differs in
    nearly every other model. What the VAE does is in the examples.
    """

    @jax.jit
    def first_outputs(model: dict) -> dict:
        return jax.tree.map(lambda value: value[..., :1], model)

    model = {part: weights for part, weights in params.items() if part != "vae"}
    return dataclasses.asdict(recipe) | {
        "prior_weight": float(data.prior_weight),
        "model": _fingerprint(first_outputs(model)),
        "examples": _fingerprint(data._replace(prior_weight=jnp.zeros(()))),
    }


def _fingerprint(tree) -> str:
    """Return 16 hexadecimal digits that depend on the names, shapes and numbers of a tree."""
    digest = hashlib.sha256()
    for path, value in jax.tree.leaves_with_path(tree):
        digest.update(f"{jax.tree_util.keystr(path)} {value.shape}".encode())
        digest.update(np.asarray(value, np.float32).tobytes())
    return digest.hexdigest()[:16]


def room_for(state: State) -> int:
    """Return the bytes that a state may take on a disk.

    Orbax writes numbers up to twice, and a description of each array.
    """
    return 2 * sum(array.nbytes for array in jax.tree.leaves(state)) + 10**6


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
        saved = self._read(last, about=ocp.args.JsonRestore()).about
        for name, value in about.items():
            if saved.get(name) == value:
                continue
            advice = "give what it was, a different FILE or --state, or remove that folder"
            if name in ("model", "examples"):
                what = "parameters of the model" if name == "model" else "pictures or captions"
                raise ValueError(f"The state in {folder} is of other {what}: {advice}.")
            raise ValueError(
                f"The state in {folder} was saved with {name} = {saved.get(name)!r}, and now it "
                f"is {value!r}: {advice}."
            )

    def restore(self, state: State) -> State:
        """Return the state saved last, placed as ``state`` is; or ``state``, if there is none."""
        last = self._manager.latest_step()
        if last is None:
            return state
        shapes = jax.tree.map(_shape_and_place, state)
        return self._read(last, state=ocp.args.StandardRestore(shapes)).state

    def _read(self, step: int, **parts) -> ocp.args.Composite:
        """Return parts of the state of a step; ``RuntimeError`` if it is damaged."""
        try:
            return self._manager.restore(step, args=ocp.args.Composite(**parts))
        except Exception as error:  # Orbax and what it stands on raise many kinds
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            folder = Path(self._manager.directory) / str(step)
            raise RuntimeError(
                f"The state in {folder} cannot be read ({reason}): remove this folder, and start "
                "the same again, which goes on from the state before, if there is one."
            ) from None

    def save(self, state: State) -> None:
        """Save a state under the number of its step, if it is not there.

        Raises
        ------
        RuntimeError
            If what was trained is not finite: no state is made of that.
        """
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        sums = jax.tree.leaves(jax.tree.map(lambda x: np.asarray(x).sum(), state.trained))
        check_step_is_finite("sum of the LoRA", np.sum(sums), step)
        # All devices have the same state, so the host's copy will do. From the devices' own, Orbax
        # would take a slice of each array from each device, by a program for each shape.
        state = jax.device_get(state)
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(self._about)
        )
        try:
            # Where that cannot be written, Orbax's threads print tracebacks before it raises.
            try_to_write(Path(self._manager.directory), room_for(state))
            self._manager.save(step, args=args, force=True)
        except (OSError, RuntimeError, ValueError) as error:  # as it comes from several libraries
            reason = getattr(error, "strerror", None) or str(error).strip().split("\n")[0]
            raise RuntimeError(
                f"The state of step {step} cannot be saved ({reason}): make room, and start the "
                "same again, which goes on from the last state that was saved."
            ) from None


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
        Saves the state ``every`` so many steps, at the end, and when Ctrl-C is pressed or nobody
        reads what is printed.

    Raises
    ------
    ValueError
        If ``every`` is below 1.
    RuntimeError
        If a loss, or what was trained, is not finite. What was saved before stays.
    """
    check_between(1, np.inf, every=every)
    total = len(state.losses)
    last = total if until is None else min(until, total)
    first = int(state.step) + 1
    start = time.monotonic()
    try:
        for done in range(first, last + 1):
            # Without waiting, states and batches would queue in memory.
            state = jax.block_until_ready(step(state, params, data))
            losses = np.asarray(state.losses)
            check_step_is_finite("loss", losses[done - 1], done)
            passed = time.monotonic() - start
            is_over = passed > seconds
            if done % 10 == 0 or done in (first, last) or is_over:
                recent = losses[max(0, done - 50) : done].mean()
                line = f"step {done} of {total}, loss {recent:.4f}, {passed:.0f} s "
                print(f"\r{line}", end="", flush=True)
            if saver and done % every == 0:
                saver.save(state)
            if is_over:
                break
    except (KeyboardInterrupt, BrokenPipeError):
        # A step that was interrupted may have taken the old state's memory, and given no new one.
        if saver and not state.step.is_deleted():
            saver.save(state)
        raise
    finally:
        with contextlib.suppress(BrokenPipeError):
            print()
    if saver:
        saver.save(state)
    return state


def check_step_is_finite(what: str, number: float, step: int) -> None:
    """Raise ``RuntimeError`` unless a number of a step is finite: nothing is learned after that."""
    if np.isfinite(number):
        return
    advice = "the model or the pictures have numbers that are too large, so get them again"
    if step > 1:
        advice = "give a smaller rate, and a different FILE or --state, as the rate belongs to both"
    raise RuntimeError(
        f"The {what} is {number} after step {step}, so training stops, and the last state that was "
        f"saved stays: {advice}."
    )
