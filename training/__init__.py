"""How the bundled checkpoints are made and judged. Nothing here is imported by a chapter."""
