"""The lines that `forebay serve` prints once it is ready: its address, its API and model, the requests that fit, and
the settings that the memory lowered. With --report also the table: memory planned against actual, then the settings
with their reasons."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from forebay.base.log import event, get_logger
from forebay.base.relay import Relay
from forebay.base.streams import give_up_stdout
from forebay.base.units import human_bytes
from forebay.config.config import SETTINGS, Config, ServerConfig, Setting, as_divided
from forebay.config.keys import share_lines
from forebay.engine.frames import Ready
from forebay.memory.budget import LEAST_CONTEXT
from forebay.memory.holding import num_at_once

# Settings that are always shown; others only where somebody set them.
SHOWN: Final = (
    "model_path",
    "dtype",
    "num_threads",
    "kernels",
    "activation_bits",
    "context_length",
    "max_running_requests",
    "chunked_prefill_size",
    "kv_cache_bytes",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "cache_isolation",
    "flight_recorder",
)
ASKED: Final = ("flag", "env", "file")  # sources of a setting that somebody wrote
LOWERED: Final = "lowered"  # in the reason of a value that the memory has no room for
MEMORY: Final = "memory"
_ITEM: Final = 28  # columns of what is told about
_UNBROKEN: Final = 1 << 20  # where nobody looks at a screen a line is a row, for programs

Rows = Iterable[tuple[str, str, str]]

log = get_logger("server")


def print_startup(config: Config, ready: Ready, url: str, seconds: float, answers: Rows = ()) -> None:
    """Print address, model, capacity and what the memory lowered, and with --report memory, model and settings;
    `seconds` is the time since the start, `answers` are rows on the formats of the model's answers."""
    fits = ("fits", _fits_text(config, ready), _sizes(config, ready))
    rows, tenants = [("model", config.engine.served_model_name, ""), fits], tenants_section(config.server)
    if not config.server.report:
        rows += [("lowered", f"{setting.name} {setting.value}", setting.reason) for setting in _lowered(config, ready)]
        rows.append(("more", "--report prints memory, model and settings with reasons, as /server_info has them", ""))
        print_ready(url, seconds, rows, tenants)
        return
    of_memory = [row[1:] for row in ready.report if row[0] == MEMORY]
    others = [row[1:] for row in ready.report if row[0] not in (MEMORY, SETTINGS)]
    settings = list(_settings(config, ready))
    print_ready(
        url, seconds, rows, [(MEMORY, of_memory), ("model", [*others, *answers]), *tenants, (SETTINGS, settings)]
    )


def tenants_section(config: ServerConfig) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """The effective weights, if several tenants share the server by them (C32)."""
    if len(config.tenants) < 2:
        return []
    return [("tenants", [(name, share, "") for name, share in share_lines(config.tenants)])]


def print_ready(url: str, seconds: float, rows: Rows, sections: Sequence[tuple[str, Rows]]) -> None:
    """Print the answer and the sections below it, or log them if the log is JSON. Printed lines end at the terminal's
    width, if there is a terminal; paths and URLs are not broken."""
    if Relay.running is not None:
        _log_ready(url, seconds, [("start", rows), *sections])
    else:
        _print_ready(url, seconds, rows, sections)


def _print_ready(url: str, seconds: float, rows: Rows, sections: Sequence[tuple[str, Rows]]) -> None:
    screen = sys.stdout.isatty()
    width = max(40, shutil.get_terminal_size().columns) if screen else _UNBROKEN
    bold, plain = ("\033[1m", "\033[0m") if screen and "NO_COLOR" not in os.environ else ("", "")
    lines = [f"ready at {bold}{url}{plain} after {seconds:.1f} s (Ctrl-C ends)"]
    answer = [("API", f"{url}/v1", f"and a page to chat: {url}/"), *rows]
    lines += [line for row in answer for line in _row(*row, width, 10)]
    for title, found in sections:
        lines += ["", f"{bold}{title}{plain}", *(line for row in found for line in _row(*row, width, _ITEM))]
    if screen and sections:  # which may show no more than the end
        lines += ["", f"{bold}{url}/{plain} is the page; Ctrl-C ends"]
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:  # a full device, or a reader that has left: the server serves without its table
        give_up_stdout()
        log.warning(event("no_startup_table", reason=error, url=url))


def _log_ready(url: str, seconds: float, sections: Sequence[tuple[str, Rows]]) -> None:
    log.info(event("serving", url=url, after_s=seconds))
    for title, rows in sections:
        for item, value, reason in rows:
            log.info(event("start_row", section=title, item=item, value=value, reason=reason))


def _fits_text(config: Config, ready: Ready) -> str:
    num_pages = ready.max_total_tokens // ready.page_size
    words = capacity_text(num_pages, ready.page_size, ready.max_running_requests, ready.context_length)
    enough = is_enough(ready.context_length, config.engine.memory.context_length)
    return words if enough else f"no: {words}; `forebay plan` names what helps"


def _sizes(config: Config, ready: Ready) -> str:
    settings = as_divided(config.settings, ready.report)
    caches = next(setting.value for setting in settings if setting.name == "kv_cache_bytes")
    return f"({human_bytes(ready.weight_bytes)} of weights, {caches} of caches)"


def is_enough(context_length: int, wanted: int) -> bool:
    """Return whether a context is worth serving; `wanted` is the model's own, or the requested one."""
    return context_length >= min(LEAST_CONTEXT, wanted)


def capacity_text(num_pages: int, page_size: int, most: int, longest: int) -> str:
    """`22 requests of 8,192 tokens at once, or 64 of 2,832`: requests of the longest context, and the largest number of
    them."""
    num = num_at_once(num_pages, page_size, most, longest)
    shorter = f", or {most:,} of {num_pages // most * page_size:,}" if num < most else ""
    return f"{num:,} request{'s' * (num != 1)} of {longest:,} tokens at once{shorter}"


def _row(item: str, value: str, why: str, width: int, column: int) -> list[str]:
    first = f"  {item:<{column}} "
    wrapper = textwrap.TextWrapper(
        width - 1, first, " " * len(first), break_long_words=False, break_on_hyphens=False, expand_tabs=False
    )
    return wrapper.wrap(f"{value}  {why}".rstrip())


def _settings(config: Config, ready: Ready) -> Rows:
    asked = {setting.name for setting in config.settings if setting.source in ASKED}
    for setting in as_divided(config.settings, ready.report):
        if setting.name in SHOWN or setting.name in asked:
            yield setting.name, setting.value, setting.reason


def _lowered(config: Config, ready: Ready) -> Iterator[Setting]:
    """Yield the settings that the memory changed although they were written, and the others that it lowered."""
    for before, after in zip(config.settings, as_divided(config.settings, ready.report), strict=True):
        if before.value != after.value and (before.source in ASKED or LOWERED in after.reason):
            yield after
