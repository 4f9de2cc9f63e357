"""Makes the bundled checkpoints, in JAX: ``python -m lab.train``."""
