"""Look the locked packages up in the lists of known vulnerabilities: ``make audit``.

pip-audit prints those that nothing below explains, and exits with 1 if there are any, or if it cannot look them up.
Further arguments are passed on to it.
"""

import subprocess
import sys

from tools.lock import LOCK

# All in transformers 4.57.6, the last with Flax models; only versions from 5 on mend them. A test checks what these
# reasons say about this repository.
EXPLAINED = (
    "CVE-2025-14929",  # in a script that converts X-CLIP checkpoints, which the wheel does not have
    "CVE-2026-1839",  # Trainer unpickles its random state: nothing here uses Trainer, and no torch is locked
    # PyTorch models fetch the attention code that a configuration names, by the package kernels: neither is locked.
    "CVE-2026-4372",
    # LightGlue takes trust_remote_code from a downloaded configuration: a PyTorch model, and no torch is locked.
    "CVE-2026-5241",
    # save_pretrained writes the chat templates of a downloaded tokenizer to paths that they name: nothing here saves a
    # tokenizer that it did not make.
    "CVE-2026-9856",
    "CVE-2026-80047",  # generate(custom_generate=...) stores a repository's code unasked: nothing here generates text
)


def main() -> int:
    """Run pip-audit; its exit status."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(LOCK), "--require-hashes", "--disable-pip"]
    command += ["--strict", "--vulnerability-service", "osv", "--progress-spinner", "off"]
    command += [argument for name in EXPLAINED for argument in ("--ignore-vuln", name)]
    return subprocess.run([*command, *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
