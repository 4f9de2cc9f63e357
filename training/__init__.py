"""How the bundled checkpoints are made and judged. Chapters import the renderer and the judge, and nothing else."""
