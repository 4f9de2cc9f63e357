"""Train the small FLUX.2 by flow matching.

Transformer and text encoder start from random numbers. They learn to draw the scenes of
``course/shapes``, from noise and a caption, and to edit them, from noise, a scene, and a caption
that names what changes. The VAE is that of ``shapes-sd``, and stays as it is.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course import flux2
from course.flux2.tokenizer import Tokenizer
from course.model.layers import Parameter
from course.shapes import scenes
from lab.train import data, loop, tokenizers
from lab.train.data import OPTIONS, PIXELS
from lab.train.judging import count_attributes

CHECKPOINT = data.CHECKPOINTS / "shapes-flux2"
CONFIG = flux2.read_config(CHECKPOINT)
JUDGED = 96  # pictures
FULL_CAPTIONS = 0.65  # the share that names every attribute
TRAINED = ("transformer", "text_encoder")  # the parts; the VAE stays as it is


@dataclass(frozen=True)
class Recipe(loop.Recipe):
    """How the model is trained.

    Attributes
    ----------
    edits : int
        How many examples of a step edit a scene.
    pairs : int
        Scenes to edit.
    shift, spread : float
        Times are logit-normal: the sigmoid of a normal number with this standard deviation,
        shifted towards the noise as the sampler's times are.
    """

    edits: int = 32
    pairs: int = 16_000
    shift: float = 1.35
    spread: float = 1.2


RECIPE = Recipe(steps=11_500, cooldown=7_475, peak=2.5e-3, batch=256, pool=60_000)


def edited(rng: np.random.Generator, scene: scenes.Scene) -> tuple[scenes.Scene, int]:
    """Return the same scene but for one attribute, and which one: no held-out combination.

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


def prepare(
    file: Path, recipe: Recipe, config: flux2.Config, vae: dict[str, jax.Array]
) -> dict[str, np.ndarray]:
    """Return what training reads, which is kept in the file.

    Returns
    -------
    dict
        ``tokens`` (scenes, 16, 16) and their ``attributes`` (scenes, 4); of the edits ``before``
        and ``after`` (pairs, 16, 16), what is so ``afterwards`` (pairs, 4), and which attribute
        ``changed`` (pairs,); ``mean`` and ``variance`` (16,) for the VAE's batch norm.
    """

    def make() -> dict[str, np.ndarray]:
        pool = scenes.training_scenes(recipe.pool, data.POOL_SEED)
        first = scenes.training_scenes(recipe.pairs, seed=2)
        rng = np.random.default_rng(3)
        second, changed = zip(*(edited(rng, scene) for scene in first), strict=True)

        epsilon = config.vae.batch_norm_eps
        unchanged = with_statistics(vae, np.zeros(16), np.full(16, 1 - epsilon))
        params = {"vae": unchanged}
        encode = jax.jit(lambda images: flux2.encode_images(params, config, images / 255))
        tokens = np.concatenate(
            [
                np.asarray(encode(images.astype(np.float32)))
                for images in data.render_all([*pool, *first, *second])
            ]
        )
        mean = tokens.mean(axis=(0, 1))
        variance = tokens.var(axis=(0, 1))
        tokens = ((tokens - mean) / np.sqrt(variance + epsilon)).astype(np.float16)
        return {
            "tokens": tokens[: len(pool)],
            "attributes": np.int32([data.attribute_indices(scene) for scene in pool]),
            "before": tokens[len(pool) : len(pool) + len(first)],
            "after": tokens[len(pool) + len(first) :],
            "afterwards": np.int32([data.attribute_indices(scene) for scene in second]),
            "changed": np.int32(changed),
            "mean": mean,
            "variance": variance,
        }

    return data.kept(file, make)


def with_statistics(
    vae: dict[str, jax.Array], mean: np.ndarray, variance: np.ndarray
) -> dict[str, jax.Array]:
    """Return the VAE of ``shapes-sd`` as FLUX.2 has it, with the batch norm's statistics."""
    return vae | {
        "bn.running_mean": jnp.float32(mean),
        "bn.running_var": jnp.float32(variance),
    }


def start_layer(key: jax.Array, name: str, parameter: Parameter) -> jax.Array:
    """Return the numbers with which a layer starts.

    What modulates a block starts from zero, so that each block gives back what it gets
    (adaLN-Zero: Peebles and Xie, 2022), and so does the layer that gives the velocity.
    """
    shape = parameter.shape
    if "norm" in name and len(shape) - ("*" in name) == 1:  # a factor for each channel
        return jnp.ones(shape)
    if "modulation" in name or name.startswith(("norm_out", "proj_out")):
        return jnp.zeros(shape)
    return jax.random.normal(key, shape) * shape[-2] ** -0.5


def random_times(key: jax.Array, recipe: Recipe) -> jax.Array:
    """Draw logit-normal times, one from each of as many equally likely intervals: (batch,).

    Their mean varies less than that of independent ones.
    """
    count = recipe.batch
    places = (
        jnp.arange(count) + jax.random.uniform(key, (count,), minval=0.001, maxval=0.999)
    ) / count
    times = jax.nn.sigmoid(recipe.spread * jax.scipy.stats.norm.ppf(places))
    return recipe.shift * times / (1 + (recipe.shift - 1) * times)


def random_batch(key: jax.Array, arrays: dict[str, jax.Array], recipe: Recipe) -> dict:
    """Draw scenes to draw, and behind them scenes to edit, with captions, times and noise."""
    keys = jax.random.split(key, 7)
    draws = recipe.batch - recipe.edits
    rows = jax.random.randint(keys[0], (draws,), 0, len(arrays["tokens"]))
    pairs = jax.random.randint(keys[1], (recipe.edits,), 0, len(arrays["after"]))
    captions = data.random_captions(keys[2], arrays["attributes"][rows], FULL_CAPTIONS)
    # Of an edit the caption names what changes, and nothing else.
    which = jnp.arange(4) == arrays["changed"][pairs, None]
    is_named = jax.random.uniform(keys[3], (recipe.edits, 1)) > data.EMPTY_CAPTIONS
    edit_captions = data.caption_number(arrays["afterwards"][pairs], which & is_named)
    captions = jnp.concatenate([captions, edit_captions])
    clean = jnp.concatenate([arrays["tokens"][rows], arrays["after"][pairs]]).astype(jnp.float32)
    # Times come in rising order, and the edits are at the end of the batch: without shuffling,
    # their times would all be large.
    order = jax.random.permutation(keys[6], recipe.batch)
    return {
        "clean": clean,
        "noise": jax.random.normal(keys[4], clean.shape),
        "times": random_times(keys[5], recipe)[order],
        "reference": arrays["before"][pairs].astype(jnp.float32),
        "ids": arrays["ids"][captions],
        "mask": arrays["mask"][captions],
    }


def predict(
    p: dict,
    config: flux2.Config,
    mixed: jax.Array,
    text: jax.Array,
    times: jax.Array,
    reference: jax.Array,
    until: jax.Array | None = None,
) -> jax.Array:
    """Return the velocity of scenes to draw and, behind them, of scenes to edit.

    Parameters
    ----------
    p : dict
        The transformer's parameters.
    config : flux2.Config
    mixed : jax.Array
        Tokens between data and noise, (batch, 16, 16).
    text : jax.Array
        The captions, encoded.
    times : jax.Array
        (batch,).
    reference : jax.Array
        The tokens of the scenes to edit, (edits, 16, 16), which are the last of the batch.
    until : jax.Array, optional
        For a flow map, the times that it goes to, (batch,).

    Returns
    -------
    jax.Array
        Float32, (batch, 16, 16).
    """
    side = PIXELS // config.vae.pixels_per_token
    places = flux2.positions(side, side)
    draws = len(mixed) - len(reference)

    def run(image: jax.Array, part: slice, where: np.ndarray) -> jax.Array:
        return flux2.velocity(
            p,
            config.transformer,
            image,
            text[part],
            times[part],
            where,
            flux2.text_positions(text.shape[1]),
            until=None if until is None else until[part],
        )

    drawn = run(mixed[:draws], slice(0, draws), places)
    with_reference = jnp.concatenate([mixed[draws:], reference], axis=1)
    both = np.concatenate([places, flux2.positions(side, side, reference=1)])
    changed = run(with_reference, slice(draws, None), both)[:, : side**2]
    return jnp.concatenate([drawn, changed])


def loss_fn(params: dict, batch: dict, config: flux2.Config) -> jax.Array:
    """Return the mean squared error of the velocity."""
    text = flux2.encode_prompts(params, config, batch["ids"], batch["mask"])
    clean, noise, times = batch["clean"], batch["noise"], batch["times"]
    mixed = clean + times[:, None, None] * (noise - clean)
    p, reference = params["transformer"], batch["reference"]
    predicted = predict(p, config, mixed, text, times, reference)
    return jnp.square(predicted - (noise - clean)).mean()


class Judge:
    """Draws captions of held-out combinations, edits scenes into them, and counts what is right.

    Picture ``k`` starts from the noise of ``jax.random.key(first_key + k)``. A scene to edit
    differs from what the caption asks for in its colour, shape or background: see ``edited``.

    Parameters
    ----------
    vae : dict
        The VAE's parameters.
    asked : list of dict
        What the captions name, such as ``scenes.held_out_captions`` gives it.
    config : flux2.Config
    first_key : int
    """

    def __init__(
        self,
        vae: dict[str, jax.Array],
        asked: list[dict[str, str]],
        config: flux2.Config = CONFIG,
        first_key: int = 0,
    ):
        self.vae = vae
        self.config = config
        self.asked = asked
        self.tokenize = Tokenizer(tokenizers.learn_qwen(), tokenizers.QWEN_LENGTH)
        keys = jax.vmap(jax.random.key)(first_key + jnp.arange(len(asked)))
        shape = (16, config.transformer.in_channels)
        self.noise = jax.vmap(lambda key: jax.random.normal(key, shape))(keys)
        rng = np.random.default_rng(scenes.CAPTION_SEED + first_key)
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
    ) -> np.ndarray:
        """Return images, float32, (count, 64, 64, 3)."""
        captions = self.changes if edit else [scenes.caption(**named) for named in self.asked]
        ids, mask = self.tokenize(captions)
        return np.asarray(
            self._generate(
                params | {"vae": self.vae},
                config=self.config,
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
        """Return how many pictures are right, as ``count_attributes`` does."""
        return count_attributes(self.asked, self.draw(params, steps, guidance, edit, shift))


def make_task(recipe: Recipe = RECIPE, config: flux2.Config = CONFIG) -> loop.Task:
    """Return what the loop needs to know of this training."""
    declared = flux2.model_parameters(config)
    declared = {part: declared[part] for part in TRAINED}
    return loop.Task(
        recipe=recipe,
        start=lambda key: loop.initial_parameters(key, declared, start_layer),
        matrices=loop.matrices_of(declared, stacked_only=True),
        random_batch=lambda key, arrays: random_batch(key, arrays, recipe),
        loss=lambda params, batch: loss_fn(params, batch, config),
    )


def train(
    folder: Path,
    recipe: Recipe,
    config: flux2.Config,
    vae: dict[str, jax.Array],
    judged: int = JUDGED,
) -> dict[str, dict[str, jax.Array]]:
    """Train, and return the averaged parameters with the VAE, as ``flux2.load`` does.

    Parameters
    ----------
    folder : Path
        Holds the state to resume from.
    recipe : Recipe
    config : flux2.Config
        Of the model, such as ``CONFIG``.
    vae : dict
        Parameters of the VAE of ``shapes-sd``.
    judged : int
        How many pictures are drawn, and how many edited, to be judged.
    """
    about = {
        "transformer": asdict(config.transformer),
        "text_encoder": asdict(config.text_encoder),
        "batch": recipe.batch,
        "vae": loop.fingerprint(vae),
    }
    loop.note_training(folder, about)
    arrays = prepare(folder / f"data-{recipe.pool}-{recipe.pairs}.npz", recipe, config, vae)
    vae = with_statistics(vae, arrays["mean"], arrays["variance"])
    judge = Judge(vae, scenes.held_out_captions(judged), config)
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    arrays["ids"], arrays["mask"] = map(jnp.asarray, judge.tokenize(data.all_captions()))

    def judge_both(params: dict) -> dict[str, dict[str, int]]:
        return {"drawn": judge(params), "edited": judge(params, edit=True)}

    average = loop.train(folder, make_task(recipe, config), arrays, judge_both)
    return average | {"vae": vae}
