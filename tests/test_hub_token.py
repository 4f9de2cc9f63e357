"""Tokens for the Hub: found on every runtime, sent to the Hub, and shown to nobody."""

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

SECRET = "hf_do_not_show_this"
KAGGLE = """
class BackendError(Exception):
    pass

class UserSecretsClient:
    def get_secret(self, label):
        assert label == "HF_TOKEN"
        {answer}
"""
COLAB = """
class NotebookAccessError(Exception):
    pass

class SecretNotFoundError(Exception):
    pass

def get(name):
    assert name == "HF_TOKEN"
    {answer}
"""
GIVES = f"return {SECRET!r}"
HAS_NONE = "raise BackendError('No user secrets exist for kernel id 1 and label HF_TOKEN.')"
REFUSES = f"raise ConnectionError('no answer for {SECRET}')"


@pytest.fixture(scope="module")
def hub(serve):
    """A Hub that refuses everybody: its address, and the list of the tokens that it was shown."""
    shown = []

    class Refuses(BaseHTTPRequestHandler):
        def do_GET(self):
            shown.append(self.headers.get("Authorization"))
            self.send_response(500)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815  (a name that http.server looks for)

    with serve(Refuses) as address:
        yield address, shown


def write_module(folder: Path, runtime: str, answer: str) -> None:
    """A stand-in for the module that gives a runtime's secrets."""
    if runtime == "Kaggle":
        (folder / "kaggle_secrets.py").write_text(KAGGLE.format(answer=answer))
        return
    colab = folder / "google" / "colab"
    colab.mkdir(parents=True)
    (colab / "__init__.py").touch()
    (colab / "errors.py").write_text("class Error(Exception):\n    pass\n")
    (colab / "userdata.py").write_text(COLAB.format(answer=answer))


@pytest.fixture
def ask_hub(tmp_path, hub):
    """Ask the Hub on such a runtime; what was printed, and the tokens shown."""
    address, shown = hub

    def ask(
        question: str = "HfApi().model_info('owner/model')", **environment: str
    ) -> tuple[str, list[str | None]]:
        code = (
            "import builtins, os, traceback, warnings\n"
            "warnings.simplefilter('default')\n"  # as in a notebook
            "if 'COLAB_RELEASE_TAG' in os.environ:\n"  # by its name, the Hub's client knows Colab
            "    builtins.get_ipython = lambda: 'google.colab._shell.Shell'\n"
            "from helpers.hub_token import has_token\n"
            "print('token:', has_token())\n"
            "from huggingface_hub import HfApi\n"
            f"try:\n    {question}\n"
            "except Exception:\n    traceback.print_exc()\n"
        )
        settings = {
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        settings |= {
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        }
        del shown[:]
        result = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | settings | environment,
            capture_output=True,
            text=True,
        )
        assert result.returncode == 0, result.stderr
        assert SECRET not in result.stdout + result.stderr
        assert SECRET not in "".join(
            p.read_text() for p in (tmp_path / "hf").rglob("*") if p.is_file()
        )
        return result.stdout + result.stderr, list(shown)

    return ask


@pytest.mark.parametrize(
    ("runtime", "variable"), [("Kaggle", "KAGGLE_KERNEL_RUN_TYPE"), ("Colab", "COLAB_RELEASE_TAG")]
)
def test_a_secret_is_shown_to_the_hub_and_to_nobody_else(ask_hub, tmp_path, runtime, variable):
    write_module(tmp_path, runtime, GIVES)
    said, shown = ask_hub(**{variable: "1"})
    assert "token: True" in said
    assert shown
    assert set(shown) == {f"Bearer {SECRET}"}


def test_a_checkpoint_is_asked_for_with_the_secret(ask_hub, tmp_path):
    write_module(tmp_path, "Kaggle", GIVES)
    pick = "from helpers import pick_checkpoint; pick_checkpoint()"
    said, shown = ask_hub(pick, KAGGLE_KERNEL_RUN_TYPE="1", TUTORIAL_CHECKPOINT="owner/model")
    assert "The Hub does not give owner/model at revision 'main'" in said
    assert set(shown) == {f"Bearer {SECRET}"}


def test_the_environment_variable_is_used_on_kaggle_too(ask_hub, tmp_path):
    write_module(tmp_path, "Kaggle", REFUSES)
    said, shown = ask_hub(KAGGLE_KERNEL_RUN_TYPE="1", HF_TOKEN=SECRET)
    assert "token: True" in said
    assert "Kaggle does not give" not in said
    assert set(shown) == {f"Bearer {SECRET}"}


@pytest.mark.parametrize(
    ("runtime", "variable", "answer"),
    [
        ("Kaggle", "KAGGLE_KERNEL_RUN_TYPE", HAS_NONE),
        ("Colab", "COLAB_RELEASE_TAG", "raise SecretNotFoundError"),
        ("Kaggle", "UNRELATED", REFUSES),
    ],
)
def test_without_a_secret_nothing_is_said(ask_hub, tmp_path, runtime, variable, answer):
    write_module(tmp_path, runtime, answer)
    said, shown = ask_hub(**{variable: "1"})
    assert said.startswith("token: False\n")
    assert "secret" not in said.lower()
    assert set(shown) == {None}


def test_kaggles_refusal_is_one_sentence_said_once(ask_hub, tmp_path):
    write_module(tmp_path, "Kaggle", REFUSES)
    said, shown = ask_hub(KAGGLE_KERNEL_RUN_TYPE="1")
    first, *rest = said.splitlines()
    assert first.startswith(
        "Kaggle does not give the secret HF_TOKEN (ConnectionError), so the Hub is asked without"
    )
    assert not any("Kaggle" in line for line in rest)
    assert set(shown) == {None}


def test_colabs_refusal_stays_a_warning(ask_hub, tmp_path):
    write_module(tmp_path, "Colab", "raise NotebookAccessError")
    said, _ = ask_hub(COLAB_RELEASE_TAG="1")
    assert said.count("has not been granted on this notebook") == 1
