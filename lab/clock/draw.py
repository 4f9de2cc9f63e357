"""What drawing many prompts by Ray costs, on this machine.

A plain loop, one actor and two draw the same prompts, after one another: images a second from the
first batch's end to the last one's, and seconds until Ray is ready and until all is drawn. Then one
of two actors is killed. It takes a few minutes.
"""

import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from course import draw
from course.shapes import scenes

PROMPTS = 192
CHECKPOINT = "shapes-sd"
BATCH = 4
SETTINGS = draw.Settings(CHECKPOINT, batch=BATCH)


def questions(rows: list[dict]) -> list[dict]:
    return [{"checkpoint": CHECKPOINT, "prompts": PROMPTS, "batch": BATCH}]


def make_rows() -> list[dict]:
    captions = [scenes.caption(**each) for each in scenes.held_out_captions(PROMPTS)]
    return [{"number": number, "prompt": caption} for number, caption in enumerate(captions)]


def rate(spans: list[tuple[str, float, float]]) -> float:
    """Return the images a second, from when every worker has drawn its first batch.

    Each span is a worker, and when it began and finished a batch.
    """
    firsts: dict[str, float] = {}
    for worker, _, end in spans:
        firsts[worker] = min(end, firsts.get(worker, end))
    begin = max(firsts.values())
    ends = [end for _, _, end in spans]
    return SETTINGS.batch * sum(end > begin for end in ends) / (max(ends) - begin)


def draw_in_a_loop(rows: list[dict], folder: Path) -> dict:
    """Draw in one process without Ray."""
    begin = time.time()
    drawing = draw.Draw(SETTINGS, partial(draw.write_pngs, folder=folder, settings=SETTINGS))
    spans = []
    for start in range(0, len(rows), SETTINGS.batch):
        batch = rows[start : start + SETTINGS.batch]
        columns = {
            "number": np.array([row["number"] for row in batch]),
            "prompt": np.array([row["prompt"] for row in batch], object),
        }
        done = drawing(columns)
        spans.append((done["worker"][0], done["start"][0], done["end"][0]))
    return {"images_per_second": rate(spans), "seconds": time.time() - begin}


def draw_by_actors(rows: list[dict], folder: Path, actors: int) -> dict:
    begin = time.time()
    write = partial(draw.write_pngs, folder=folder, settings=SETTINGS)
    table = draw.draw_rows(rows, SETTINGS, write, actors, num_cpus=1).to_pandas()
    seconds = time.time() - begin
    batches = table.drop_duplicates(["worker", "start"])
    spans = list(zip(batches.worker, batches.start, batches.end, strict=True))
    return {"images_per_second": rate(spans), "seconds": seconds, "workers": len(set(table.worker))}


def kill_an_actor(folder: Path, killed: list[float]) -> None:
    """Kill one as soon as a quarter of the images are there."""
    while len(list(folder.glob("[0-9]*.png"))) < PROMPTS // 4:
        time.sleep(0.01)
    for process in psutil.Process().children(recursive=True):
        if "MapWorker" in " ".join(process.cmdline()):
            process.kill()
            killed.append(time.time())
            return


def answer(**setting) -> dict:
    rows = make_rows()
    temporary = tempfile.TemporaryDirectory()
    folders = [Path(temporary.name, name) for name in ("loop", "one", "two", "killed")]
    for folder in folders:
        folder.mkdir()
    loop = draw_in_a_loop(rows, folders[0])
    loop = draw_in_a_loop(rows, folders[0])  # with the compiled program on the disk, as for actors
    begin = time.time()
    draw.start_ray(cpus=2)
    ready = time.time() - begin
    one = draw_by_actors(rows, folders[1], actors=1)
    two = draw_by_actors(rows, folders[2], actors=2)
    killed: list[float] = []
    killer = threading.Thread(target=kill_an_actor, args=(folders[3], killed))
    killer.start()
    with_kill = draw_by_actors(rows, folders[3], actors=2)
    killer.join()
    del with_kill["images_per_second"]  # its last worker begins near the end
    with_kill["seconds_after_the_kill"] = time.time() - killed[0]
    for folder in folders:
        assert len(list(folder.glob("[0-9]*.png"))) == PROMPTS, folder
    return {
        "load": statistics.mean(psutil.getloadavg()),
        "seconds_until_ray_is_ready": ready,
        "loop": loop,
        "one_actor": one,
        "two_actors": two,
        "two_actors_one_killed": with_kill,
    }
