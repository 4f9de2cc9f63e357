"""How many held-out captions the few-step model draws right, and how many scenes it edits so.

The captions, scenes and noise are those of ``lab/score/flux2.py``, so the scores stand beside its
teacher's. For two runs there are other shifts, too, which say where the second one starts, and for
one, two and four there are captions of combinations that it was trained on, with new noise. A
question names the weights' hash, so that other weights are scored anew.
"""

import itertools

from course.shapes import scenes
from lab.score.flux2 import hash_of_weights, load
from lab.train import data, few_steps, flow
from lab.train.judging import count_attributes

CHECKPOINT = data.CHECKPOINTS / "shapes-few"
RUNS = (1, 2, 4, 8)
SHIFTS = (0.5, 1.0, 2.0, 4.0)
USUAL = {"steps": 2, "shift": flow.CONFIG.shift, "edit": False}
SEEN_SEED = 4242  # of the scenes that have the captions of trained combinations


def questions(rows: list[dict]) -> list[dict]:
    asked = [
        USUAL | {"steps": steps, "edit": edit}
        for steps, edit in itertools.product(RUNS, (False, True))
    ]
    asked += [USUAL | {"shift": shift} for shift in SHIFTS if shift != USUAL["shift"]]
    asked += [USUAL | {"steps": steps, "seen": True} for steps in few_steps.RUNS]
    return [{"weights": hash_of_weights(CHECKPOINT)} | each for each in asked]


def answer(weights: str, steps: int, shift: float, edit: bool, seen: bool = False) -> dict:
    judges, params = load(CHECKPOINT)
    if seen:
        some = scenes.training_scenes(flow.JUDGED, SEEN_SEED)
        asked = [{name: getattr(scene, name) for name in scenes.ATTRIBUTES} for scene in some]
        judges = flow.Judge(judges.vae, asked, judges.config, few_steps.OTHER_FIRST_KEY)
    images = judges.draw(params, steps, guidance=1, edit=edit, shift=shift)
    return count_attributes(judges.asked, images) | {"pictures": flow.JUDGED}
