"""What is held back is known, and what is not is reported."""

from tools import outdated


def test_what_is_held_back_for_a_reason_is_no_failure(capsys):
    newer = [{"name": "diffusers", "version": "0.39.0", "latest_version": "0.42.1"}]
    assert outdated.report(newer) == 0
    assert "last release with Flax" in capsys.readouterr().out


def test_what_nothing_holds_back_is_reported(capsys):
    newer = [{"name": "pillow", "version": "12.0.0", "latest_version": "13.0.0"}]
    assert outdated.report(newer) == 1
    assert "--upgrade" in capsys.readouterr().out


def test_a_bound_of_the_project_is_named(capsys):
    newer = [{"name": "jax", "version": "0.12.0", "latest_version": "0.99.0"}]
    assert outdated.report(newer) == 1
    assert "pyproject.toml allows <0.13" in capsys.readouterr().out


def test_everything_that_is_held_back_is_locked():
    locked = outdated.locked_versions("3.12")
    assert set(outdated.HELD_BACK) <= set(locked)
