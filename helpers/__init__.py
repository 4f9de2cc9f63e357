"""The few functions that the chapters share. Everything else in them is JAX, Flax and diffusers."""

import sys

from helpers.versions import require_flax

if "helpers.doctor" not in sys.orig_argv:  # `python -m helpers.doctor` reports what would stop the import here
    require_flax()
    from helpers.checkpoints import Checkpoint, bundled_checkpoint, pick_checkpoint
    from helpers.devices import device_report, require_accelerator, simulate_devices
    from helpers.images import image_grid
    from helpers.inputs import create_key, prepare_prompts, split_keys
    from helpers.timing import Timing, count_compilations, time_calls

__all__ = [
    "Checkpoint",
    "Timing",
    "bundled_checkpoint",
    "count_compilations",
    "create_key",
    "device_report",
    "image_grid",
    "pick_checkpoint",
    "prepare_prompts",
    "require_accelerator",
    "simulate_devices",
    "split_keys",
    "time_calls",
]
