"""One loop for every training: seeded by step, resumable to the bit, and judged on the way.

What a training has of its own is a ``Task``: ``vae``, ``unet``, ``flow`` and ``few_steps`` beside
this module make them.
"""

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from course.model.layers import Parameter

LOG_EVERY = 50  # steps
SAVE_EVERY = 250
EMA_DECAY = 0.999  # of the moving average of the weights, at each step


@dataclass(frozen=True)
class Recipe:
    """How long and how fast a model is trained, and on how much.

    Attributes
    ----------
    steps, cooldown : int
        Steps of training, and those at the end in which the learning rate falls to zero. A run can
        be made longer as long as its cool-down has not begun.
    peak : float
        The learning rate before the cool-down.
    batch : int
        Examples of a step.
    pool : int
        Scenes to train on.
    warmup : int
        Steps in which the learning rate rises to its peak, at the beginning.
    seed : int
        Of the first parameters, and of what is drawn for each step.
    judge_every : int
        After how many steps the model is judged, besides at the end.
    """

    steps: int
    cooldown: int
    peak: float
    batch: int
    pool: int
    warmup: int = 100
    seed: int = 0
    judge_every: int = 1000


class Task(NamedTuple):
    """What is trained, and by which loss. Parameters are dictionaries for each part by name."""

    recipe: Recipe
    # From a random key to the parameters to begin with.
    start: Callable[[jax.Array], dict]
    # For each parameter the axes of its matrices, or None where AdamW steps it (``matrices_of``).
    matrices: dict
    # From a random key and the data to the examples of a step.
    random_batch: Callable[[jax.Array, dict], Any]
    # From parameters and the examples of a step to a number, float32, ().
    loss: Callable[[dict, Any], jax.Array]
    # By how much faster than others some parts learn.
    speeds: Mapping[str, float] = {}


def initial_parameters(
    key: jax.Array,
    declared: dict[str, dict[str, Parameter]],
    start: Callable[[jax.Array, str, Parameter], jax.Array],
) -> dict[str, dict[str, jax.Array]]:
    """Return what ``start`` gives for each declared parameter, from a key of its own."""
    params = {}
    for part, parameters in declared.items():
        params[part] = {}
        for name, parameter in parameters.items():
            key, own = jax.random.split(key)
            params[part][name] = start(own, name, parameter)
    return params


def start_from(params: dict, earlier: dict) -> dict:
    """Return parameters with each layer's of an earlier model, wherever name and shape agree.

    They are copies: a training gives away the memory of the parameters that it starts from.
    """
    started = {}
    for part, values in params.items():
        started[part] = dict(values)
        for name, value in earlier.get(part, {}).items():
            if name not in values:
                continue
            own = values[name]
            if "*" in name and own.shape[1:] == value.shape[1:]:
                layers = min(len(own), len(value))
                started[part][name] = own.at[:layers].set(value[:layers])
            elif own.shape == value.shape:
                started[part][name] = jnp.copy(value)
    return started


def start_layer(key: jax.Array, name: str, parameter: Parameter) -> jax.Array:
    """Return the numbers with which a layer of Stable Diffusion or of the VAE starts.

    Weights are uniform, as PyTorch's are: up to the root of one over the number of inputs.
    """
    shape = parameter.shape
    if "embeddings" in name:
        return 0.02 * jax.random.normal(key, shape)
    if name.endswith("bias"):
        return jnp.zeros(shape)
    axes = shape[1:] if "*" in name else shape
    if len(axes) == 1:  # a norm's
        return jnp.ones(shape)
    inputs = np.prod(axes[:-1])
    return jax.random.uniform(key, shape, minval=-1, maxval=1) * inputs**-0.5


def matrices_of(declared: dict[str, dict[str, Parameter]], stacked_only: bool = False) -> dict:
    """Return the axes of the matrices that Muon steps: all linear layers and convolutions.

    A convolution is a matrix from all inputs of its window to its outputs. Embeddings and vectors
    are left to AdamW, and with ``stacked_only`` also what is outside of stacked blocks.
    """
    matrices = {}
    for part, parameters in declared.items():
        matrices[part] = {}
        for name, parameter in parameters.items():
            first = 1 if "*" in name else 0  # after the axis of stacked layers
            last = len(parameter.shape) - 1
            is_matrix = last > first and "embeddings" not in name
            if stacked_only and first == 0:
                is_matrix = False
            axes = optax.contrib.MuonDimensionNumbers(
                reduction_axis=tuple(range(first, last)), output_axis=last
            )
            matrices[part][name] = axes if is_matrix else None
    return matrices


def learning_rate(recipe: Recipe) -> optax.Schedule:
    """Return the learning rate by the number of the step: it rises, stays, and falls to zero."""
    held = recipe.steps - recipe.cooldown
    constant = optax.constant_schedule(recipe.peak)
    falling = optax.cosine_decay_schedule(recipe.peak, recipe.cooldown)
    planned = optax.schedules.join_schedules([constant, falling], [held])
    return lambda count: planned(count) * jnp.minimum(1, count / recipe.warmup)


def make_optimizer(task: Task) -> optax.GradientTransformation:
    """Return Muon for the task's matrices, and AdamW for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon/) makes each update of a matrix orthogonal, and
    ``consistent_rms`` gives it the size that AdamW's have.
    """

    def hurry(updates: dict, params: dict | None) -> dict:
        return {
            part: optax.tree.scale(task.speeds.get(part, 1.0), each)
            for part, each in updates.items()
        }

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            learning_rate(task.recipe),
            weight_decay=0.01,
            adam_weight_decay=0.01,
            adam_b2=0.99,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=task.matrices,
        ),
        optax.stateless(hurry),
    )


def make_step(task: Task) -> Callable[[dict, int, dict], tuple[dict, jax.Array]]:
    """Return a compiled step: from a state, the number of the step and the data."""
    optimizer = make_optimizer(task)

    @partial(jax.jit, donate_argnums=0)
    def step(state: dict, number: jax.Array, data: dict) -> tuple[dict, jax.Array]:
        key = jax.random.fold_in(jax.random.key(task.recipe.seed), number)
        batch = task.random_batch(key, data)
        loss, gradient = jax.value_and_grad(task.loss)(state["params"], batch)
        updates, memory = optimizer.update(gradient, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        # Early averages forget quickly, or they would remember the random start.
        decay = jnp.minimum(EMA_DECAY, (number + 1) / (number + 10))
        average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p, state["average"], params)
        return {"params": params, "average": average, "optimizer": memory}, loss

    return step


def initial_state(task: Task) -> dict:
    """Return the state before the first step.

    Its parameters are copies, as a step takes their memory, and a training may start from others'.
    It is not compiled as a whole: that would take longer than all else of a short training.
    """
    params = jax.tree.map(jnp.copy, task.start(jax.random.key(task.recipe.seed)))
    return {
        "params": params,
        "average": jax.tree.map(jnp.copy, params),
        "optimizer": make_optimizer(task).init(params),
    }


def fingerprint(params: dict) -> str:
    """Return a hash of parameters, by which a training knows another VAE."""
    digest = hashlib.sha256()
    for name, value in sorted(params.items()):
        digest.update(name.encode())
        digest.update(np.asarray(value).tobytes())
    return digest.hexdigest()


def note_training(folder: Path, about: dict[str, Any]) -> None:
    """Write down in the folder what is trained there, for those who resume it.

    Raises
    ------
    SystemExit
        If the folder holds another training.
    """
    folder.mkdir(parents=True, exist_ok=True)
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


def train(
    folder: Path, task: Task, data: dict[str, jax.Array], judge: Callable[[dict], dict]
) -> dict:
    """Train, and return the averaged parameters.

    Parameters
    ----------
    folder : Path
        Holds the states to resume from, and ``log.jsonl`` with losses, seconds and what was judged.
        Each step draws its random numbers from its own number, so that a run that was cut off and
        resumed takes the same steps as one that was not.
    task : Task
    data : dict
        Arrays, from which ``task.random_batch`` takes the examples of a step.
    judge : callable
        From averaged parameters to what the log has of them.
    """
    steps = task.recipe.steps
    state = initial_state(task)
    step = make_step(task)
    log = folder / "log.jsonl"

    def write(**row) -> None:
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")

    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager((folder / "states").resolve(), options=options) as manager:
        first = manager.latest_step() or 0
        if first:
            shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(first, args=ocp.args.StandardRestore(shapes))
        losses = []
        started, cpu = time.monotonic(), time.process_time()
        for number in range(first, steps):
            state, loss = step(state, number, data)
            losses.append(loss)
            done = number + 1
            if done % LOG_EVERY == 0 or done == steps:
                mean = float(np.mean(jax.device_get(losses)))
                losses.clear()
                now, spent = time.monotonic(), time.process_time()
                write(step=done, loss=mean, seconds=now - started, cpu_seconds=spent - cpu)
                print(f"{folder.name}: step {done:,} of {steps:,}, loss {mean:.4f}", flush=True)
                started, cpu = now, spent
            # It is judged before it is saved: after an interruption, it is judged again.
            is_judged = done % task.recipe.judge_every == 0 or done == steps
            if is_judged:
                judged = judge(state["average"])
                write(step=done, **judged)
                print(f"{folder.name}: judged {judged}", flush=True)
                started, cpu = time.monotonic(), time.process_time()
            if is_judged or done % SAVE_EVERY == 0:
                manager.save(done, args=ocp.args.StandardSave(state), force=True)
    return state["average"]
