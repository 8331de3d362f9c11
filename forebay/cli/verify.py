"""`forebay verify`: of an engine that it starts here, or, with `--url`, of a server that runs anywhere."""

from __future__ import annotations

from collections.abc import Sequence


def run(words: Sequence[str]) -> int:
    """Run the verification that the words ask for; that of a server imports no engine. Return its exit code."""
    if any(word == "--url" or word.startswith("--url=") for word in words):
        from forebay.cli.verify_url import run as verify_url

        return verify_url(words)
    from forebay.cli.verify_engine import run as verify_engine

    return verify_engine(words)
