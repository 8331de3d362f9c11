"""Servers on a Ray cluster: Ray places and restarts processes, and requests never pass it."""

from __future__ import annotations

from forebay.cluster.serve_app import serve_app

__all__ = ["serve_app"]
