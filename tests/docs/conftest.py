from __future__ import annotations

from tests.server.conftest import launch, shared, tokenizer

__all__ = ["launch", "shared", "tokenizer"]  # fixtures
