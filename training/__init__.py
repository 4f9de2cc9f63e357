"""Makes the bundled checkpoints: ``python -m training``, which needs PyTorch."""
