"""One line per event, `key=value` with units, or one JSON object; nothing per token, no prompts, no keys."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Mapping
from enum import StrEnum
from types import TracebackType
from typing import Any, Final

from forebay.base.json_lines import as_line, rfc3339
from forebay.base.relay import Relay

_LONGEST: Final = 200  # characters of a value


class LogFormat(StrEnum):
    """How a line is written."""

    TEXT = "text"
    JSON = "json"


def get_logger(name: str) -> logging.Logger:
    """Return the logger `forebay.<name>`."""
    return logging.getLogger(f"forebay.{name}")


def setup_logging(level: str, *, process: str, format: str = LogFormat.TEXT) -> None:
    """Log to standard error; `process` names the writer (`server`, `engine`) on every line.

    With the format `json`, everything that this process reports becomes objects: also the lines of libraries, warnings
    and uncaught exceptions.
    """
    relay = Relay.running
    handler = logging.StreamHandler(sys.stderr if relay is None else relay.stream)
    root = logging.getLogger("forebay")
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    if format != LogFormat.JSON:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname).1s {process} %(message)s", "%H:%M:%S"))
        return
    handler.setFormatter(JsonFormatter(process))
    everything = logging.getLogger()
    everything.handlers[:] = [handler]
    everything.setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    _report_uncaught(root)


class Event(str):
    """The line of an event for people, with its name and fields for programs."""

    name: str
    fields: Mapping[str, Any]


def event(_name: str, /, **fields: Any) -> Event:
    """`event("finished", id=3, ttft_ms=12.5)` -> `finished id=3 ttft_ms=12.5`. Long values are cut, and every value
    stays on one line."""
    line = Event(" ".join([_name, *(f"{key}={_clean(value)}" for key, value in fields.items())]))
    line.name, line.fields = _name, fields
    return line


def _clean(value: Any, quote: str = '"') -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    text = "".join(ch if ch.isprintable() else "?" for ch in text[:_LONGEST])
    return f"{quote}{text}{quote}" if " " in text else text


class JsonFormatter(logging.Formatter):
    """Writes a record as one JSON object: `ts`, `level`, `process`, `event`, then the event's fields with their types.

    An event's `id` is `request_id`. A field says no more than its text: texts are cut, floats have four digits. A line
    that is not an event is the event `message`, with its `logger` and `text`. An exception is the field `traceback`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record, without its end."""
        line: dict[str, Any] = {
            "ts": rfc3339(record.created),
            "level": record.levelname.lower(),
            "process": self._process,
        }
        if isinstance(record.msg, Event):
            line["event"] = record.msg.name
            line |= {"request_id" if key == "id" else key: _plain(value) for key, value in record.msg.fields.items()}
        else:
            line |= {"event": "message", "logger": record.name, "text": record.getMessage()}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return as_line(line)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        rounded = float(f"{value:.4g}")
        return rounded if abs(rounded) < float("inf") else str(rounded)  # JSON has no inf and no nan
    return _clean(value, quote="")


def _report_uncaught(log: logging.Logger) -> None:
    """Log exceptions that nothing caught, in place of Python's own printing."""

    def at_top(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        log.critical(event("uncaught", kind=kind.__name__), exc_info=(kind, error, trace))

    def in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and args.exc_type is not SystemExit:
            name = args.thread.name if args.thread is not None else "unknown"
            log.critical(
                event("uncaught", kind=args.exc_type.__name__, thread=name),
                exc_info=(args.exc_type, args.exc_value, args.exc_traceback),
            )

    def while_collected(args: sys.UnraisableHookArgs) -> None:
        log.error(event("uncaught", kind=args.exc_type.__name__, at=args.object), exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = at_top, in_thread, while_collected
