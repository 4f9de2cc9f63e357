"""Stop with one sentence if the Python that would make the environment is too old or too new."""

import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    sys.exit(
        "Python 3.11, 3.12 or 3.13 is needed, and {} is Python {}.{}: choose one with PYTHON=python3.12, say.".format(
            sys.executable, *sys.version_info[:2]
        )
    )
