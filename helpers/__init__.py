"""The few functions that the chapters share. The rest is JAX, Flax, diffusers and stable_diffusion."""

import importlib
from typing import Any

_NAMES = {
    "checkpoints": ("Checkpoint", "bundled_checkpoint", "pick_checkpoint"),
    "devices": ("device_report", "require_accelerator", "simulate_devices"),
    "images": ("image_grid",),
    "inputs": ("create_key", "prepare_prompts", "split_keys"),
    "packages": ("quiet_deprecations", "require_flax"),
    "places": ("find_data",),
    "timing": ("Timing", "count_compilations", "time_calls"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import what is asked for, and no more: a chapter without Flax needs none of what the others import."""
    if name not in _MODULES:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"helpers.{_MODULES[name]}"), name)
