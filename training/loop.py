"""One training loop for every part: seeded by step, resumable, with an average of the weights."""

import copy
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

SAVE_EVERY = 250  # steps
WARMUP = 100  # steps
EMA_DECAY = 0.999  # of the moving average of the weights, at each step


def learning_rate(step: int, steps: int, peak: float, cooldown: int) -> float:
    """Linear warm-up, a plateau, and half a cosine down to zero over ``cooldown`` steps."""
    warmth = min(1.0, (step + 1) / WARMUP)
    progress = max(0.0, step - (steps - cooldown)) / cooldown
    return peak * warmth * 0.5 * (1 + math.cos(math.pi * progress))


class Optimizers:
    """Muon for the matrices and convolutions; AdamW for embeddings and vectors.

    PyTorch's Muon (https://kellerjordan.github.io/posts/muon/) takes only matrices, so it gets
    views of the weights of two dimensions: (outputs, all the rest).
    """

    def __init__(self, model: nn.Module, lr: float):
        embeddings = {
            id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)
        }
        self.matrices = []
        others = []
        for parameter in model.parameters():
            if parameter.ndim > 1 and id(parameter) not in embeddings:
                self.matrices.append(parameter)
            else:
                others.append(parameter)
        self.views = [nn.Parameter(p.detach().view(len(p), -1)) for p in self.matrices]
        self.muon = torch.optim.Muon(
            self.views, lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
        )
        self.adamw = torch.optim.AdamW(others, lr, betas=(0.9, 0.99), weight_decay=0.01)

    def set_lr(self, lr: float) -> None:
        for group in self.muon.param_groups + self.adamw.param_groups:
            group["lr"] = lr

    def step(self) -> None:
        for view, matrix in zip(self.views, self.matrices, strict=True):
            # A layer that nothing reads has no gradient: the last of SDXL's first text encoder.
            view.grad = None if matrix.grad is None else matrix.grad.view(view.shape)
        self.muon.step()
        self.adamw.step()

    def state_dict(self) -> dict:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


def fit(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, torch.Generator], torch.Tensor],
    *,
    name: str,
    folder: Path,
    steps: int,
    peak_lr: float,
    cooldown: int,
    seed: int,
    device: torch.device,
) -> tuple[nn.Module, dict]:
    """Train ``model``, and return the averaged weights with a log of the losses.

    Step ``n`` draws all its random numbers from a generator seeded with ``seed`` and ``n``, so that
    a run that was cut off and resumed from ``folder`` takes the same steps as one that was not.

    Parameters
    ----------
    loss_fn : callable
        Gives the loss of one batch, from the model and the step's generator (on the CPU).
    name, folder : str, Path
        ``<name>.pt`` in the folder holds weights, moving average, optimizer and log. It is written
        every 250 steps.
    steps, cooldown : int
        How many steps to take, and over how many at the end the learning rate falls to zero. Before
        them it is constant, so a run can be made longer as long as its cool-down has not begun.
    peak_lr : float
        The learning rate after the warm-up.
    """
    state_file = folder / f"{name}.pt"
    folder.mkdir(parents=True, exist_ok=True)
    model.to(device).train()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = Optimizers(model, peak_lr)
    log = {"steps": [], "loss": [], "seconds": 0.0}
    first = 0
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
        log = state["log"]

    recent = []
    started = time.monotonic()
    bar = tqdm(range(first, steps), initial=first, total=steps, desc=name, mininterval=5)
    for step in bar:
        generator = torch.Generator().manual_seed(seed * 10_000_019 + step)
        optimizer.set_lr(learning_rate(step, steps, peak_lr, cooldown))
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = loss_fn(model, generator)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        # Early averages forget quickly, or they would remember the random start.
        decay = min(EMA_DECAY, (step + 1) / (step + 10))
        update_average(average, model, decay)

        recent.append(float(loss.detach()))
        done = step + 1
        if done % 50 == 0 or done == steps:
            log["steps"].append(done)
            log["loss"].append(sum(recent) / len(recent))
            recent.clear()
            bar.set_postfix(loss=f"{log['loss'][-1]:.4f}")
        if done % SAVE_EVERY == 0 or done == steps:
            now = time.monotonic()
            log["seconds"] += now - started
            started = now
            state = {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": done,
                "log": log,
            }
            # A run that is cut off here leaves the old file whole.
            torch.save(state, state_file.with_suffix(".tmp"))
            os.replace(state_file.with_suffix(".tmp"), state_file)
    return average.eval(), log


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move the averaged weights towards the model's: they keep ``decay`` of what they were."""
    for kept, current in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(current, 1 - decay)
