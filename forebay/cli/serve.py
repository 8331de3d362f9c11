"""`forebay serve`: the engine process first, so that it imports its things while we import ours and read the command
line. Hence nothing that takes long to import is imported at the top."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.engine.spawn import spawn


def run(words: Sequence[str]) -> int:
    spawned = None if _asks_for_help(words) else spawn()
    try:
        from forebay.cli.serving import serve_from

        return serve_from(words, spawned)
    finally:
        if spawned is not None:
            spawned.discard()  # which is nothing unless we failed before it was told what to serve


def _asks_for_help(words: Sequence[str]) -> bool:
    return any(word == "-h" or word.startswith("--help") for word in words)
