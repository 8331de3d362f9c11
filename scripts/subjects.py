"""Checks the subjects of new commits: `area: imperative`, at most 72 characters.

python3 scripts/subjects.py            # of all commits since the rule holds
python3 scripts/subjects.py main..     # of a branch
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SINCE: Final = "e285f24540ba4763dac9c63fa5ce6c262f74edb7"
MOST_CHARACTERS: Final = 72
_FORM: Final = re.compile(r"[a-z0-9_.][a-z0-9_ ,/.-]*: (?P<verb>\S+)")
# "adds", "added" and "adding", and not "pass", "embed" or "bring"
_NO_IMPERATIVE: Final = re.compile(r"(?!(embed|feed|need|seed|speed|exceed|proceed|succeed|bring)$).*([^su]s|ed|ing)$")


def wrong(subject: str) -> str:
    """Return what is wrong with a subject; "" if nothing is."""
    if len(subject) > MOST_CHARACTERS:
        return f"{len(subject)} characters: use at most {MOST_CHARACTERS}"
    found = _FORM.match(subject)
    if found is None:
        return "no area: write `area: what the commit does`"
    if _NO_IMPERATIVE.match(found["verb"]):
        return f"{found['verb']!r} is no imperative: write `add`, not `adds` or `added`"
    return ""


def subjects(revisions: str) -> Iterator[tuple[str, str]]:
    """Yield the hash and subject of each commit; none where the history does not reach so far back."""
    done = subprocess.run(
        ["git", "log", "--no-merges", "--format=%h %s", revisions],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    for line in done.stdout.splitlines():
        commit, _, subject = line.partition(" ")
        yield commit, subject


def main(words: list[str]) -> int:
    found = [
        (commit, subject, why)
        for commit, subject in subjects(words[0] if words else f"{SINCE}..")
        if (why := wrong(subject))
    ]
    for commit, subject, why in found:
        print(f"{commit} {subject}\n    {why}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
