"""Reads configurations as checkpoints have them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.families.config.model_config import ModelConfig, config_from_folder
from tests.families.given import GIVEN


@pytest.fixture
def read(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., ModelConfig]:
    """Return what reads a `config.json` of a type: `GIVEN`, the type's fields in the module's `NEEDED`, and the call's
    fields."""
    needed = getattr(request.module, "NEEDED", {})

    def from_fields(model_type: str, **fields: object) -> ModelConfig:
        raw = {"model_type": model_type, **GIVEN, **needed.get(model_type, {}), **fields}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return config_from_folder(tmp_path)

    return from_fields
