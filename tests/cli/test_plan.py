"""What fits, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.cli.main import main
from forebay.pools.cache_spec import CacheSpec, FullAttention, LatentAttention, RecurrentState, SlidingWindow
from tests.cli.public_configs import FALCON_H1_0_5B, GEMMA_3_27B, LLAMA_3_8B, NEMOTRON_H_8B, QWEN3_NEXT_80B_A3B

pytestmark = pytest.mark.usefixtures("decides_for_avx2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_8B))
    return tmp_path


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def settings(found: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {row["name"]: (row["asked"], row["effective"]) for row in found["settings"]}


def test_a_config_alone_is_planned_for_another_machine(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, str(folder), "--memory", "40GiB", "--mem-fraction-static", "0.9", "--dtype", "bfloat16")
    assert found["num_parameters"] == 8_030_261_248
    assert found["sizes"]["kv_bytes_per_token"] == 2 * 32 * 8 * 128 * 2
    assert [row["num_layers"] for row in found["layers"]] == [32]
    assert found["capacity"][-1]["context"] == 8192
    verified = 64 * 8 * 4 * LLAMA_3_8B["vocab_size"]  # logits of 8 tokens of each request
    assert found["capacity"][-1]["num_requests"] == (36 * 2**30 - found["weight_bytes"] - verified) // 2**30


def test_a_model_is_planned_for_a_gpu_that_is_not_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    caches = {}
    for kv_dtype in ("auto", "int8", "fp8"):
        words = ("--device", "cuda", "--memory", "80GiB", "--kv-cache-dtype", kv_dtype)
        found = plan(capsys, str(folder), *words)
        assert 60 * 2**30 < found["weight_bytes"] + found["kv_cache_bytes"] < 80 * 2**30
        caches[kv_dtype] = found["sizes"]["kv_bytes_per_token"]
    assert caches == {"auto": 131_072, "int8": 67_584, "fp8": 67_584}


@pytest.mark.parametrize("kv_heads", [3, 8])
def test_plan_of_ranks_has_the_bytes_of_each_and_the_tokens_of_the_one_with_most_heads(
    kv_heads: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {**LLAMA_3_8B, "num_key_value_heads": kv_heads, "num_attention_heads": 4 * kv_heads, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = (str(tmp_path), "--memory", "64GiB", "--kv-cache-bytes", "4GiB", "--dtype", "bfloat16")
    whole, halves = plan(capsys, *words), plan(capsys, *words, "--tp-size", "2")
    assert whole["ranks"] == []
    first, last = halves["ranks"]
    heads = kv_heads // 2, kv_heads - kv_heads // 2
    assert first["cache_bytes"] * heads[1] == last["cache_bytes"] * heads[0]
    assert last["cache_bytes"] <= 2**31
    assert halves["sizes"]["kv_bytes_per_token"] == 2 * 32 * heads[1] * 128 * 2
    norms = 2 * 4096 * (2 * 32 + 1)  # in bfloat16, on each rank
    assert first["weight_bytes"] + last["weight_bytes"] == whole["weight_bytes"] + norms
    assert halves["weight_bytes"] == whole["weight_bytes"]


def test_plan_of_ranks_that_cannot_divide_the_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--memory", "64GiB", "--tp-size", "3"]) == 2
    assert (
        "3 ranks cannot divide 4096 outputs of model.layers.0.self_attn.o_proj: 2 or 4 can" in capsys.readouterr().err
    )


def test_plan_of_ranks_as_text_names_each(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", str(folder), "--memory", "64GiB", "--kv-cache-bytes", "4GiB", "--tp-size", "2"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    start = lines.index(["rank", "weights", "caches"])
    assert [line[0] for line in lines[start + 1 : start + 3]] == ["0", "1"]


def test_what_was_asked_stands_beside_what_it_comes_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--memory", "64GiB", "--kv-cache-bytes", "1GiB", "--page-size", "64", "--max-running-requests", "500")
    found = settings(
        plan(capsys, str(folder / "config.json"), *words, "--dtype", "bfloat16", "--context-length", "32k")
    )
    assert found["page_size"] == ("64", "64")
    assert found["max_running_requests"] == ("500", "126")
    assert found["context_length"] == ("32768", "8064")
    assert found["max_total_tokens"] == ("auto", "8064")
    assert found["mamba_track_interval"] == ("auto", "-")


def test_the_text_has_every_setting_and_no_traceback(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--memory", "64GiB"]) == 0
    text = capsys.readouterr().out
    assert "llama): 32 layers, 8.03 G weights" in text
    assert "KV of all tokens, 8 heads x 128" in text
    assert "64.0 GiB given with --memory" in text
    assert "no layer keeps a state" in text


def test_the_answer_comes_first_and_what_does_not_fit_has_ways_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roomy = [str(folder), "--memory", "20GiB", "--mem-fraction-static", "0.9", "--dtype", "bfloat16"]
    assert main(["plan", *roomy, "--concurrency", "4"]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first.startswith(f"{folder.name} fits: 3 requests of 8,192 tokens at once, or 4 of ")
    assert rest.index("requests at once") < rest.index("setting ")
    small = [str(folder), "--memory", "8GiB", "--mem-fraction-static", "0.9", "--dtype", "bfloat16"]
    assert main(["plan", *small]) == 2
    refused, *ways = capsys.readouterr().err.splitlines()
    assert "do not hold 15.0 GiB of weights" in refused
    assert [way.partition(":")[0] for way in ways] == [
        "with --quantization int8",
        "with --quantization int8 --kv-cache-dtype int8",
        "with --quantization int4",
        "with --quantization int4 --kv-cache-dtype int8",
        "with 17.0 GiB of memory",
    ]
    assert main(["plan", *small, "--quantization", "int8"]) == 2
    _, *ways, shape = capsys.readouterr().out.splitlines()[:6]
    assert [way.partition(": ")[0] for way in ways] == [
        "with --kv-cache-dtype int8",
        "with --quantization int4",
        "with --quantization int4 --kv-cache-dtype int8",
        "with 10.0 GiB of memory",
    ]
    assert ways[0].startswith("with --kv-cache-dtype int8: does not fit: 1 request of ")
    assert ways[1].startswith("with --quantization int4: 1 request of 8,192 ")
    assert shape.startswith(f"{folder.name} (llama)")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "lots"], "--memory: 'lots' is not a size"),
        (["--kv-cache-bytes", "1MiB", "--memory", "64GiB"], "one request needs at least"),
        (["--kv-cache-bytes", "60GiB", "--memory", "64GiB"], "64.0 GiB given with --memory"),
    ],
)
def test_what_cannot_be_is_refused_as_serving_would(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--dtype", "bfloat16", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (FullAttention(num_kv_heads=2, head_dim=64), "KV of all tokens, 2 heads x 64"),
        (FullAttention(num_kv_heads=2, head_dim=64, v_head_dim=32), "KV of all tokens, 2 heads x 64 and 32"),
        (LatentAttention(rank=512, rope_dim=64), "latent KV of all tokens, 512 + 64"),
        (SlidingWindow(num_kv_heads=2, head_dim=64, window=128), "KV of the last 128 tokens, 2 heads x 64"),
        (RecurrentState(conv=(96, 3)), "state: convolution 96 x 3"),
        (RecurrentState(conv=(96, 3), ssm=(4, 8, 16)), "state: convolution 96 x 3, scan 4 x 8 x 16"),
    ],
)
def test_every_kind_of_layer_has_words(spec: CacheSpec, words: str) -> None:
    assert str(spec) == words


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("shape", "num_parameters", "kv_bytes", "window_bytes", "state_bytes"),
    [
        (FALCON_H1_0_5B, 0.521e9, 36 * 2 * 2 * 64 * 2, 0, 36 * (1792 * 3 * 2 + 24 * 64 * 128 * 4)),
        (QWEN3_NEXT_80B_A3B, 79.67e9, 12 * 2 * 2 * 256 * 2, 0, 36 * (8192 * 3 * 2 + 32 * 128 * 128 * 4)),
        (NEMOTRON_H_8B, 8.10e9, 4 * 2 * 8 * 128 * 2, 0, 24 * (10240 * 3 * 2 + 128 * 64 * 128 * 4)),
        (GEMMA_3_27B, 27.0e9, 10 * 2 * 16 * 128 * 2, 52 * 2 * 16 * 128 * 2, 0),
    ],
    ids=["falcon-h1-0.5b", "qwen3-next-80b-a3b", "nemotron-h-8b", "gemma-3-27b"],
)
def test_published_models_have_their_size_and_keep_what_their_papers_say(
    shape: dict[str, Any],
    num_parameters: float,
    kv_bytes: int,
    window_bytes: int,
    state_bytes: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ("--memory", "512GiB", "--mem-fraction-static", "0.9", "--dtype", "bfloat16")
    found = plan(capsys, str(tmp_path), *words)
    assert found["num_parameters"] == pytest.approx(num_parameters, rel=0.002)
    assert found["sizes"]["kv_bytes_per_token"] == kv_bytes
    assert found["sizes"]["kinds"].get("window", {}).get("num_bytes", 0) == window_bytes
    assert found["sizes"]["kinds"].get("state", {}).get("num_bytes", 0) == state_bytes
    assert sum(row["num_layers"] for row in found["layers"]) == shape["num_hidden_layers"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_that_does_not_hold_the_weights_is_an_error(
    folder: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(folder), "--device", device, "--memory", "10GiB", "--dtype", "bfloat16"]) != 0
    assert "do not hold" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_has_the_layer_and_the_weights_of_a_draft_head_that_guesses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT_80B_A3B))
    words = (str(tmp_path), "--memory", "800GiB")
    plain, headed = plan(capsys, *words), plan(capsys, *words, "--speculative-algorithm", "NEXTN")
    layers = [sum(row["num_layers"] for row in found["layers"]) for found in (plain, headed)]
    assert layers[1] == layers[0] + 1
    assert headed["num_parameters"] > plain["num_parameters"]
    assert headed["sizes"]["kv_bytes_per_token"] > plain["sizes"]["kv_bytes_per_token"]
