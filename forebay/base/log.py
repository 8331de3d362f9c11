"""One line per event, `key=value` with units; nothing per token, no prompts, no keys."""

from __future__ import annotations

import logging
import sys
from typing import Any


def get_logger(name: str) -> logging.Logger:
    """Return the logger `forebay.<name>`."""
    return logging.getLogger(f"forebay.{name}")


def setup_logging(level: str, *, process: str) -> None:
    """Log to standard error; `process` names the writer (`server`, `engine`) on every line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(message)s", "%H:%M:%S"))
    root = logging.getLogger("forebay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False


def event(_name: str, /, **fields: Any) -> str:
    """`event("finished", id=3, ttft_ms=12.5)` -> `finished id=3 ttft_ms=12.5`. Long values are cut, and every value
    stays on one line."""
    return " ".join([_name, *(f"{key}={_clean(value)}" for key, value in fields.items())])


def _clean(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = "".join(ch if ch.isprintable() else "?" for ch in text[:200])
    return f'"{text}"' if " " in text else text
