"""Whether there are TPU chips. Imported before JAX, which reads the environment at its own import."""

import os
from pathlib import Path


def has_tpu_chips() -> bool:
    """Whether the operating system shows TPU chips, whatever JAX makes of them."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


if not has_tpu_chips():
    # Without this, an installed libtpu asks the network for its TPU and logs a screenful when there is none.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
