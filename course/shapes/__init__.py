"""The scenes that the bundled checkpoints know: renderer and captions, and a judge."""
