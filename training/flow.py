"""Train the small FLUX.2 by flow matching, in JAX: ``python -m training.flow``.

Transformer and text encoder start from random numbers. They learn to draw the scenes of
``shapes/``, from noise and a caption, and to edit them, from noise, a scene, and a caption that
names what changes. The VAE is that of ``shapes-sd``, and stays as it is.

Run the same command again after an interruption: it goes on where it was saved, with the same
random numbers. ``python -m training.export`` then writes the checkpoint.
"""

import argparse
import hashlib
import json
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from tqdm import tqdm

from course import flux2, sd
from course.flux2.tokenizer import Tokenizer
from course.model.layers import Parameter
from course.shapes import judge, scenes
from training import qwen

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "training" / "flux2"  # what is resumed from
PIXELS = 64
POOL_SEED = 1  # of the scenes to draw
SAVE_EVERY = 250  # steps
JUDGE_EVERY = 1000  # steps
JUDGED = 96  # pictures
EMA_DECAY = 0.999  # of the moving average of the weights, at each step
EMPTY_CAPTIONS = 0.1  # the share that names nothing, for guidance
FULL_CAPTIONS = 0.65  # the share that names every attribute
DROPPED_ATTRIBUTES = 0.35  # of each attribute in the remaining captions

TRAINED = ("transformer", "text_encoder")  # the parts; the VAE stays as it is

# What a caption can say of each attribute; last, nothing.
OPTIONS = {
    "size": (*scenes.SIZES, None),
    "color": (*scenes.COLORS, None),
    "shape": (*scenes.SHAPES, None),
    "background": (*scenes.BACKGROUNDS, None),
}
COUNTS = tuple(len(options) for options in OPTIONS.values())  # there are 4,000 captions

CONFIG = flux2.Config(
    transformer=flux2.TransformerConfig(
        in_channels=16,
        num_layers=2,
        num_single_layers=8,
        attention_head_dim=24,
        num_attention_heads=6,
        joint_attention_dim=3 * 64,
        axes_dims_rope=(6, 6, 6, 6),
        rope_theta=100.0,  # FLUX.2 has 2,000, for longer sequences
    ),
    text_encoder=flux2.TextConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_theta=1_000.0,
    ),
    vae=flux2.VAEConfig(
        block_out_channels=(32, 32, 64, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
    ),
    shift=1.0,
    is_distilled=False,
)


@dataclass(frozen=True)
class Recipe:
    """How the model is trained.

    Attributes
    ----------
    steps, cooldown : int
        Steps of training, and those at the end in which the learning rate falls to zero. A run can
        be made longer as long as its cool-down has not begun.
    peak : float
        The learning rate before the cool-down.
    warmup : int
        Steps in which it rises to that, at the beginning.
    batch, edits : int
        Examples of a step, and how many of them edit a scene.
    shift, spread : float
        Times are logit-normal: the sigmoid of a normal number with this standard deviation,
        shifted towards the noise as the sampler's times are.
    pool, pairs : int
        Scenes to draw, and to edit.
    seed : int
        Of the first parameters, and of what is drawn for each step.
    """

    steps: int = 11_500
    cooldown: int = 7_475
    peak: float = 2.5e-3
    warmup: int = 100
    batch: int = 256
    edits: int = 32
    shift: float = 1.35
    spread: float = 1.2
    pool: int = 60_000
    pairs: int = 16_000
    seed: int = 0


def all_captions() -> list[str]:
    """Every caption there is, in the order of ``caption_number``; the last one is empty."""
    captions = []
    for number in range(int(np.prod(COUNTS))):
        indices = np.unravel_index(number, COUNTS)
        named = {}
        for (name, options), index in zip(OPTIONS.items(), indices, strict=True):
            named[name] = options[index]
        captions.append(scenes.caption(**named))
    return captions


def attribute_indices(scene: scenes.Scene) -> list[int]:
    return [options.index(getattr(scene, name)) for name, options in OPTIONS.items()]


def edited(rng: np.random.Generator, scene: scenes.Scene) -> tuple[scenes.Scene, int]:
    """The same scene but for one attribute, and which one: no held-out combination.

    So a scene of a held-out combination gets another colour, shape or background, and no other
    size, as that would leave the combination as it is.
    """
    names = list(OPTIONS)
    while True:
        which = int(rng.integers(len(names)))
        others = [o for o in OPTIONS[names[which]][:-1] if o != getattr(scene, names[which])]
        changed = replace(scene, **{names[which]: str(rng.choice(others))})
        combination = (changed.color, changed.shape, changed.background)
        if changed.color == changed.background or combination in scenes.held_out():
            continue
        if names[which] == "size":
            # The shape stays where it is, unless it would reach beyond the edge.
            radius = rng.uniform(*scenes.SIZES[changed.size])
            least, most = radius + scenes.MARGIN, 1 - radius - scenes.MARGIN
            x, y = np.clip([scene.x, scene.y], least, most)
            changed = replace(changed, radius=radius, x=float(x), y=float(y))
        return changed, which


def prepare(folder: Path, recipe: Recipe) -> dict[str, np.ndarray]:
    """What training reads, kept in the folder: it takes some minutes.

    Returns
    -------
    dict
        ``tokens`` (scenes, 16, 16) and their ``attributes`` (scenes, 4); of the edits ``before``
        and ``after`` (pairs, 16, 16), what is so ``afterwards`` (pairs, 4), and which attribute
        ``changed`` (pairs,); ``mean`` and ``variance`` (16,) for the VAE's batch norm.
    """
    file = folder / f"data-{recipe.pool}-{recipe.pairs}.npz"
    if file.exists():
        with np.load(file) as saved:
            return dict(saved)
    pool = scenes.training_scenes(recipe.pool, POOL_SEED)
    first = scenes.training_scenes(recipe.pairs, seed=2)
    rng = np.random.default_rng(3)
    second, changed = zip(*(edited(rng, scene) for scene in first), strict=True)

    unchanged = vae_parameters(np.zeros(16), np.full(16, 1 - CONFIG.vae.batch_norm_eps))
    params = {"vae": unchanged}
    encode = jax.jit(lambda images: flux2.encode_images(params, CONFIG, images / 255))
    tokens = []
    everything = [*pool, *first, *second]
    # JAX has threads by now, so its process must not be forked.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        starts = range(0, len(everything), 500)
        for start in tqdm(starts, desc="scenes", unit_scale=500):
            some = everything[start : start + 500]
            images = np.stack(list(processes.map(scenes.render, some, chunksize=100)))
            tokens.append(np.asarray(encode(images.astype(np.float32))))
    tokens = np.concatenate(tokens)
    mean = tokens.mean(axis=(0, 1))
    variance = tokens.var(axis=(0, 1))
    tokens = ((tokens - mean) / np.sqrt(variance + CONFIG.vae.batch_norm_eps)).astype(np.float16)
    data = {
        "tokens": tokens[: len(pool)],
        "attributes": np.int32([attribute_indices(scene) for scene in pool]),
        "before": tokens[len(pool) : len(pool) + len(first)],
        "after": tokens[len(pool) + len(first) :],
        "afterwards": np.int32([attribute_indices(scene) for scene in second]),
        "changed": np.int32(changed),
        "mean": mean,
        "variance": variance,
    }
    partial_file = file.with_suffix(".part.npz")
    np.savez(partial_file, **data)
    partial_file.replace(file)  # so that an interruption leaves no file that is cut off
    return data


def vae_parameters(mean: np.ndarray, variance: np.ndarray) -> dict[str, jax.Array]:
    """The VAE of ``shapes-sd``, with the batch norm's statistics."""
    params, _, _ = sd.load(ROOT / "checkpoints" / "shapes-sd")
    return params["vae"] | {
        "bn.running_mean": jnp.float32(mean),
        "bn.running_var": jnp.float32(variance),
    }


def initial_parameters(key: jax.Array) -> dict[str, dict[str, jax.Array]]:
    """Random numbers for the transformer and the text encoder.

    What modulates a block starts from zero, so that each block gives back what it gets
    (adaLN-Zero: Peebles and Xie, 2022), and so does the layer that gives the velocity.
    """

    def start(key: jax.Array, name: str, parameter: Parameter) -> jax.Array:
        shape = parameter.shape
        if "norm" in name and len(shape) - ("*" in name) == 1:  # a factor for each channel
            return jnp.ones(shape)
        if "modulation" in name or name.startswith(("norm_out", "proj_out")):
            return jnp.zeros(shape)
        return jax.random.normal(key, shape) * shape[-2] ** -0.5

    declared = flux2.model_parameters(CONFIG)
    params = {}
    for part in TRAINED:
        params[part] = {}
        for name, parameter in declared[part].items():
            key, own = jax.random.split(key)
            params[part][name] = start(own, name, parameter)
    return params


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """The learning rate by the number of the step: it rises, stays, and falls to zero."""
    held = recipe.steps - recipe.cooldown
    constant = optax.constant_schedule(recipe.peak)
    falling = optax.cosine_decay_schedule(recipe.peak, recipe.cooldown)
    planned = optax.schedules.join_schedules([constant, falling], [held])
    return lambda count: planned(count) * jnp.minimum(1, count / recipe.warmup)


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Muon for the matrices of the blocks, AdamW for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon/) makes each update of a matrix orthogonal, and
    ``consistent_rms`` gives it the size that AdamW's have.
    """
    # For each parameter the axes of its matrices, which are one for each block, or None where
    # AdamW steps it.
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    declared = flux2.model_parameters(CONFIG)
    matrices = {}
    for part in TRAINED:
        matrices[part] = {}
        for name, parameter in declared[part].items():
            is_matrix = "*" in name and len(parameter.shape) == 3
            matrices[part][name] = matrix if is_matrix else None
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            learning_rate(recipe),
            weight_decay=0.01,
            adam_weight_decay=0.01,
            adam_b2=0.99,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=matrices,
        ),
    )


def random_times(key: jax.Array, count: int, recipe: Recipe) -> jax.Array:
    """Logit-normal times, one from each of as many equally likely intervals: (count,).

    Their mean varies less than that of independent ones.
    """
    places = (
        jnp.arange(count) + jax.random.uniform(key, (count,), minval=0.001, maxval=0.999)
    ) / count
    times = jax.nn.sigmoid(recipe.spread * jax.scipy.stats.norm.ppf(places))
    return recipe.shift * times / (1 + (recipe.shift - 1) * times)


def random_captions(key: jax.Array, attributes: jax.Array) -> jax.Array:
    """What captions name of scenes: all, some or no attributes. Numbers of captions, (scenes,)."""
    first, second = jax.random.split(key)
    kind = jax.random.uniform(first, (len(attributes), 1))
    kept = jax.random.uniform(second, attributes.shape) > DROPPED_ATTRIBUTES
    named = (kind > EMPTY_CAPTIONS) & ((kind < EMPTY_CAPTIONS + FULL_CAPTIONS) | kept)
    return caption_number(attributes, named)


def caption_number(attributes: jax.Array, named: jax.Array) -> jax.Array:
    """The number of a caption that names some attributes: see ``all_captions``."""
    unnamed = jnp.array(COUNTS) - 1
    return jnp.ravel_multi_index(
        tuple(jnp.where(named, attributes, unnamed).T), COUNTS, mode="clip"
    )


def random_batch(key: jax.Array, data: dict[str, jax.Array], recipe: Recipe) -> dict:
    """Scenes to draw, and behind them scenes to edit, with captions, times and noise."""
    keys = jax.random.split(key, 7)
    draws = recipe.batch - recipe.edits
    rows = jax.random.randint(keys[0], (draws,), 0, len(data["tokens"]))
    pairs = jax.random.randint(keys[1], (recipe.edits,), 0, len(data["after"]))
    captions = random_captions(keys[2], data["attributes"][rows])
    # Of an edit the caption names what changes, and nothing else.
    which = jnp.arange(4) == data["changed"][pairs, None]
    is_named = jax.random.uniform(keys[3], (recipe.edits, 1)) > EMPTY_CAPTIONS
    edit_captions = caption_number(data["afterwards"][pairs], which & is_named)
    captions = jnp.concatenate([captions, edit_captions])
    clean = jnp.concatenate([data["tokens"][rows], data["after"][pairs]]).astype(jnp.float32)
    # Times come in rising order, and the edits are at the end of the batch: without shuffling,
    # their times would all be large.
    order = jax.random.permutation(keys[6], recipe.batch)
    return {
        "clean": clean,
        "noise": jax.random.normal(keys[4], clean.shape),
        "times": random_times(keys[5], recipe.batch, recipe)[order],
        "reference": data["before"][pairs].astype(jnp.float32),
        "ids": data["ids"][captions],
        "mask": data["mask"][captions],
    }


def loss_fn(params: dict, batch: dict, recipe: Recipe) -> jax.Array:
    """The mean squared error of the velocity."""
    text = flux2.encode_prompts(params, CONFIG, batch["ids"], batch["mask"])
    clean, noise, times = batch["clean"], batch["noise"], batch["times"]
    mixed = clean + times[:, None, None] * (noise - clean)
    side = PIXELS // CONFIG.vae.pixels_per_token
    places = flux2.positions(side, side)
    draws = recipe.batch - recipe.edits

    def predict(image: jax.Array, part: slice, where: np.ndarray) -> jax.Array:
        return flux2.velocity(
            params["transformer"],
            CONFIG.transformer,
            image,
            text[part],
            times[part],
            where,
            flux2.text_positions(text.shape[1]),
        )

    drawn = predict(mixed[:draws], slice(0, draws), places)
    with_reference = jnp.concatenate([mixed[draws:], batch["reference"]], axis=1)
    both = np.concatenate([places, flux2.positions(side, side, reference=1)])
    changed = predict(with_reference, slice(draws, None), both)[:, : side**2]
    predicted = jnp.concatenate([drawn, changed])
    return jnp.square(predicted - (noise - clean)).mean()


def make_step(recipe: Recipe, optimizer: optax.GradientTransformation):
    """A compiled step of training, from a state, the number of the step and the data."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: dict, number: jax.Array, data: dict) -> tuple[dict, jax.Array]:
        key = jax.random.fold_in(jax.random.key(recipe.seed), number)
        batch = random_batch(key, data, recipe)
        loss, gradient = jax.value_and_grad(loss_fn)(state["params"], batch, recipe)
        updates, memory = optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        # Early averages forget quickly, or they would remember the random start.
        decay = jnp.minimum(EMA_DECAY, (number + 1) / (number + 10))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state["average"], params)
        return {"params": params, "average": average, "optimizer": memory}, loss

    return step


def initial_state(recipe: Recipe, optimizer: optax.GradientTransformation) -> dict:
    params = initial_parameters(jax.random.key(recipe.seed))
    average = jax.tree.map(jnp.copy, params)
    return {"params": params, "average": average, "optimizer": optimizer.init(params)}


class Judge:
    """Draws captions of held-out combinations, edits scenes into them, and counts what is right.

    Picture ``k`` starts from the noise of ``jax.random.key(k)``. A scene to edit differs from what
    the caption asks for in its colour, shape or background: see ``edited``.
    """

    def __init__(self, vae: dict[str, jax.Array], count: int):
        self.vae = vae
        self.asked = scenes.held_out_captions(count)
        self.tokenize = Tokenizer(qwen.build(), qwen.MAX_LENGTH)
        keys = jax.vmap(jax.random.key)(jnp.arange(count))
        shape = (16, CONFIG.transformer.in_channels)
        self.noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        rng = np.random.default_rng(scenes.CAPTION_SEED)
        before, self.changes = [], []
        for named in self.asked:
            goal = scenes.random_scene(
                rng, named["color"], named["shape"], named["background"], named["size"]
            )
            scene, which = edited(rng, goal)
            before.append(scenes.render(scene))
            name = list(OPTIONS)[which]
            self.changes.append(scenes.caption(**dict.fromkeys(OPTIONS) | {name: named[name]}))
        self.before = jnp.float32(np.stack(before)) / 255
        self._generate = jax.jit(flux2.generate, static_argnames=flux2.STATIC)

    def draw(
        self,
        params: dict,
        steps: int,
        guidance: float,
        edit: bool = False,
        shift: float | None = None,
    ):
        """Images, float32, (count, 64, 64, 3)."""
        captions = self.changes if edit else [scenes.caption(**named) for named in self.asked]
        ids, mask = self.tokenize(captions)
        return np.asarray(
            self._generate(
                params | {"vae": self.vae},
                config=CONFIG,
                ids=ids,
                mask=mask,
                noise=self.noise,
                height=PIXELS,
                width=PIXELS,
                steps=steps,
                guidance=None if guidance == 1 else jnp.float32(guidance),
                empty=self.tokenize([""]),
                images=self.before if edit else None,
                shift=shift,
            )
        )

    def __call__(
        self,
        params: dict,
        steps: int = 8,
        guidance: float = 3.0,
        edit: bool = False,
        shift: float | None = None,
    ) -> dict[str, int]:
        """How many pictures are right, in all and in each attribute, and how many no scene."""
        found = dict.fromkeys(("right", *scenes.ATTRIBUTES, "refused"), 0)
        for named, image in zip(
            self.asked, self.draw(params, steps, guidance, edit, shift), strict=True
        ):
            seen = judge.read(image)
            answers = judge.right_attributes(named, seen)
            found["right"] += all(answers.values())
            found["refused"] += isinstance(seen, judge.Refusal)
            for name, answer in answers.items():
                found[name] += bool(answer)
        return found


def note_training(folder: Path, recipe: Recipe) -> None:
    """Write down in the folder of what model and VAE the training is, for those who resume it.

    Raises
    ------
    SystemExit
        If the folder holds the training of another model, with another batch or another VAE.
    """
    vae = ROOT / "checkpoints" / "shapes-sd" / "vae" / "diffusion_flax_model.msgpack"
    about = {
        "transformer": asdict(CONFIG.transformer),
        "text_encoder": asdict(CONFIG.text_encoder),
        "batch": recipe.batch,
        "vae": hashlib.sha256(vae.read_bytes()).hexdigest(),
    }
    about = json.loads(json.dumps(about))  # with lists for tuples, as it is read
    file = folder / "run.json"
    if file.exists():
        earlier = json.loads(file.read_text())
        others = [name for name, value in about.items() if earlier.get(name, value) != value]
        if others or about.keys() - earlier.keys():
            kind = f"with another {' and '.join(others)}" if others else "by an older version"
            raise SystemExit(
                f"{folder} holds a training {kind}: remove it, or name another folder by --work."
            )
    about["device"] = jax.devices()[0].device_kind
    file.write_text(json.dumps(about, indent=1) + "\n")


def train(folder: Path, recipe: Recipe) -> dict:
    """Train, and return the averaged parameters. The folder holds the state to resume from."""
    folder.mkdir(parents=True, exist_ok=True)
    note_training(folder, recipe)
    numbers = prepare(folder, recipe)
    judges = Judge(vae_parameters(numbers["mean"], numbers["variance"]), JUDGED)
    data = {name: jnp.asarray(value) for name, value in numbers.items()}
    data["ids"], data["mask"] = map(jnp.asarray, judges.tokenize(all_captions()))
    optimizer = make_optimizer(recipe)
    state = jax.jit(lambda: initial_state(recipe, optimizer))()
    step = make_step(recipe, optimizer)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    log = folder / "log.jsonl"

    def write(**row) -> None:
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")

    with ocp.CheckpointManager((folder / "states").resolve(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(shapes))
        bar = tqdm(range(first, recipe.steps), initial=first, total=recipe.steps, mininterval=5)
        losses = []
        started, cpu = time.monotonic(), time.process_time()
        for number in bar:
            state, loss = step(state, number, data)
            losses.append(loss)
            done = number + 1
            if done % 50 == 0:
                mean = float(np.mean(jax.device_get(losses)))
                losses.clear()
                bar.set_postfix(loss=f"{mean:.4f}")
                now, spent = time.monotonic(), time.process_time()
                write(step=done, loss=mean, seconds=now - started, cpu_seconds=spent - cpu)
                started, cpu = now, spent
            # It is judged before it is saved: after an interruption, it is judged again.
            if done % JUDGE_EVERY == 0 or done == recipe.steps:
                drawn = judges(state["average"])
                edits = judges(state["average"], edit=True)
                write(step=done, drawn=drawn, edited=edits)
                tqdm.write(
                    f"step {done}: {drawn['right']} of {JUDGED} drawn, {edits['right']} edited"
                )
                started, cpu = time.monotonic(), time.process_time()
            if done % SAVE_EVERY == 0 or done == recipe.steps:
                manager.save(done, args=ocp.args.StandardSave(state), force=True)
    return state["average"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=WORK, help="default: %(default)s")
    train(parser.parse_args().work, Recipe())


if __name__ == "__main__":
    main()
