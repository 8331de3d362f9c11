"""`forebay serve`: the engine process first, so that it imports its things while we import ours and read the command
line. Hence nothing that takes long to import is imported at the top."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.engine.spawn import spawn


def run(words: Sequence[str]) -> int:
    spawned = None if _has_no_engine(words) else spawn()
    try:
        from forebay.cli.serving import serve_from

        return serve_from(words, spawned)
    finally:
        if spawned is not None:
            spawned.discard()  # which is nothing unless we failed before it was told what to serve


def _has_no_engine(words: Sequence[str]) -> bool:
    """Of its own: with --pd others have them. Where that is set elsewhere one is started for nothing."""
    return any(word == "-h" or word.startswith(("--help", "--pd", "--describe")) for word in words)
