"""Processes that draw: what comes out, and what happens when something goes wrong.

Chapter 10 has two of them draw together, kills one, and lets a single one go on: it compares the
images bit for bit, and test_execution.py looks at what is printed.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from PIL import Image

from course.hosts import launch as launcher
from course.hosts import worker
from course.hosts.launch import launch

# One more round than four devices can fill.
PROMPTS = [
    f"a large {color} {shape} on a white background"
    for color in ("red", "blue")
    for shape in ("heart", "star")
]
PROMPTS += ["a small purple moon on a pink background", "a large orange cross on a blue background"]
PROMPTS += ["a medium yellow circle on a black background"]
NAMES = [worker.image_name(index) for index in range(len(PROMPTS))]
DEVICES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many-hosts")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


@pytest.fixture(scope="module")
def environment(folder):
    """Programs that one run has compiled, the next need not compile again."""
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}


def run(*command, env) -> subprocess.CompletedProcess:
    """Run Python; what it prints, errors and all, is in ``stdout``."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )


def launch_worker(folder, out, env, processes=1, devices=DEVICES):
    start = ("-m", "course.hosts.launch", "-n", processes, "--devices", devices)
    limit = ("--time-limit", 500)
    program = ("-m", "course.hosts.worker", "--prompts", folder / "prompts.txt", "--out", out)
    return run(*start, *limit, "--", *program, env=env)


def left_over(text: str) -> list[psutil.Process]:
    """Processes that have a text in their command lines."""
    return [
        p for p in psutil.process_iter(["cmdline"]) if text in " ".join(p.info["cmdline"] or [])
    ]


def snapshot(out: Path) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder: its contents, and when they were written."""
    return {
        file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in sorted(out.iterdir())
    }


def read_image(file: Path):
    with Image.open(file) as image:
        return np.asarray(image), image.info


@pytest.fixture(scope="module")
def full_disk(folder, environment):
    """One process finds no room for its second image."""
    out = folder / "images"
    out.mkdir()
    (out / f".{NAMES[1]}.part").symlink_to("/dev/full")
    result = launch_worker(folder, out, environment)
    return result, out, snapshot(out)


def test_a_full_disk_is_reported_and_loses_nothing(full_disk):
    result, _, files = full_disk
    assert result.returncode == 1
    assert f"{NAMES[1]} cannot be written (No space left on device)" in result.stdout, result.stdout
    assert "[launch] process 0" in result.stdout and "ended with status 1" in result.stdout
    assert "Traceback" not in result.stdout
    assert sorted(files) == NAMES[:1]


@pytest.fixture(scope="module")
def finished(folder, environment, full_disk):
    """One process does the rest; nobody tells it where the others are, but Slurm's variables do."""
    _, out, before = full_disk
    slurm = {
        "SLURM_JOB_ID": str(os.getpid()),  # JAX makes the port from it
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_NUM_NODES": "1",
    }
    alone = environment | slurm | {"JAX_PLATFORMS": "cpu", "TUTORIAL_DEVICES": str(DEVICES)}
    files = ("--prompts", folder / "prompts.txt", "--out", out)
    result = run("-m", "course.hosts.worker", *files, env=alone)
    assert result.returncode == 0, result.stdout
    return result.stdout, out, before


def test_a_restart_draws_what_is_missing_and_nothing_twice(finished):
    output, out, before = finished
    after = snapshot(out)
    assert sorted(after) == NAMES
    assert all(after[name] == file for name, file in before.items())
    assert f"{len(PROMPTS)} prompt(s), {len(before)} drawn already; 2 round(s) to go" in output
    assert f"on {DEVICES} device(s) of 1 process(es)" in output
    assert "6 of 6 image(s) written" in output, "what fills the last round is not written"


def test_each_image_says_what_it_shows_and_who_drew_it(finished, checkpoint):
    keys = worker.image_keys(0, range(len(PROMPTS)))
    for index, name in enumerate(NAMES):
        pixels, info = read_image(finished[1] / name)
        assert pixels.shape == (checkpoint.height, checkpoint.width, 3)
        assert info["prompt"] == PROMPTS[index]
        assert info["key"] == f"{keys[index][0]} {keys[index][1]}"
        device = max(index - 1, 0) % DEVICES  # the first image was there when the rest began
        assert info["device"].endswith(f" {device} of process 0")


def test_a_folder_that_cannot_be_written_is_reported_at_once(folder, environment):
    out = folder / "prompts.txt" / "out"
    result = launch_worker(folder, out, environment, processes=2, devices=1)
    assert result.returncode == 1
    assert "Images cannot be written to" in result.stdout, result.stdout
    assert "give a different --out" in result.stdout
    assert "[launch] process" in result.stdout and "ended with status 1" in result.stdout
    assert "Traceback" not in result.stdout


def test_a_worker_that_waits_in_vain_says_so_in_the_time_set(folder):
    """Of two processes only one comes, be it the first or the second."""
    waiting = []
    for number in (0, 1):
        address = f"127.0.0.1:{launcher.free_port()}"
        command = [sys.executable, "-m", "course.hosts.worker", "--prompts=x", "--out=x"]
        command += [f"--coordinator={address}", "--processes=2", f"--process-id={number}"]
        command += ["--start-timeout=2"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        waiting.append((number, address, process))
    for number, address, process in waiting:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 1
        assert f"Process {number} of 2 waited 2 s for the others at {address}" in output, output
        assert "Check failure" not in output


def test_without_a_cluster_the_worker_says_what_to_give():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    result = run("-m", "course.hosts.worker", "--prompts=x", "--out=x", env=environment)
    assert result.returncode == 1
    assert "JAX finds no cluster here" in result.stdout, result.stdout
    assert "course.hosts.launch" in result.stdout


def test_a_key_follows_from_the_seed_and_the_index_alone():
    keys = worker.image_keys(0, range(DEVICES))
    assert len({tuple(key) for key in keys}) == DEVICES
    assert np.array_equal(worker.image_keys(0, [3])[0], keys[3])
    assert not np.array_equal(worker.image_keys(1, [3])[0], keys[3])


@pytest.mark.parametrize(
    ("contents", "message"),
    [(None, "cannot be read"), (b"\n  \n", "no prompts in"), (b"a caf\xe9", "cannot be read")],
)
def test_prompts_that_cannot_be_had_are_refused(tmp_path, contents, message):
    if contents is not None:
        (tmp_path / "prompts.txt").write_bytes(contents)
    with pytest.raises(RuntimeError, match=message):
        worker.read_prompts(tmp_path / "prompts.txt")


def test_images_of_other_work_are_not_taken_for_ones_own(tmp_path, checkpoint):
    mine = worker.describe(["a red heart", "a blue star"], 0, checkpoint)
    worker.write_image(tmp_path / NAMES[0], np.zeros((8, 8, 3), np.uint8), mine[0])
    assert worker.find_missing(tmp_path, mine) == [1]
    for other in (
        worker.describe(["a green ring"], 0, checkpoint),
        worker.describe(["a red heart"], 1, checkpoint),
    ):
        with pytest.raises(RuntimeError, match="is there already with the"):
            worker.find_missing(tmp_path, other)
    (tmp_path / NAMES[1]).write_bytes(b"no image")
    with pytest.raises(RuntimeError, match=r"00001\.png is not an image"):
        worker.find_missing(tmp_path, mine)


def test_a_prompt_in_any_script_survives_in_the_image(tmp_path):
    description = {"prompt": "ein grünes Herz, 赤い星"}
    worker.write_image(tmp_path / NAMES[0], np.zeros((8, 8, 3), np.uint8), description)
    assert read_image(tmp_path / NAMES[0])[1]["prompt"] == description["prompt"]


# The launcher alone, with programs that need no JAX.


def test_the_launcher_tells_each_process_where_to_meet(capsys):
    assert launch(["-c", "import sys; print(*sys.argv[1:])"], processes=3) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    (address,) = {re.search(r"--coordinator=(127\.0\.0\.1:\d+) ", line).group(1) for line in lines}
    assert lines == [
        f"[{k}] --coordinator={address} --processes=3 --process-id={k}" for k in range(3)
    ]


def test_processes_have_the_same_number_of_threads_however_the_devices_are_grouped(capsys):
    code = "import os; print(os.environ['NPROC'])"
    for processes, devices in ((2, 32), (1, 64)):
        assert launch(["-c", code], processes, devices) == 0
    printed = {line.split()[-1] for line in capsys.readouterr().out.splitlines()}
    assert printed == {str(max(64, os.cpu_count()))}


def test_the_launcher_names_a_program_that_fails_and_shows_its_last_words(capsys):
    code = "import sys, time\nif sys.argv[-1] == '--process-id=1':\n    sys.exit('no luck')\n"
    assert launch(["-c", code + "time.sleep(60)"]) == 1
    output = capsys.readouterr().out
    assert "[1] no luck" in output
    assert re.search(r"\[launch\] process 1 \(pid \d+\) ended with status 1\n", output)
    assert "[launch] stopping process 0" in output


def test_the_launcher_kills_what_does_not_stop_by_itself(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "GRACE", 0.2)
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    assert launch(["-c", stubborn, str(tmp_path)], time_limit=2) == 1
    assert "the time limit of 2 s is over" in capsys.readouterr().out
    assert left_over(str(tmp_path)) == []


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_launcher_stops_its_processes_when_it_is_stopped(number, status, tmp_path):
    sleep = "print('up'); import time; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-m", "course.hosts.launch", "--", "-c", sleep, str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[0] up\n", "[1] up\n"]
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == status, output
    assert "Traceback" not in output
    assert left_over(str(tmp_path)) == []


def test_the_launcher_stops_its_processes_when_a_notebook_is_interrupted(tmp_path):
    manager, client = start_new_kernel(extra_arguments=["--log-level=ERROR"])
    try:
        cell = "from course.hosts.launch import launch\n"
        cell += f"launch(['-c', \"print('up'); import time; time.sleep(60)\", {str(tmp_path)!r}])"
        request, printed = client.execute(cell), ""
        while not ("[0] up" in printed and "[1] up" in printed):
            message = client.get_iopub_msg(timeout=120)
            assert message["msg_type"] != "error", message["content"]
            printed += message["content"].get("text", "")
        manager.interrupt_kernel()
        while (reply := client.get_shell_msg(timeout=60))["parent_header"]["msg_id"] != request:
            pass
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        assert left_over(str(tmp_path)) == []
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_processes_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    """It cannot stop them then; but they notice when they next print."""
    talking = "import time\nwhile True:\n    print('still here'); time.sleep(0.1)"
    command = [sys.executable, "-m", "course.hosts.launch", "--", "-c", talking, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.kill()
    process.communicate(timeout=60)
    while left_over(str(tmp_path)):  # the test would never end if they did not
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to run"),
        (["-n", "0", "--", "x.py"], "processes is 0"),
        (["x.py"], "put -- before the program"),
    ],
)
def test_the_launcher_refuses_what_makes_no_sense(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", *arguments])
    with pytest.raises(SystemExit):
        launcher.main()
    assert message in capsys.readouterr().err
