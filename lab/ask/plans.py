"""The ways to split a step over chips, which ``python -m course.tpu plan`` shows at once.

An answer about the small model takes some seconds, one about a real model minutes.
"""

from course.tpu import splits
from course.tpu.plan import Job, make_job

JOBS = [
    ("shapes-flux2", "v6e", 4),
    ("flux2", "v6e", 8),
    ("flux2", "v5e", 8),
    ("flux2-9b", "v6e", 8),
    ("sdxl", "v6e", 8),
    ("sdxl", "v5e", 8),
]


def jobs() -> list[Job]:
    return [make_job(model, chip, chips) for model, chip, chips in JOBS]


def possible_ways(job: Job) -> list[splits.Way]:
    """Return the ways that the model permits."""
    return [way for way in job.ways if not job.why_not(way)]


def questions(rows: list[dict]) -> list[dict]:
    return [job.question(way) for job in jobs() for way in possible_ways(job)]


def answer(**question) -> dict:
    for job in jobs():
        for way in job.ways:
            if job.question(way) == question:
                return splits.ask_way(job.program, job.guided, way)
    raise RuntimeError(f"No job has the question {question}.")
