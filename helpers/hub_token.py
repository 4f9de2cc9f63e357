"""A token for the Hugging Face Hub, from wherever this runtime holds it, and never printed."""

import functools
import os
import re
import warnings

from huggingface_hub import get_token

TOKEN = "HF_TOKEN"  # what the environment variable is called, and the secret on Colab and Kaggle


def has_token() -> bool:
    """Let the Hub's client have the token that this runtime holds, and say whether there is one.

    Builds on ``huggingface_hub.get_token``, which reads Colab's secret ``HF_TOKEN``, the
    environment variable of that name and the file that ``hf auth login`` writes, but knows nothing
    of Kaggle's secrets: these are handed to it in the environment variable, which ends with the
    kernel.
    """
    _take_kaggle_secret()
    with warnings.catch_warnings():
        # To have no secret is no mistake. If Colab refuses to give one, that stays a warning.
        warnings.filterwarnings("ignore", message=f"\nThe secret `{TOKEN}` does not exist")
        return bool(get_token())


def without_passwords(text: str) -> str:
    """Return a text whose addresses have "…" in place of a user's name and password.

    >>> without_passwords("https://me:secret@hub.example.com/models")
    'https://…@hub.example.com/models'
    """
    return re.sub(r"(?<=//)[^/\s]*@", "…@", text)


@functools.cache  # asking goes over the network, and a failure is worth one sentence, not several
def _take_kaggle_secret() -> None:
    """Put Kaggle's secret, if there is one, into the environment variable."""
    if os.environ.get(TOKEN) or "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        return
    try:
        from kaggle_secrets import UserSecretsClient

        os.environ[TOKEN] = UserSecretsClient().get_secret(TOKEN) or ""
    except Exception as error:  # the module has exceptions of its own
        # Kaggle's own code, too, knows a secret that is missing or not attached by this text only.
        if "No user secrets exist" not in str(error):
            print(
                f"Kaggle does not give the secret {TOKEN} ({type(error).__name__}), so the Hub is "
                "asked without a token: switch on the internet, and attach the secret under "
                "Add-ons > Secrets."
            )
