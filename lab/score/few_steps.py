"""How many held-out captions the few-step model draws right, and how many scenes it edits so.

The captions, scenes and noise are those of ``lab/score/flux2.py``, so the scores stand beside its
teacher's. For two runs there are other shifts, too, which say where the second one starts. A
question names the weights' hash, so that other weights are scored anew.
"""

import itertools

from lab.score.flux2 import hash_of_weights, load
from lab.train import data, flow
from lab.train.judging import count_attributes

CHECKPOINT = data.CHECKPOINTS / "shapes-few"
RUNS = (1, 2, 4, 8)
SHIFTS = (0.5, 1.0, 2.0, 4.0)
USUAL = {"steps": 2, "shift": flow.CONFIG.shift, "edit": False}


def questions(rows: list[dict]) -> list[dict]:
    asked = [
        USUAL | {"steps": steps, "edit": edit}
        for steps, edit in itertools.product(RUNS, (False, True))
    ]
    asked += [USUAL | {"shift": shift} for shift in SHIFTS if shift != USUAL["shift"]]
    return [{"weights": hash_of_weights(CHECKPOINT)} | each for each in asked]


def answer(weights: str, steps: int, shift: float, edit: bool) -> dict:
    judges, params = load(CHECKPOINT)
    images = judges.draw(params, steps, guidance=1, edit=edit, shift=shift)
    return count_attributes(judges.asked, images) | {"pictures": flow.JUDGED}
