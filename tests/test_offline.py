"""Once installed, the course needs no network: the operating system takes it away, and everything works on.

test_execution.py runs every chapter so, workers on two processes among them; other tests build the site and run a
workshop's chapter.
"""

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
    nothing = subprocess.run([sys.executable, "-m", "tools.offline"], cwd=ROOT, capture_output=True)
    assert nothing.returncode == 2


def test_a_system_that_refuses_is_named(monkeypatch, capsys):
    monkeypatch.setattr(offline, "unshare_command", lambda: ["false"])
    monkeypatch.setattr(offline.shutil, "which", lambda _: "/bin/false")
    monkeypatch.setattr(sys, "argv", ["offline.py", "true"])
    assert offline.main() == offline.REFUSED
    assert "allows no network namespace" in capsys.readouterr().err


def test_the_doctor_finds_no_problem_in_a_missing_network(without_network):
    said = without_network([sys.executable, "-m", "course.doctor"], check=False).stdout.decode()
    assert "cannot be reached" in said
    problems = [line for line in said.splitlines() if line.startswith("Problem")]
    assert all("Less than 2 GiB" in problem for problem in problems), said  # which is this machine's business
