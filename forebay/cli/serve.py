"""`forebay serve`: the words first, which take a tenth of a second; then the engine process, so that it imports its
things while we import ours. Hence nothing that takes long to import is imported at the top."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.cli.arguments import Parsed, Parser
from forebay.engine.lifecycle.spawn import spawn


def run(words: Sequence[str]) -> int:
    """Spawn the engine process, then serve until a signal; return the exit code."""
    parsed = parse(words)
    spawned = None if "pd" in parsed.flags else spawn()  # with --pd others have engines; set elsewhere, one is in vain
    try:
        from forebay.cli.serving import serve_from

        return serve_from(parsed, spawned)
    finally:
        if spawned is not None:
            spawned.discard()  # which is nothing unless we failed before it was told what to serve


def parse(words: Sequence[str]) -> Parsed:
    """Parse the words of `forebay serve`; exits on --help."""
    return make_parser().parse(words)


def make_parser() -> Parser:
    """Return the parser of `forebay serve`, which also accepts flags of other engines."""
    parser = Parser("serve", "Serve a model over HTTP; without MODEL the embedded one.", "[MODEL] [options]")
    parser.engine_flags(server=True, model_is_positional=True)
    parser.accept_foreign()
    return parser
