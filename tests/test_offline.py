"""Once installed, the course needs no network.

``make test`` takes it away from the chapters; tests of the site build it and run a chapter so.
"""

import sys


def test_the_doctor_finds_no_problem_in_a_missing_network(without_network):
    said = without_network([sys.executable, "-m", "course.doctor"], check=False).stdout.decode()
    assert "cannot be reached" in said
    problems = [line for line in said.splitlines() if line.startswith("Problem")]
    # How much memory this machine has is its own business.
    assert all("Less than 2 GiB" in problem for problem in problems), said
