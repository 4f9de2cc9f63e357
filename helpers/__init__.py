"""The few functions that the chapters share; everything else in them is JAX and the models."""

import importlib
from typing import Any

_NAMES = {
    "checkpoints": (
        "Checkpoint",
        "bundled_checkpoint",
        "download",
        "pick_checkpoint",
    ),
    "devices": ("device_report", "require_accelerator", "simulate_devices"),
    "display": ("show_source", "show_table"),
    "errors": ("show_error",),
    "images": ("image_grid",),
    "inputs": ("create_key", "prepare_prompts", "split_keys", "warn_about_prompt"),
    "models": ("find_model",),
    "packages": ("quiet_warnings", "require_flax"),
    "places": ("find_data", "read_record"),
    "scripts": ("run_simulated", "run_together"),
    "startup": ("start",),
    "timing": ("Timing", "count_compilations", "time_calls"),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Import what is asked for and no more, as a chapter needs only some of the packages."""
    if name not in _MODULES:
        raise AttributeError(f"module 'helpers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"helpers.{_MODULES[name]}"), name)
