"""The tracer of a process, by its settings."""

from __future__ import annotations

from collections.abc import Callable

from forebay.config.config import ServerConfig
from forebay.http.tracing import Tracer


def make_tracer(config: ServerConfig, process: str, count_dropped: Callable[[int], None]) -> Tracer | None:
    """Return the tracer that the settings ask for, if they do; the caller closes it. `process` names the service."""
    if not config.otlp_traces_endpoint:
        return None
    from forebay.http.otlp import OtlpExporter

    exporter = OtlpExporter(config.otlp_traces_endpoint, process, f"{config.host}:{config.port}", count_dropped)
    return Tracer(exporter, config.trace_ratio)
