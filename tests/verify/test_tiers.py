"""Settings of the host tier are for the circumstances with two tiers, and for no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import ConfigError
from forebay.cli.main import main
from forebay.verify.run import Verification


def made(like: str, folder: Path) -> str:
    """Make a small model with a tokenizer; its queries read 64 tokens if it has sparse attention."""
    path = folder / like
    assert main(["models", "make", "--like", like, "--out", str(path), "--hidden-size", "64"]) == 0
    return str(path)


def test_verification_gives_tiers_their_settings(tmp_path: Path) -> None:
    given = {"model_path": made("deepseek_v32", tmp_path), "hisparse_host_path": str(tmp_path)}
    verification = Verification(given, num=2, max_tokens=8, seed=0)
    in_tiers = [one for one in verification.circumstances if "two tiers" in one.name]
    assert len(in_tiers) == 2
    for one in in_tiers:
        assert one.flags["hisparse_host_path"] == str(tmp_path)
        assert one.flags["hisparse_config"] == '{"device_buffer_size": 64}'
    others = [one for one in verification.circumstances if one not in in_tiers]
    assert not any("hisparse" in name for one in others for name in one.flags)
    assert not verification.varied & {"hisparse_host_path", "hisparse_config"}


@pytest.mark.slow
def test_verification_refuses_tiers_of_a_model_without_sparse_attention(tmp_path: Path) -> None:
    given = {"model_path": made("llama", tmp_path)}
    dense = Verification(given, num=2, max_tokens=8, seed=0)
    assert not any("tiers" in one.name for one in dense.circumstances)
    with pytest.raises(ConfigError, match="no layer with sparse attention"):
        Verification({**given, "hisparse_host_path": str(tmp_path)}, num=2, max_tokens=8, seed=0)
