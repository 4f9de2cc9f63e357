"""Once installed, the course needs no network: the operating system takes it away, and everything works on."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from tools import offline

ROOT = Path(__file__).resolve().parents[1]


def test_outside_is_out_of_reach_and_the_machine_itself_is_not(without_network):
    connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5)"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = ["127.0.0.1", str(server.getsockname()[1])]
        # Here the server answers; in there, the same address is another machine's, so to speak.
        subprocess.run([sys.executable, "-c", connect, *address], check=True)
        assert b"refused" in without_network([sys.executable, "-c", connect, *address], check=False).stderr
    # An address that is reserved for documentation: with any network, this would take until the timeout.
    nowhere = without_network([sys.executable, "-c", connect, "192.0.2.1", "80"], check=False)
    assert b"unreachable" in nowhere.stderr
    talk = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
    without_network([sys.executable, "-c", talk])


def test_a_missing_command_and_a_failing_one_are_told_apart(without_network):
    assert without_network(["false"], check=False).returncode == 1
    nothing = subprocess.run([sys.executable, ROOT / "tools" / "offline.py"], capture_output=True)
    assert nothing.returncode == 2


def test_a_system_that_refuses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(offline, "unshare_command", lambda: ["false"])
    monkeypatch.setattr(offline.shutil, "which", lambda _: "/bin/false")
    monkeypatch.setattr(sys, "argv", ["offline.py", "true"])
    assert offline.main() == offline.REFUSED
    assert "allows no network namespace" in capsys.readouterr().err


def test_the_doctor_finds_no_problem_in_a_missing_network(without_network):
    said = without_network([sys.executable, "-m", "helpers.doctor"], check=False).stdout.decode()
    assert "cannot be reached" in said
    problems = [line for line in said.splitlines() if line.startswith("Problem")]
    assert all("Less than 2 GiB" in problem for problem in problems), said  # which is this machine's business


def test_chapters_run(executed_offline):
    for name in ("02_bf16_loading", "04_jit_pipeline"):
        notebook = json.loads((executed_offline / f"{name}.ipynb").read_text())
        assert all(cell["execution_count"] for cell in notebook["cells"] if cell["cell_type"] == "code")


def test_a_worker_on_two_processes_runs(without_network, tmp_path):
    (tmp_path / "prompts.txt").write_text("a small red heart on a white background")
    worker = ["-m", "helpers.worker", "--prompts", str(tmp_path / "prompts.txt"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "helpers.launch", "-n", "2", "--devices", "1", "--", *worker]
    without_network(command, env=os.environ | {"TUTORIAL_CHECKPOINT": "shapes-sd"})
    assert (tmp_path / "out" / "00000.png").exists()
