"""Where a token for the Hugging Face Hub comes from. It is never printed, and never written to a file or a notebook."""

import functools
import os
import warnings
from pathlib import Path

from huggingface_hub import constants, get_token

TOKEN = "HF_TOKEN"  # what the environment variable is called, and the secret on Colab and Kaggle


def find_token() -> str | None:
    """Let the Hub's client have the token that this runtime holds, and say in words where it was found.

    Builds on ``huggingface_hub.get_token``, which reads Colab's secret ``HF_TOKEN``, the environment variable of that
    name and the file that ``hf auth login`` writes, but knows nothing of Kaggle's secrets: these are handed to it in
    the environment variable, which ends with the kernel.

    Returns
    -------
    str or None
        The place, never the token; None where there is no token, which public models do not need.
    """
    from_kaggle = _take_kaggle_secret()
    with warnings.catch_warnings():
        # To have no secret is no mistake, and Colab's refusal to give one stays a warning.
        warnings.filterwarnings("ignore", message=f"\nThe secret `{TOKEN}` does not exist")
        token = get_token()
    if not token:
        return None
    if token in (os.environ.get(name, "").strip() for name in (TOKEN, "HUGGING_FACE_HUB_TOKEN")):
        return f"Kaggle's secret {TOKEN}" if from_kaggle else f"the environment variable {TOKEN}"
    file = Path(constants.HF_TOKEN_PATH)
    if file.is_file() and file.read_text().strip() == token:
        return f"the file {file}"
    return f"Colab's secret {TOKEN}"


@functools.cache  # asking is a request over the network, and its failure is worth one sentence, not several
def _take_kaggle_secret() -> bool:
    if os.environ.get(TOKEN) or "KAGGLE_KERNEL_RUN_TYPE" not in os.environ:
        return False
    try:
        from kaggle_secrets import UserSecretsClient

        token = UserSecretsClient().get_secret(TOKEN)
    except Exception as error:  # the module has exceptions of its own
        # The only sign by which Kaggle's own code, too, knows a secret that is missing or not attached.
        if "No user secrets exist" not in str(error):
            print(
                f"Kaggle does not give the secret {TOKEN} ({type(error).__name__}), so the Hub is asked without a "
                "token: switch on the internet, and attach the secret under Add-ons > Secrets."
            )
        return False
    os.environ[TOKEN] = token or ""
    return bool(token)
