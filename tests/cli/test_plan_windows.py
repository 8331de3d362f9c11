"""The default contexts of published models with sliding windows, on machines of common sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.cli.main import main
from tests.cli.public_configs import GEMMA_3_27B, GPT_OSS_20B
from tests.cli.public_dense import OLMO_3_7B
from tests.cli.public_norms import MIMO_V2_FLASH, PUBLISHED
from tests.cli.test_plan_table import folder_of, planned

_GEMMA4_LAYERS: Final = ["sliding_attention"] * 5 + ["full_attention"]
_BILLION_WEIGHTS: Final = {"num_hidden_layers": 12, "n_routed_experts": 64}

# Layers and head of the published model; MiMo is 15 times as large as any of the machines, so that it has fewer layers.
WINDOWED: Final[dict[str, dict[str, Any]]] = {
    "gemma2-9b": {
        **PUBLISHED["google/gemma-2-27b"][0], "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
    },
    "gemma3-27b": GEMMA_3_27B,
    "gemma4-31b": {
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 5376, "intermediate_size": 21504,
        "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
        "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "sliding_window": 1024,
        "layer_types": _GEMMA4_LAYERS * 10, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    "gpt-oss-20b": GPT_OSS_20B,
    "olmo3-7b": OLMO_3_7B,
    "mimo-v2-flash-small": {
        **MIMO_V2_FLASH, **_BILLION_WEIGHTS, "hybrid_layer_pattern": MIMO_V2_FLASH["hybrid_layer_pattern"][:12],
        "moe_layer_freq": MIMO_V2_FLASH["moe_layer_freq"][:12],
    },
    "command-r7b": PUBLISHED["CohereLabs/c4ai-command-r7b-12-2024"][0],
}  # fmt: skip
INT4: Final = ("--quantization", "int4", "--dtype", "bfloat16")
ONE: Final = ("--max-running-requests", "1")


def context_of(capsys: pytest.CaptureFixture[str], folder: str, *words: str) -> int:
    """Return the longest context; 0 if the weights and a window do not fit."""
    code = main(["plan", folder, *words, "--json"])
    printed = capsys.readouterr().out
    assert bool(printed) or code == 2
    return int(json.loads(printed)["capacity"][-1]["context"]) if printed else 0


@pytest.mark.parametrize("memory", ["16GiB", "32GiB", "48GiB", "64GiB"])
@pytest.mark.parametrize("name", WINDOWED)
def test_plan_default_of_a_windowed_model_has_the_context_of_one_request(
    name: str, memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full, if one request alone has it; else at least three quarters of that of a server of one request: an eighth is
    for windows of others, and the default computes steps of 64 requests."""
    folder, full = folder_of(tmp_path, WINDOWED[name]), WINDOWED[name]["max_position_embeddings"]
    alone, default = (context_of(capsys, folder, "--memory", memory, *INT4, *one) for one in (ONE, ()))
    assert default == full if alone == full else default >= alone * 3 // 4
    assert alone >= 2048 or (name, memory) in {("gemma3-27b", "16GiB"), ("gemma4-31b", "16GiB")}


def test_plan_written_requests_name_the_number_that_leaves_one_its_context(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (folder_of(tmp_path, WINDOWED["olmo3-7b"]), "--memory", "32GiB", "--dtype", "bfloat16")
    assert main(["plan", *words, "--max-running-requests", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = planned(capsys, *words)
    assert lines[1].startswith(f"with --max-running-requests {found['num_running']}: 1 request of 65,536 tokens")
    assert main(["plan", *words]) == 0
    assert "with --max-running-requests" not in capsys.readouterr().out
