"""`forebay verify`: of an engine that it starts here, with `--url` of a server that runs anywhere, or with
`--receipt` of one answer."""

from __future__ import annotations

from collections.abc import Sequence


def run(words: Sequence[str]) -> int:
    """Run the verification that the words ask for, and return its exit code. That of a server or of an answer imports
    no engine."""
    if any(word.partition("=")[0] == "--receipt" for word in words):
        from forebay.cli.verify_receipt import run as verify_receipt

        return verify_receipt(words)
    if any(word == "--url" or word.startswith("--url=") for word in words):
        from forebay.cli.verify_url import run as verify_url

        return verify_url(words)
    from forebay.cli.verify_engine import run as verify_engine

    return verify_engine(words)
