"""The check of the settings of traces."""

from __future__ import annotations

import importlib.util
from urllib.parse import urlsplit

from forebay.base.errors import ConfigError


def check_traces(endpoint: str) -> None:
    """Raise ConfigError for an endpoint that is no URL, or that nothing here could export to."""
    if not endpoint:
        return
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(f"--otlp-traces-endpoint {endpoint!a} is no URL: write one such as http://127.0.0.1:4318")
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None or importlib.util.find_spec("opentelemetry.sdk") is None:
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry's exporter: pip install 'forebay[otel]'")
