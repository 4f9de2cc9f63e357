"""Scripts that a chapter runs on simulated devices, and errors that it shows on purpose."""

import pytest

from helpers.errors import show_error
from helpers.scripts import run_simulated, run_together


def test_a_script_sees_as_many_devices_as_were_asked_for(tmp_path, capsys):
    script = tmp_path / "count.py"
    script.write_text("import jax\nprint(jax.default_backend(), jax.device_count())\n")
    run_simulated(script, devices=3)
    assert capsys.readouterr().out == "cpu 3\n"


@pytest.mark.parametrize(
    ("run", "counts"),
    [(run_simulated, {"devices": 100_000}), (run_together, {"processes": 10_000})],
)
def test_more_devices_than_a_machine_can_start_are_refused(run, counts, tmp_path):
    with pytest.raises(ValueError, match=r"devices is .* must be a whole number from 1 to 1024"):
        run(tmp_path / "never.py", **counts)


def test_a_script_that_fails_says_why(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no such shape')\n")
    with pytest.raises(RuntimeError, match=r"broken\.py failed:(.|\n)*no such shape"):
        run_simulated(script)


def test_processes_that_run_together_say_how_they_ended(tmp_path, capsys):
    script = tmp_path / "one_fails.py"
    script.write_text(
        "import sys\nprint('here')\nif sys.argv[2] == '1':\n    sys.exit('no luck')\n"
    )
    assert run_together(script) == [0, 1]
    assert capsys.readouterr().out == "[0] here\n[1] here\n[1] no luck\n"


def test_an_error_that_was_meant_is_printed(capsys):
    with show_error(ValueError):
        raise ValueError("too short")
    assert capsys.readouterr().out == "Meant to fail. ValueError: too short\n"


def test_an_error_of_another_kind_is_raised():
    with pytest.raises(TypeError, match="no number"), show_error(ValueError):
        raise TypeError("no number")


def test_a_block_that_does_not_fail_is_a_mistake():
    with pytest.raises(AssertionError, match="meant to fail"), show_error(ValueError):
        pass
