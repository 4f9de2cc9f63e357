"""Ask a service for known vulnerabilities of the locked packages, and say which of them do not bite and why.

``make audit`` runs this, and so does ``make test`` where the service can be reached. The exit status is 1 if there is a
finding without a reason below.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.lock import LOCK

SERVICE = "https://api.osv.dev/v1/query"
# Found by pip-audit in transformers 4.57.6, the last with Flax models; only versions from 5 on mend them. A test checks
# what these reasons say about this repository.
KNOWN = {
    "transformers": {
        "CVE-2025-14929": "it is in a script that converts X-CLIP checkpoints, which the wheel does not have",
        "CVE-2026-1839": "Trainer unpickles its random state: nothing here uses Trainer, and no torch is locked",
        "CVE-2026-4372": "PyTorch models fetch the attention code that a configuration names, through the package "
        "kernels: neither torch nor kernels is locked",
        "CVE-2026-5241": "LightGlue takes trust_remote_code from a downloaded configuration: a PyTorch model, and no "
        "torch is locked",
        "CVE-2026-9856": "save_pretrained writes the chat templates of a downloaded tokenizer to paths that they name: "
        "nothing here saves a tokenizer that it did not make",
        "CVE-2026-80047": "generate(custom_generate=...) stores a repository's code before it asks: nothing here "
        "generates text",
    },
}


@dataclass(frozen=True)
class Finding:
    """A known vulnerability of a locked package."""

    package: str
    version: str
    names: tuple[str, ...]  # of the same vulnerability in the several lists
    mended_in: tuple[str, ...]

    @property
    def reason(self) -> str | None:
        """Why it does not bite here, if that is known."""
        known = KNOWN.get(self.package, {})
        return next((known[name] for name in self.names if name in known), None)


def can_reach(service: str = SERVICE) -> bool:
    try:
        urlopen(service, timeout=10).close()
    except HTTPError:
        return True  # it answers, if only that it wants a question
    except OSError:
        return False
    return True


def find(lock: Path = LOCK, service: str = SERVICE) -> list[Finding]:
    """What pip-audit finds in a lock, for the Python that runs this; every requirement needs its hashes."""
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(lock), "--require-hashes", "--disable-pip"]
    command += ["--vulnerability-service", "osv", "--osv-url", service, "--format", "json", "--progress-spinner", "off"]
    result = subprocess.run(command, capture_output=True, text=True)
    try:
        packages = json.loads(result.stdout)["dependencies"]
    except ValueError:
        raise RuntimeError(f"pip-audit failed: {result.stderr.strip()}") from None
    if unread := [f"{package['name']} ({package['skip_reason']})" for package in packages if "skip_reason" in package]:
        raise RuntimeError(f"pip-audit could not look up {', '.join(unread)}.")
    return [
        Finding(
            package["name"],
            package["version"],
            tuple(sorted({vulnerability["id"], *vulnerability["aliases"]})),
            tuple(vulnerability["fix_versions"]),
        )
        for package in packages
        for vulnerability in package["vulns"]
    ]


def report(findings: list[Finding]) -> int:
    """Print what was found; the number of findings that nothing explains."""
    for finding in findings:
        what = finding.reason or f"NO REASON KNOWN; mended in {', '.join(finding.mended_in) or 'no release'}"
        print(f"{finding.package} {finding.version}, {' = '.join(finding.names)}: {what}")
    unexplained = sum(finding.reason is None for finding in findings)
    print(f"{len(findings)} known vulnerabilities, {unexplained} of them without a reason why they do not bite.")
    return unexplained


if __name__ == "__main__":
    if not can_reach():
        sys.exit(f"{SERVICE} cannot be reached, so nothing can be said about vulnerabilities.")
    sys.exit(report(find()) > 0)
