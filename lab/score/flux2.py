"""How many held-out captions the small FLUX.2 draws right, and how many scenes it edits so.

The settings are numbers of steps, scales of guidance and shifts, and int8. Two more questions are
about its loss at several times, on scenes of the training and on new ones. A question names the
weights' hash, so that other weights are scored anew. All of it takes about ten minutes on 2 cores.
"""

import functools
import hashlib
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from course import flux2
from course.model.quantize import quantize
from course.shapes import judge, scenes
from lab.train import data, flow
from lab.train.judging import count_attributes

STEPS = (1, 2, 4, 8, 16, 32)
GUIDANCE = (1.0, 2.0, 3.0, 6.0)
SHIFTS = (0.5, 1.0, 2.0, 3.0, 4.0)
USUAL = {"steps": 8, "guidance": 3.0, "shift": flow.CONFIG.shift, "edit": False}
LOSS_SCENES = 1_000
LOSS_TIMES = [0.1, 0.3, 0.5, 0.7, 0.9]


def questions(rows: list[dict]) -> list[dict]:
    asked = []
    for steps, guidance, edit in itertools.product(STEPS, GUIDANCE, (False, True)):
        asked.append(USUAL | {"steps": steps, "guidance": guidance, "edit": edit})
    asked += [USUAL | {"shift": shift} for shift in SHIFTS]
    asked += [USUAL | {"edit": edit, "int8": True} for edit in (False, True)]
    asked += [{"scenes": kind, "times": LOSS_TIMES} for kind in ("training", "new")]
    return [{"weights": hash_of_weights()} | each for each in asked]


def answer(weights: str, int8: bool = False, **asked) -> dict:
    if "scenes" in asked:
        return {"losses": find_losses(asked["scenes"], asked["times"])}
    judges, params = load()
    if int8:
        params = params | {"transformer": quantize(params["transformer"])}
    images = judges.draw(params, **asked)
    shapes = {}
    for name in scenes.SHAPES:
        places = [n for n, named in enumerate(judges.asked) if named["shape"] == name]
        right = judge.count_right([judges.asked[n] for n in places], images[places])
        shapes[name] = {"asked": len(places), "right": right}
    return count_attributes(judges.asked, images) | {"pictures": flow.JUDGED, "shapes": shapes}


@functools.cache
def hash_of_weights(folder: Path = flow.CHECKPOINT) -> str:
    """Return the hash of the files of all parts."""
    found = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".safetensors", ".msgpack"):
            found.update(file.read_bytes())
    return found.hexdigest()


@functools.cache
def load(folder: Path = flow.CHECKPOINT) -> tuple[flow.Judge, dict]:
    """Return the judge, and the parameters without the VAE's, in float32."""
    params, config, _ = flux2.load(folder, jnp.float32)
    return flow.Judge(params.pop("vae"), scenes.held_out_captions(flow.JUDGED), config), params


def find_losses(kind: str, times: list[float]) -> list[float]:
    """Return the loss at several times, on scenes of the training or on new ones."""
    judges, params = load()
    side = data.PIXELS // flow.CONFIG.vae.pixels_per_token
    if kind == "training":
        some = scenes.training_scenes(flow.RECIPE.pool, data.POOL_SEED)[:LOSS_SCENES]
    else:
        some = scenes.training_scenes(LOSS_SCENES, seed=99)
    images = np.float32([scenes.render(scene) for scene in some]) / 255
    encode = jax.jit(flux2.encode_images, static_argnums=1)
    clean = encode({"vae": judges.vae}, flow.CONFIG, images)
    captions = []
    for scene in some:
        captions.append(scenes.caption(*(getattr(scene, name) for name in scenes.ATTRIBUTES)))
    text = flux2.encode_prompts(params, flow.CONFIG, *judges.tokenize(captions))

    @jax.jit
    def loss_at(t: jax.Array) -> jax.Array:
        noise = jax.random.normal(jax.random.key(0), clean.shape)
        predicted = flux2.velocity(
            params["transformer"],
            flow.CONFIG.transformer,
            clean + t * (noise - clean),
            text,
            jnp.full(len(clean), t),
            flux2.positions(side, side),
            flux2.text_positions(text.shape[1]),
        )
        return jnp.square(predicted - (noise - clean)).mean()

    return [round(float(loss_at(jnp.float32(t))), 4) for t in times]
