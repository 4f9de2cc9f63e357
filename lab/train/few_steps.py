"""Train a student of the small FLUX.2 that draws in one, two or four runs of its transformer.

The teacher draws and edits scenes with guidance, in small steps, and its paths are kept, from the
noise to the image. A student learns in one of four ways:

- ``reflow`` (Liu et al., 2022): by the loss of flow matching, with noise and image of one path as
  a pair. The lines of such pairs hardly cross, so a long step goes right.
- ``dmd``, distribution matching distillation (Yin et al., 2024): the student's images get noise,
  and go where the teacher finds images more likely than a critic does, which learns on the way what
  the student draws. So there is no image to be like, and nothing to blur.
- ``meanflow`` (Geng et al., 2025): it becomes a flow map, which is also told the time that a step
  goes to. It learns the average velocity from the teacher's velocity at one point, and from its own
  derivative in that direction.
- ``shortcut`` (Frans et al., 2024; Salimans and Ho, 2022): a flow map, too. A short jump learns
  from the teacher's steps, and a longer one from its own jumps of half the length.

The last three ask the teacher in every step of the training, so they can learn from new noise, and
``dmd`` needs no paths at all.

Guidance is in the paths, so the student needs none, and a step is a single run. Settings are chosen
by ``other_captions``, which are judged on the way, and not by those that are judged at the end.
"""

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from course import flux2
from course.flux2.tokenizer import Tokenizer
from course.flux2.transformer import SECOND_TIME
from course.model.guidance import guide
from course.shapes import judge, scenes
from lab.train import data, flow, loop
from lab.train.data import OPTIONS, PIXELS

# Of the teacher. By the card of shapes-flux2, edits are best at 2.
GUIDANCE = {"drawings": 3.0, "edits": 2.0}
FULL_CAPTIONS = 0.8  # the share of the drawings' captions that names every attribute
SCENES_SEED = 1_000_000  # of the first chunk's scenes; each chunk has the next one
NOISE_SEED = 17
RUNS = (1, 2, 4)  # which are judged
OTHER_FIRST_KEY = 1000  # of the noise in which settings are judged
HUBER = 0.25  # the error of an example, in all its numbers, beyond which the loss is linear
LEAST_LEVEL = 0.02  # of the noise that what a student draws gets, and of the image left in it
LEAST_WAY = 0.05  # from a time to the next, for a flow map
# From when the examples of ``dmd`` go to the data, in turn: the times of one, two and four runs.
STARTS = (1, 0.5, 1, 0.75, 0.5, 0.25, 1, 0.5)
CRITIC = "critic"  # the part that learns, for ``dmd``, what the student draws
CRITIC_SPEED = 2.0  # by how much faster, as the student must not run away from it
# From when to when the examples of ``shortcut`` go, in turn.
JUMPS = ((1, 0), (1, 0.5), (0.5, 0), (1, 0.75), (0.75, 0.5), (0.5, 0.25), (0.25, 0), (1, 0))
ALL = slice(None)  # rows of a batch


@dataclass(frozen=True)
class Recipe(loop.Recipe):
    """How a student is trained. Of ``pool``, the teacher's paths, there are only whole chunks.

    Attributes
    ----------
    edits : int
        How many examples of a step edit a scene. The share of the paths is the same.
    chunk : int
        Paths in a file.
    path_steps : int
        Steps of a path.
    to_data : float
        For a flow map, the share of examples that go to the data, at the time 0.
    own : float
        The share of examples that start where the student itself arrives from the noise, and not
        on the line or the path. There it will be when it draws (Yin et al., 2024, call that
        backward simulation). ``meanflow`` has none.
    at_noise, nowhere : float
        For ``meanflow``, the shares of examples that start at the noise, at the time 1, and of
        those that go nowhere: their average velocity is the velocity itself.
    """

    edits: int = 8
    chunk: int = 256
    path_steps: int = 8
    to_data: float = 0.5
    own: float = 0.75
    at_noise: float = 0.0
    nowhere: float = 0.0


# What the student learns from.


def count_edits(recipe: Recipe) -> int:
    """Return how many paths of a chunk edit a scene: the last ones."""
    return recipe.chunk * recipe.edits // recipe.batch


def random_noise(number: int, recipe: Recipe, config: flux2.Config) -> jax.Array:
    """Return the noise of a chunk's paths: float32, (chunk, 16, 16). It is in no file."""
    key = jax.random.fold_in(jax.random.key(NOISE_SEED), number)
    return flux2.random_tokens(key, config, recipe.chunk, PIXELS, PIXELS)


def ask(number: int, recipe: Recipe) -> tuple[jax.Array, list[dict], np.ndarray]:
    """Choose what a chunk asks the teacher for: no held-out combination.

    Returns
    -------
    captions : jax.Array
        Numbers of captions: int32, (chunk,).
    asked : list of dict
        For each caption the attributes that the image must have.
    before : numpy.ndarray
        The scenes to edit: float32, (edits, 64, 64, 3), from 0 to 1.
    """
    seed = SCENES_SEED + number
    some = scenes.training_scenes(recipe.chunk, seed)
    draws = recipe.chunk - count_edits(recipe)
    attributes = jnp.int32([data.attribute_indices(scene) for scene in some[:draws]])
    captions = data.random_captions(jax.random.key(seed), attributes, FULL_CAPTIONS)
    asked = [data.attributes_of(int(caption)) for caption in captions]

    rng = np.random.default_rng([seed, 1])
    after, changed = zip(*(flow.edited(rng, scene) for scene in some[draws:]), strict=True)
    attributes = jnp.int32([data.attribute_indices(scene) for scene in after])
    which = jnp.arange(len(OPTIONS)) == jnp.int32(changed)[:, None]
    captions = jnp.concatenate([captions, data.caption_number(attributes, which)])
    asked += [{name: getattr(scene, name) for name in OPTIONS} for scene in after]
    before = np.float32([scenes.render(scene) for scene in some[draws:]]) / 255
    return captions, asked, before


def guided_velocity(
    teacher: dict,
    config: flux2.Config,
    mixed: jax.Array,
    text: jax.Array,
    empty: jax.Array,
    times: jax.Array,
    reference: jax.Array,
) -> jax.Array:
    """Return the teacher's velocity with guidance: arguments and result as of ``flow.predict``.

    ``empty`` is the empty caption, encoded: (1, tokens, channels).
    """
    p = teacher["transformer"]
    without = flow.predict(p, config, mixed, jnp.broadcast_to(empty, text.shape), times, reference)
    prompted = flow.predict(p, config, mixed, text, times, reference)
    is_edit = jnp.arange(len(mixed)) >= len(mixed) - len(reference)
    scale = jnp.where(is_edit, GUIDANCE["edits"], GUIDANCE["drawings"])
    return guide(scale, without, prompted)


def make_teaching(
    recipe: Recipe, config: flux2.Config, tokenize: Tokenizer
) -> Callable[..., tuple[jax.Array, jax.Array, jax.Array]]:
    """Return a program by which the teacher draws and edits.

    It takes the teacher's parameters, noise, numbers of captions and scenes to edit. It gives the
    paths without the noise, float16, (chunk, path_steps, 16, 16); the tokens of the scenes to edit,
    float16, (edits, 16, 16); and images from 0 to 1, float32, (chunk, 64, 64, 3).
    """
    ids, mask = map(jnp.asarray, tokenize(data.all_captions()))
    at = jnp.asarray(flux2.times(recipe.path_steps))

    @jax.jit
    def teach(
        teacher: dict, noise: jax.Array, captions: jax.Array, before: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        text = flux2.encode_prompts(teacher, config, ids[captions], mask[captions])
        empty = flux2.encode_prompts(teacher, config, ids[-1:], mask[-1:])
        reference = flux2.encode_images(teacher, config, before)

        def step(x: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            now, then = pair
            times = jnp.full(len(x), now)
            moved = guided_velocity(teacher, config, x, text, empty, times, reference)
            x = x + (then - now) * moved
            return x, x

        clean, points = jax.lax.scan(step, noise, (at[:-1], at[1:]))
        images = flux2.decode(teacher["vae"], config.vae, clean, PIXELS, PIXELS)
        return jnp.float16(points.swapaxes(0, 1)), jnp.float16(reference), images

    return teach


def prepare_questions(
    file: Path, recipe: Recipe, config: flux2.Config, teacher: dict[str, dict[str, jax.Array]]
) -> dict[str, np.ndarray]:
    """Return what a student by ``dmd`` is asked for, which is kept in the file.

    Captions that leave something out are not among it: they might lead to a held-out combination.

    Returns
    -------
    dict
        As of ``prepare``, without the paths.
    """

    def make() -> dict[str, np.ndarray]:
        encode = jax.jit(lambda images: flux2.encode_images(teacher, config, images))
        draws = recipe.chunk - count_edits(recipe)
        found = {"drawn_captions": [], "edited_captions": [], "before": []}
        for number in range(math.ceil(recipe.pool / recipe.chunk)):
            captions, _, before = ask(number, recipe)
            drawn = captions[:draws]
            found["drawn_captions"].append(drawn[data.is_full(drawn)])
            found["edited_captions"].append(captions[draws:])
            found["before"].append(np.float16(encode(before)))
        return {name: np.concatenate(parts) for name, parts in found.items()}

    return data.kept(file, make)


def is_right(named: dict[str, str | None], image: np.ndarray) -> bool:
    """Return whether an image shows what was asked for, and no held-out combination.

    A caption that leaves out the background, say, may lead to any.
    """
    seen = judge.read_scene(image)
    if isinstance(seen, judge.Refusal):
        return False
    if (seen.color, seen.shape, seen.background) in scenes.held_out():
        return False
    return all(judge.right_attributes(named, seen).values())


def prepare(
    folder: Path,
    recipe: Recipe,
    config: flux2.Config,
    teacher: dict[str, dict[str, jax.Array]],
    tokenize: Tokenizer,
) -> dict[str, np.ndarray]:
    """Return paths of the teacher, which are kept in the folder, a file for each chunk.

    Those whose end is wrong, or shows a held-out combination, are left out.

    Returns
    -------
    dict
        ``drawn`` and ``edited``: float16, (paths, path_steps + 1, 16, 16), from the noise to the
        data. ``drawn_captions`` and ``edited_captions``: int32, (paths,). ``before``, the tokens of
        the scenes to edit: float16, (paths, 16, 16).

    Raises
    ------
    SystemExit
        If the folder holds paths of another teacher or by other steps.
    ValueError
        If no path is right.
    """
    about = {
        "teacher": loop.fingerprint(teacher["transformer"]),
        "guidance": GUIDANCE,
        "path_steps": recipe.path_steps,
        "chunk": recipe.chunk,
        "edits": count_edits(recipe),
    }
    loop.note_training(folder, about)
    teach = make_teaching(recipe, config, tokenize)

    def make(number: int, processes: Executor) -> dict[str, np.ndarray]:
        started = time.monotonic()
        captions, asked, before = ask(number, recipe)
        noise = random_noise(number, recipe, config)
        paths, reference, images = teach(teacher, noise, captions, before)
        pictures = np.uint8(np.rint(255 * np.asarray(images)))
        right = list(processes.map(is_right, asked, pictures, chunksize=16))
        seconds = time.monotonic() - started
        print(f"chunk {number}: {sum(right)} of {len(right)} right, {seconds:.0f} s", flush=True)
        return {
            "paths": np.asarray(paths),
            "before": np.asarray(reference),
            "captions": np.asarray(captions),
            "is_right": np.array(right),
            "seconds": np.array(seconds),
        }

    found = {name: [] for name in ("drawn", "drawn_captions", "edited", "edited_captions")}
    found["before"] = []
    draws = recipe.chunk - count_edits(recipe)
    # JAX has threads, so its process must not be forked.
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as processes:
        for number in range(math.ceil(recipe.pool / recipe.chunk)):
            file = folder / f"{number:04}.npz"
            chunk = data.kept(file, partial(make, number, processes))
            noise = np.float16(random_noise(number, recipe, config))
            paths = np.concatenate([noise[:, None], chunk["paths"]], axis=1)
            (drawn,) = np.nonzero(chunk["is_right"][:draws])
            (edited,) = np.nonzero(chunk["is_right"][draws:])
            found["drawn"].append(paths[drawn])
            found["drawn_captions"].append(chunk["captions"][drawn])
            found["edited"].append(paths[draws + edited])
            found["edited_captions"].append(chunk["captions"][draws + edited])
            found["before"].append(chunk["before"][edited])
    found = {name: np.concatenate(parts) for name, parts in found.items()}
    if not len(found["drawn"]) or not len(found["edited"]):
        raise ValueError(
            f"Of the teacher's paths in {folder}, {len(found['drawn'])} drawings and "
            f"{len(found['edited'])} edits are right, and each is needed: give another teacher, or "
            "a larger pool."
        )
    return found


def on_path(paths: jax.Array, times: jax.Array) -> jax.Array:
    """Return where paths are at times of theirs: (batch, 16, 16).

    ``paths`` is (batch, steps + 1, 16, 16), at evenly spaced times from 1 to 0. A step is straight,
    so between two points the path is on the line.
    """
    steps = paths.shape[1] - 1
    place = (1 - times) * steps
    first = jnp.minimum(jnp.int32(place), steps - 1)
    share = (place - first)[:, None, None]
    rows = jnp.arange(len(paths))
    return (1 - share) * paths[rows, first] + share * paths[rows, first + 1]


def random_times(key: jax.Array, recipe: Recipe) -> tuple[jax.Array, jax.Array]:
    """Draw at which times examples start, and to which times they go: each (batch,).

    They start more often near the middle, where the second of two runs starts.
    """
    keys = jax.random.split(key, 5)
    shape = (recipe.batch,)
    times = jax.random.uniform(keys[0], (2, *shape), minval=LEAST_WAY).mean(axis=0)
    times = jnp.where(jax.random.uniform(keys[1], shape) < recipe.at_noise, 1, times)
    until = jax.random.uniform(keys[2], shape) * (times - LEAST_WAY)
    until = jnp.where(jax.random.uniform(keys[3], shape) < recipe.to_data, 0, until)
    until = jnp.where(jax.random.uniform(keys[4], shape) < recipe.nowhere, times, until)
    return times, until


def references(batch: dict, rows: slice | np.ndarray) -> jax.Array:
    """Return the tokens of the scenes to edit in some rows of a batch, in rising order."""
    count = len(batch["noise"])
    draws = count - len(batch["reference"])
    rows = np.arange(count)[rows]
    return batch["reference"][rows[rows >= draws] - draws]


def random_batch(
    key: jax.Array, arrays: dict[str, jax.Array], recipe: Recipe, config: flux2.Config
) -> dict[str, jax.Array]:
    """Draw paths of drawings, and behind them of edits, with two times for each.

    ``new_noise`` is that of the path where the caption leaves something out: for other noise the
    teacher might draw a held-out combination. See also ``with_teacher``.
    """
    keys = jax.random.split(key, 5)
    draws = recipe.batch - recipe.edits
    rows = jax.random.randint(keys[0], (draws,), 0, len(arrays["drawn"]))
    edits = jax.random.randint(keys[1], (recipe.edits,), 0, len(arrays["edited"]))
    paths = jnp.concatenate([arrays["drawn"][rows], arrays["edited"][edits]]).astype(jnp.float32)
    captions = jnp.concatenate([arrays["drawn_captions"][rows], arrays["edited_captions"][edits]])
    times, until = random_times(keys[2], recipe)
    is_own = jax.random.uniform(keys[3], times.shape) < recipe.own
    noise = jax.random.normal(keys[4], paths[:, 0].shape)
    is_sure = data.is_full(captions) | (jnp.arange(recipe.batch) >= draws)
    batch = {
        "noise": paths[:, 0],
        "new_noise": jnp.where(is_sure[:, None, None], noise, paths[:, 0]),
        "clean": paths[:, -1],
        "path": paths,
        "here": on_path(paths, times),
        "times": times,
        "until": until,
        "is_own": is_own,
        "reference": arrays["before"][edits].astype(jnp.float32),
        "ids": arrays["ids"][captions],
        "mask": arrays["mask"][captions],
    }
    return with_teacher(batch, arrays, config) if "teacher" in arrays else batch


def random_questions(
    key: jax.Array, arrays: dict[str, jax.Array], recipe: Recipe, config: flux2.Config
) -> dict[str, jax.Array]:
    """Draw captions of drawings, and behind them of edits, with noise and no path.

    ``levels`` and ``more_noise``, two for each example, are how much noise what a student draws
    gets, and which. See also ``with_teacher``.
    """
    keys = jax.random.split(key, 5)
    draws = recipe.batch - recipe.edits
    rows = jax.random.randint(keys[0], (draws,), 0, len(arrays["drawn_captions"]))
    edits = jax.random.randint(keys[1], (recipe.edits,), 0, len(arrays["edited_captions"]))
    captions = jnp.concatenate([arrays["drawn_captions"][rows], arrays["edited_captions"][edits]])
    shape = (recipe.batch, *arrays["before"].shape[1:])
    least, most = LEAST_LEVEL, 1 - LEAST_LEVEL
    batch = {
        "noise": jax.random.normal(keys[2], shape),
        "levels": jax.random.uniform(keys[3], (2, recipe.batch), minval=least, maxval=most),
        "more_noise": jax.random.normal(keys[4], (2, *shape)),
        "reference": arrays["before"][edits].astype(jnp.float32),
        "ids": arrays["ids"][captions],
        "mask": arrays["mask"][captions],
    }
    return with_teacher(batch, arrays, config)


def with_teacher(
    batch: dict[str, jax.Array], arrays: dict[str, jax.Array], config: flux2.Config
) -> dict:
    """Return a batch with ``teach``, by which the teacher can be asked for its velocity.

    ``text`` is what the teacher's encoder makes of the captions, and ``config`` the teacher's.
    """
    teacher = arrays["teacher"]
    text = flux2.encode_prompts(teacher, config, batch["ids"], batch["mask"])
    empty = flux2.encode_prompts(teacher, config, arrays["ids"][-1:], arrays["mask"][-1:])

    def teach(x: jax.Array, times: jax.Array, rows: slice | np.ndarray = ALL) -> jax.Array:
        reference = references(batch, rows)
        return guided_velocity(teacher, config, x, text[rows], empty, times, reference)

    return batch | {"teach": teach, "text": text}


# By which losses.


def huber(error: jax.Array) -> jax.Array:
    """Return the mean pseudo-Huber loss of errors, (batch, 16, 16): float32, ().

    It is quadratic for small errors and linear for large ones, so that a few paths that are far
    from their neighbours do not decide (Song and Dhariwal, 2023; Lee et al., 2024).
    """
    squares = jnp.square(error).sum(axis=(1, 2))
    return (jnp.sqrt(squares + HUBER**2) - HUBER).mean()


def student_velocity(params: dict, batch: dict, config: flux2.Config) -> Callable[..., jax.Array]:
    """Return the student's velocity for a batch.

    It is a function of tokens, of times, for a flow map of the times to go to, and of the rows of
    the batch that these are for.
    """
    text = flux2.encode_prompts(params, config, batch["ids"], batch["mask"])

    def predict(
        x: jax.Array,
        times: jax.Array,
        until: jax.Array | None = None,
        rows: slice | np.ndarray = ALL,
    ) -> jax.Array:
        reference = references(batch, rows)
        return flow.predict(params["transformer"], config, x, text[rows], times, reference, until)

    return predict


def jump_to(times: np.ndarray, noise: jax.Array, velocity: Callable[..., jax.Array]) -> jax.Array:
    """Return where a student arrives at some times from the noise, by its own steps.

    To the last quarter of the way there are two steps, to other times one. ``times`` is (batch,),
    and ``velocity`` a function of tokens, times, times to go to, and rows.
    """
    first = np.maximum(times, 0.5)
    x = move(velocity, noise, np.flatnonzero(times < 1), np.ones_like(times), first)
    return move(velocity, x, np.flatnonzero(times < first), first, times)


def move(
    velocity: Callable[..., jax.Array],
    x: jax.Array,
    rows: np.ndarray,
    start: np.ndarray,
    end: np.ndarray,
) -> jax.Array:
    """Return tokens after a step of some rows, from their times of start to their times of end."""
    start, end = jnp.asarray(start[rows]), jnp.asarray(end[rows])
    way = (end - start)[:, None, None]
    return x.at[rows].add(way * velocity(x[rows], start, end, rows))


def arrive(batch: dict, velocity: jax.Array, places: jax.Array) -> jax.Array:
    """Return where second steps start: where the student arrives by its first ones, or at places.

    The velocity is what the student has at the noise. No gradient goes through where it arrives.
    """
    way = (1 - batch["times"])[:, None, None]
    arrived = batch["noise"] - way * jax.lax.stop_gradient(velocity)
    return jnp.where(batch["is_own"][:, None, None], arrived, places)


def reflow_loss(params: dict, batch: dict, config: flux2.Config) -> jax.Array:
    """Return the loss of where two steps to the data end: from the noise, and from a later time.

    On the straight line between the ends of a path, the velocity is what is learned. The error of
    the end is that of the velocity times the way.
    """
    predict = student_velocity(params, batch, config)
    noise, clean, times = batch["noise"], batch["clean"], batch["times"]
    share = times[:, None, None]
    first = predict(noise, jnp.ones_like(times))
    here = arrive(batch, first, clean + share * (noise - clean))
    second = predict(here, times)
    return (huber(noise - first - clean) + huber(here - share * second - clean)) / 2


def dmd_loss(params: dict, batch: dict, config: flux2.Config) -> jax.Array:
    """Return the loss of distribution matching, of the student and of its critic together.

    The student goes to the data in one step, from the noise or from where it arrives itself. What
    it draws gets noise, and the critic and the teacher each say what image is in it. The difference
    is the direction to go, for each example in units of how far the teacher is away. The critic
    learns by flow matching on what the student draws.
    """
    predict = student_velocity(params, batch, config)
    fixed = student_velocity(jax.lax.stop_gradient(params), batch, config)
    starts = np.float32(STARTS)[np.arange(len(batch["noise"])) % len(STARTS)]
    x = jump_to(starts, batch["noise"], lambda x, now, then, rows: fixed(x, now, rows=rows))
    times = jnp.asarray(starts)
    image = x - times[:, None, None] * predict(x, times)
    drawn = jax.lax.stop_gradient(image)

    def ask_critic(critic: dict, x: jax.Array, levels: jax.Array) -> jax.Array:
        return flow.predict(critic, config, x, batch["text"], levels, batch["reference"])

    first, second = batch["levels"]
    mix = first[:, None, None]
    x = (1 - mix) * drawn + mix * batch["more_noise"][0]
    by_teacher = x - mix * batch["teach"](x, first)
    by_critic = x - mix * ask_critic(jax.lax.stop_gradient(params[CRITIC]), x, first)
    away = jnp.abs(drawn - by_teacher).mean(axis=(1, 2), keepdims=True)
    goal = jax.lax.stop_gradient(drawn + (by_teacher - by_critic) / (away + 1e-3))

    mix, noise = second[:, None, None], batch["more_noise"][1]
    x = (1 - mix) * drawn + mix * noise
    error = ask_critic(params[CRITIC], x, second) - (noise - drawn)
    return jnp.square(image - goal).mean() / 2 + jnp.square(error).mean()


def meanflow_loss(params: dict, batch: dict, config: flux2.Config) -> jax.Array:
    """Return the loss of the average velocity by the identity of MeanFlow.

    Average velocity times way is distance. By the product rule, how the distance changes as the
    start moves on is the average velocity plus the way times the change of the average velocity,
    and that is the velocity at the start.
    """
    predict = student_velocity(params, batch, config)
    fixed = student_velocity(jax.lax.stop_gradient(params), batch, config)
    here, times, until = batch["here"], batch["times"], batch["until"]
    velocity = batch["teach"](here, times)
    direction = velocity, jnp.ones_like(times)
    _, change = jax.jvp(lambda x, t: fixed(x, t, until), (here, times), direction)
    target = velocity - (times - until)[:, None, None] * change
    return huber(predict(here, times, until) - target)


def shortcut_loss(params: dict, batch: dict, config: flux2.Config) -> jax.Array:
    """Return the loss of the average velocity of jumps, each against two steps of half its length.

    A quarter learns from two steps of the teacher, a half or a whole from the student's own jumps.
    No gradient goes through where a jump starts, nor through what it learns from.
    """
    predict = student_velocity(params, batch, config)
    fixed = student_velocity(jax.lax.stop_gradient(params), batch, config)
    kinds = np.arange(len(batch["noise"])) % len(JUMPS)
    times, until = np.float32(JUMPS)[kinds].T
    middle = (times + until) / 2
    is_quarter = times - until == 0.25

    def ask_teacher(
        x: jax.Array, times: jax.Array, until: jax.Array, rows: np.ndarray
    ) -> jax.Array:
        return batch["teach"](x, times, rows)

    x = jump_to(times, batch["new_noise"], fixed)
    path = on_path(batch["path"], jnp.asarray(times))
    start = jax.lax.stop_gradient(jnp.where(batch["is_own"][:, None, None], x, path))

    quarters, longer = np.flatnonzero(is_quarter), np.flatnonzero(~is_quarter)
    end = start
    for now, then in ((times, middle), (middle, until)):
        end = move(ask_teacher, end, quarters, now, then)
        end = move(fixed, end, longer, now, then)
    target = jax.lax.stop_gradient((start - end) / jnp.asarray(times - until)[:, None, None])
    return huber(predict(start, jnp.asarray(times), jnp.asarray(until)) - target)


class Way(NamedTuple):
    """How a student learns from the teacher."""

    loss: Callable[[dict, dict, flux2.Config], jax.Array]
    recipe: Recipe
    is_map: bool  # whether it is told the time that a step goes to
    asks: bool = False  # whether each step asks the teacher for velocities
    has_critic: bool = False  # whether another transformer learns beside it, and no path is needed


RECIPE = Recipe(
    steps=800,
    cooldown=560,
    peak=1.5e-3,
    batch=64,
    pool=10_240,
    warmup=30,
    judge_every=400,
)
WAYS = {
    "reflow": Way(reflow_loss, RECIPE, is_map=False),
    "dmd": Way(
        dmd_loss,
        replace(RECIPE, steps=160, cooldown=80, peak=5e-4, warmup=20, edits=12, judge_every=80),
        is_map=False,
        asks=True,
        has_critic=True,
    ),
    "meanflow": Way(
        meanflow_loss, replace(RECIPE, own=0.0, at_noise=0.5, nowhere=0.5), is_map=True, asks=True
    ),
    "shortcut": Way(
        shortcut_loss,
        replace(RECIPE, steps=620, cooldown=400, peak=1e-3, warmup=20),
        is_map=True,
        asks=True,
    ),
}
BUNDLED = ("reflow", "dmd")  # by which shapes-few was trained, in turn


# Training and judging.


def student_config(way: str, config: flux2.Config) -> flux2.Config:
    """Return the configuration of the student of a teacher: a flow map's is told a second time."""
    return replace(
        config,
        transformer=replace(config.transformer, guidance_embeds=WAYS[way].is_map),
        is_distilled=True,
    )


def other_captions(count: int) -> list[dict[str, str]]:
    """List attributes of full captions of held-out combinations, to choose settings by.

    None of them is among the ``flow.JUDGED`` captions that are judged at the end: the size differs.
    """
    judged = scenes.held_out_captions(flow.JUDGED)
    others = []
    for color, shape, background in sorted(scenes.held_out()):
        for size in scenes.SIZES:
            named = {"color": color, "shape": shape, "background": background, "size": size}
            if named not in judged:
                others.append(named)
    order = np.random.default_rng(scenes.CAPTION_SEED).permutation(len(others))
    return [others[place] for place in order[:count]]


def make_judge(
    vae: dict[str, jax.Array], asked: list[dict[str, str]], config: flux2.Config, first_key: int
) -> Callable[[dict], dict[str, dict[str, int]]]:
    """Return a function from parameters to how many images are right, drawn and edited, by runs.

    Arguments are as of ``flow.Judge``.
    """
    judges = flow.Judge(vae, asked, config, first_key)

    def count_right(params: dict) -> dict[str, dict[str, int]]:
        counts = {}
        for kind, edit in (("drawn", False), ("edited", True)):
            counts[kind] = {}
            for runs in RUNS:
                found = judges(params, steps=runs, guidance=1, edit=edit)
                counts[kind][str(runs)] = found["right"]
        return counts

    return count_right


def make_task(
    way: str,
    recipe: Recipe,
    config: flux2.Config,
    teacher: dict[str, dict[str, jax.Array]],
    earlier: dict[str, dict[str, jax.Array]] | None = None,
) -> loop.Task:
    """Return what the loop needs to know of this training; arguments are as of ``train``.

    A flow map's second embedder adds nothing at first, and a critic starts as the teacher.
    """
    earlier = earlier or teacher
    student = student_config(way, config)
    declared = flux2.model_parameters(student)
    declared = {part: declared[part] for part in flow.TRAINED}
    if WAYS[way].has_critic:
        declared[CRITIC] = declared["transformer"]
        earlier = earlier | {CRITIC: teacher["transformer"]}
    draw_batch = random_questions if WAYS[way].has_critic else random_batch
    last = f"{SECOND_TIME}.linear_2.weight"

    def start(key: jax.Array) -> dict:
        params = loop.initial_parameters(key, declared, flow.start_layer)
        if last in params["transformer"]:
            params["transformer"][last] = jnp.zeros(declared["transformer"][last].shape)
        return loop.start_from(params, earlier)

    return loop.Task(
        recipe=recipe,
        start=start,
        matrices=loop.matrices_of(declared, stacked_only=True),
        random_batch=lambda key, arrays: draw_batch(key, arrays, recipe, config),
        loss=lambda params, batch: WAYS[way].loss(params, batch, student),
        speeds={CRITIC: CRITIC_SPEED},
    )


def train(
    folder: Path,
    recipe: Recipe,
    config: flux2.Config,
    teacher: dict[str, dict[str, jax.Array]],
    way: str,
    judged: int = flow.JUDGED,
    earlier: dict[str, dict[str, jax.Array]] | None = None,
) -> dict[str, dict[str, jax.Array]]:
    """Train a student, and return its averaged parameters with the VAE, as ``flux2.load`` does.

    Parameters
    ----------
    folder : Path
        Holds the state to resume from, and ``final.json`` with how many captions that are judged at
        the end come out right. The teacher's paths are kept in the folder that it is in, as they
        serve every student.
    recipe : Recipe
    config : flux2.Config
        The teacher's, such as ``flow.CONFIG``.
    teacher : dict
        The teacher's parameters, with the VAE, in float32.
    way : str
        Of ``WAYS``.
    judged : int
        How many pictures are drawn, and how many edited, to be judged, in each number of runs.
    earlier : dict, optional
        The parameters of a student to start from, in float32. If it is not given, the student
        starts from the teacher.
    """
    earlier = earlier or teacher
    about = {
        "way": way,
        "teacher": loop.fingerprint(teacher["transformer"]),
        "earlier": loop.fingerprint(earlier["transformer"]),
        "batch": recipe.batch,
        "edits": recipe.edits,
        "pool": recipe.pool,
        "seed": recipe.seed,
    }
    loop.note_training(folder, about)
    student, vae = student_config(way, config), teacher["vae"]
    count_others = make_judge(vae, other_captions(judged), student, OTHER_FIRST_KEY)
    count_right = make_judge(vae, scenes.held_out_captions(judged), student, 0)
    tokenize = flux2.load_tokenizer(flow.CHECKPOINT, config)
    if WAYS[way].has_critic:
        arrays = prepare_questions(folder / "questions.npz", recipe, config, teacher)
    else:
        arrays = prepare(folder.parent / "paths", recipe, config, teacher, tokenize)
    arrays = {name: jnp.asarray(value) for name, value in arrays.items()}
    arrays["ids"], arrays["mask"] = map(jnp.asarray, tokenize(data.all_captions()))
    if WAYS[way].asks:
        arrays["teacher"] = {part: teacher[part] for part in flow.TRAINED}
    task = make_task(way, recipe, config, teacher, earlier)
    average = loop.train(folder, task, arrays, count_others)
    average = {part: average[part] for part in flow.TRAINED}
    final = count_right(average)
    (folder / "final.json").write_text(json.dumps(final, indent=1) + "\n")
    print(f"{folder.name}: at the end {final}", flush=True)
    return average | {"vae": vae}
