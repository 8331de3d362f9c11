"""Exit codes of every process of Forebay: those that start a process read them."""

from __future__ import annotations

from typing import Final

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_REFUSED: Final = 2  # of the command line, the configuration or the checkpoint: starting again would not help
EXIT_INTERRUPTED: Final = 130
