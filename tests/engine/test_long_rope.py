"""Engines whose contexts take different angles of a LongRoPE share no entries of a prefix cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.config.resolve import resolve
from forebay.engine.lifecycle import tiers
from forebay.engine.loop.build import build_engine
from forebay.engine.loop.core import close
from tests.models.tiny import shared_tiny


def test_c31_longrope_contexts_below_and_above_its_length_have_other_identities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(shared_tiny("phi3-longrope-short").path, tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text())
    fields["original_max_position_embeddings"] = 32
    fields["rope_parameters"]["original_max_position_embeddings"] = 32
    (folder / "config.json").write_text(json.dumps(fields))
    identities: list[dict[str, str]] = []
    store = tiers.DiskStore

    def taken(mover: Any, path: Path, identity: dict[str, str], **how: Any) -> Any:
        identities.append(identity)
        return store(mover, path, identity, **how)

    monkeypatch.setattr(tiers, "DiskStore", taken)
    for number, context in enumerate((24, 32, 36, 64)):
        options = {"model": str(folder), "dtype": "float32", "context_length": context, "kv_cache_bytes": "1MiB"}
        files = {"prefix_cache_dir": str(tmp_path / str(number)), "prefix_cache_disk_bytes": "4MiB"}
        core, _ = build_engine(resolve(options | files | {"page_size": 4, "max_running_requests": 2}).engine)
        close(core)
    short, same, long, longest = identities
    assert short == same != long == longest
    assert "LongRoPE" in long["kernels"]
