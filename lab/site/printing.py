"""Print a page as a PDF, by Chromium."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
# Chromium's sandbox refuses root, which is who runs in a container.
NO_SANDBOX = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []


def print_page(page: Path, pdf: Path) -> None:
    """Print a page; the PDF lists its headings.

    Raises
    ------
    RuntimeError
        If Chromium cannot; the message has the last that it said.
    """
    with tempfile.TemporaryDirectory() as profile:
        command = [CHROMIUM, "--headless", *NO_SANDBOX, f"--user-data-dir={profile}"]
        command += ["--no-pdf-header-footer", "--generate-pdf-document-outline"]
        command += [f"--print-to-pdf={pdf}", page.resolve().as_uri()]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 or not pdf.exists():
        raise RuntimeError(f"{page} could not be printed: {done.stderr[-500:]}")
