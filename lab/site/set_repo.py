"""Say where the course lives: ``make set-repo REPO=owner/name``.

Puts the repository's name in the place of the one that pyproject.toml has, in every file that git
tracks: setup cells, links, ``environment.yml``. Until the course is published, that is a
placeholder; give it as the name to take a repository's name out again. With ``--check`` nothing
is written: it fails unless the course names this repository, as it must before it is published.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GITHUB = "https://github.com/"
PLACEHOLDER = "/".join(("OWNER", "COURSE"))  # in two parts, so that this line is never replaced
# What a repository's name stands behind in an address; elsewhere it is a word by itself.
BEFORE = r"(?:(?<=github\.com/)|(?<=/github/)|(?<=/gh/)|(?<![\w./-]))"


def stamped_repository() -> str:
    """The repository's name, or the placeholder, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["urls"]["Repository"].removeprefix(GITHUB)


def replace_name(text: str, old: str, new: str) -> tuple[str, int]:
    """Return a text with one repository's name in the place of another, and how often it changed.

    Only whole names are replaced: that of ``me/course`` stays as it is in ``name/course`` and in
    ``me/course-2``.

    >>> replace_name("https://github.com/me/course.git, some/course", "me/course", "you/course")
    ('https://github.com/you/course.git, some/course', 1)
    """
    return re.subn(rf"{BEFORE}{re.escape(old)}(?![\w-])", lambda _: new, text)


def launch_links(repository: str, chapter: str) -> list[tuple[str, str]]:
    """Where a chapter's file can be opened, by name and address."""
    path = f"{repository}/blob/main/notebooks/{chapter}"
    return [
        ("Colab", f"https://colab.research.google.com/github/{path}"),
        ("Kaggle", f"https://kaggle.com/kernels/welcome?src={GITHUB}{path}"),
        ("Binder", f"https://mybinder.org/v2/gh/{repository}/main?labpath=notebooks/{chapter}"),
    ]


def site_address(repository: str) -> str:
    """Where GitHub publishes a repository's site.

    >>> site_address("me/course"), site_address("me/me.github.io")
    ('https://me.github.io/course/', 'https://me.github.io/')
    """
    owner, name = repository.split("/")
    host = f"{owner.lower()}.github.io"
    return f"https://{host}/" if name.lower() == host else f"https://{host}/{name}/"


def read_tracked() -> dict[Path, str]:
    """Return the texts that git tracks, by their files, with their own ends of lines."""
    try:
        tracked = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout
        reason = "it tracks none of them"
    except (OSError, subprocess.CalledProcessError) as error:  # there is no Git, or no repository
        tracked = ""
        reason = (getattr(error, "stderr", None) or str(error)).strip()
    if not tracked:
        sys.exit(
            f"Git does not say which files of {ROOT} are the course's ({reason}): clone the course "
            "by Git, and start the same there."
        )
    texts = {}
    for name in filter(None, tracked.split("\0")):
        file = ROOT / name
        if not file.is_file() or file.is_symlink():  # removed, or another repository's
            continue
        try:
            texts[file] = file.read_bytes().decode()
        except UnicodeDecodeError:  # a picture, or weights
            continue
    return texts


def main() -> None:
    old = stamped_repository()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "repository", nargs="?", default=old, help='"owner/name" on GitHub; by default, it stays'
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it changes")
    options = parser.parse_args()
    new = options.repository
    if not re.fullmatch(r"[A-Za-z0-9-]+/[A-Za-z0-9._-]+", new):
        parser.error(
            f'{new!r} is not a repository: give it as "owner/name", without https:// and github.com'
        )
    if options.check:
        if new.lower() != old.lower():  # GitHub tells no capital letters apart
            sys.exit(
                f"The course says that it lives in {old}, and this is {new}: run "
                f"`make set-repo REPO={new}`, commit what it changes, and push that."
            )
        return
    texts = read_tracked()
    if new not in (old, PLACEHOLDER):
        others = [str(file) for file, text in texts.items() if replace_name(text, new, "")[1]]
        if others:
            parser.error(
                f"{', '.join(others[:3])} already name {new}, as a place of somebody else's: give "
                "the repository of this course"
            )
    named = 0
    for file, before in texts.items():
        after, times = replace_name(before, old, new)
        named += times > 0
        # A new pyproject.toml, even with the same text, would make `make` install again.
        if after != before:
            file.write_text(after, encoding="utf-8", newline="")
    print(f"{named} files name the repository {new}.")


if __name__ == "__main__":
    main()
