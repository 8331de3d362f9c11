"""The entry of `forebay`. It imports nothing else at first, so that Ctrl-C during imports is not a traceback."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # that of `typing`, whose import takes longer than all else here
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; the console script exits with what this returns."""
    try:
        from forebay.cli.commands import run

        return run(arguments)
    except KeyboardInterrupt:
        from forebay.base.exit_codes import EXIT_INTERRUPTED

        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
