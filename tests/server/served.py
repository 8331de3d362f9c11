"""The settings and the model of servers of tests."""

from __future__ import annotations

from forebay.config.config import ServerConfig, Setting
from forebay.server.served_model import ServedModel

CONFIG = ServerConfig(
    host="127.0.0.1", port=0, api_keys=(), admin_api_keys=(), allowed_hosts=(), cors_origins=(), drain_timeout_s=1.0
)
MODEL = ServedModel(
    name="tiny",
    path="/models/tiny",
    created=1_700_000_000,
    settings=(Setting(name="page_size", value="16", source="default", reason="the default"),),
)
