"""The one table that `forebay serve` prints: what was decided and why, planned against actual memory."""

from __future__ import annotations

import sys
from typing import Final

from rich.console import Console
from rich.table import Table

from forebay.config.engine_config import Config
from forebay.engine.frames import Ready

# Settings that the table always shows; others only where somebody set them.
SHOWN: Final = (
    "model_path",
    "dtype",
    "num_threads",
    "kernels",
    "context_length",
    "max_running_requests",
    "chunked_prefill_size",
    "kv_cache_bytes",
    "speculative_algorithm",
    "speculative_num_draft_tokens",
    "cache_isolation",
)
SECTION: Final = "settings"


def print_startup(config: Config, ready: Ready, url: str, seconds: float) -> None:
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(startup_table(config, ready))
    console.print(f"ready at [bold]{url}[/bold] after {seconds:.1f} s (page: {url}/, API: {url}/v1, Ctrl-C ends)")


def startup_table(config: Config, ready: Ready) -> Table:
    table = Table(title=f"forebay serves {config.engine.served_model_name}", title_justify="left", box=None)
    for column in ("", "item", "value", "why"):
        table.add_column(column, style="dim" if column in ("", "why") else None, overflow="fold")
    rows = [*_setting_rows(config), *ready.report]
    section = None
    for row_section, item, value, reason in rows:
        table.add_row("" if row_section == section else row_section, item, value, reason)
        section = row_section
    return table


def _setting_rows(config: Config) -> list[tuple[str, str, str, str]]:
    rows = []
    for setting in config.settings:
        chosen = setting.source in ("flag", "env", "file")
        if setting.name in SHOWN or chosen:
            rows.append((SECTION, setting.name, setting.value, setting.reason))
    return rows
