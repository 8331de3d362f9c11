"""The contexts of published models on machines of common sizes, by default, and what helps where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.units import parse_bytes
from forebay.cli.main import main
from tests.cli.public_configs import (
    DEEPSEEK_V4_FLASH,
    GPT_OSS_20B,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B_A3B,
    SMOLLM2_135M,
)

pytestmark = pytest.mark.usefixtures("decides_for_avx2")

INT4, FLOAT32 = ("--quantization", "int4"), ("--dtype", "float32")
# All but experts is in no codes: in float32, the default without bfloat16 instructions, that is 6.8 GiB instead of 3.4.
BFLOAT16 = ("--dtype", "bfloat16")
ON_AVX2 = (*FLOAT32, "--kv-cache-dtype", "bfloat16")  # what the rules choose there
FULL = 1 << 60


def folder_of(tmp_path: Path, shape: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    return str(tmp_path)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    main(["plan", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("shape", "words", "memory", "least_context"),
    [
        pytest.param(QWEN3_8B, INT4, "8GiB", 4096, id="8b-8gib"),
        pytest.param(QWEN3_8B, INT4, "16GiB", 32768, id="8b-16gib"),
        pytest.param(QWEN3_8B, INT4, "32GiB", FULL, id="8b-32gib"),
        pytest.param(QWEN3_30B_A3B, INT4, "24GiB", 16384, id="30b-a3b-24gib"),
        pytest.param(GPT_OSS_20B, BFLOAT16, "16GiB", 8192, id="gpt-oss-20b-16gib"),
        pytest.param(GPT_OSS_20B, ON_AVX2, "16GiB", 8192, id="gpt-oss-20b-16gib-avx2"),
        pytest.param(QWEN3_NEXT_80B_A3B, FLOAT32, "400GiB", FULL, id="80b-400gib"),
        pytest.param(SMOLLM2_135M, INT4, "2GiB", FULL, id="smollm2-2gib"),
    ],
)
def test_plan_published_model_has_the_least_context(
    shape: dict[str, Any],
    words: tuple[str, ...],
    memory: str,
    least_context: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = planned(capsys, folder_of(tmp_path, shape), "--memory", memory, *words)
    assert found["fits"]
    assert found["capacity"][-1]["context"] >= min(least_context, shape["max_position_embeddings"])
    assert found["capacity"][-1]["num_requests"] >= 1


def test_plan_embedded_model_has_its_full_context_in_2_gib(capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--memory", "2GiB")["capacity"][-1]["context"] == 8192


def test_plan_sizes_the_default_for_all_requests_at_full_context_where_there_is_more_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, SMOLLM2_135M)
    found = planned(capsys, folder, "--memory", "1TiB", *INT4)
    assert found["capacity"][-1] == {
        "context": 8192, "num_requests": 64, "num_cached_beside": 0, "num_cached_idle": 64,
    }  # fmt: skip
    settings = {row["name"]: row for row in found["settings"]}
    assert settings["kv_cache_bytes"]["reason"] == "64 requests of 8192 tokens need no more"
    assert parse_bytes(settings["kv_cache_bytes"]["effective"].replace(" ", "")) < 25 << 30
    written = planned(capsys, folder, "--memory", "1TiB", *INT4, "--kv-cache-bytes", "100GiB")
    assert written["capacity"][-1]["num_cached_beside"] > 200


def does_not_fit(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, list[str]]:
    """The first line, and the changes that are listed below it."""
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    first, *others = (printed.out or printed.err).splitlines()
    return first, [line for line in others if line.startswith("with ")]


def test_plan_context_below_2048_does_not_fit_and_names_the_change_that_helps_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, QWEN3_8B)
    first, lines = does_not_fit(capsys, folder, "--memory", "10GiB", "--quantization", "int8")
    assert first.startswith(f"{tmp_path.name} does not fit: 1 request of ")
    helpful = f"--quantization int4 helps most: {capacity(capsys, folder, '10GiB', *INT4)}"
    assert first.endswith(helpful)
    assert lines[-1].startswith("with 11.0 GiB of memory: 1 request of ")


def test_plan_where_no_option_is_enough_names_the_least_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, QWEN3_8B)
    first, _ = does_not_fit(capsys, folder, "--memory", "6GiB", *INT4)
    assert first.endswith(f"8.0 GiB of memory helps most: {capacity(capsys, folder, '8GiB', *INT4)}")
    assert main(["plan", folder, "--memory", "7GiB", *INT4]) == 2


def test_plan_weights_that_do_not_fit_name_the_change_in_the_first_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(tmp_path, QWEN3_8B)
    first, lines = does_not_fit(capsys, folder, "--memory", "14GiB", "--dtype", "bfloat16")
    assert f"{tmp_path.name} does not fit: 14.0 GiB of memory (given with --memory) do not hold 15.3 GiB" in first
    assert first.endswith(f"--quantization int4 helps most: {capacity(capsys, folder, '14GiB', *INT4)}")
    assert [line for line in lines if "--quantization int8:" in line]


def capacity(capsys: pytest.CaptureFixture[str], folder: str, memory: str, *words: str) -> str:
    found = planned(capsys, folder, "--memory", memory, *words)
    return str(found["capacity_words"])


@pytest.mark.parametrize(("asked", "fits"), [("512", 0), ("4096", 2)])
def test_plan_context_that_was_asked_for_is_enough(
    asked: str, fits: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--memory", "64GiB", "--kv-cache-bytes", "100MiB", "--context-length", asked, *INT4)
    assert main(["plan", folder_of(tmp_path, QWEN3_8B), *words]) == fits
    first = capsys.readouterr().out.partition("\n")[0]
    assert (" fits: " in first) is (fits == 0)
    assert fits == 0 or "no single change is enough" in first  # the size that was written decides


def test_plan_deepseek_v4_keeps_entries_in_pages_of_whole_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 layers with entries of 4 tokens and keys of them, 23 with entries of 128 (C24)."""
    words = ("--memory", "2000GiB", "--dtype", "bfloat16", "--speculative-algorithm", "off")
    found = planned(capsys, folder_of(tmp_path, DEEPSEEK_V4_FLASH), *words)
    assert found["sizes"]["kv_bytes_per_token"] == 20 * (512 + 128) * 2 // 4 + 23 * 512 * 2 // 128 == 6584
    assert found["sizes"]["kinds"]["ring"]["num_bytes"] == 23 * 2 * 127 * 512 * 2
    assert found["sizes"]["kinds"]["window"]["num_bytes"] == 43 * 512 * 2
    assert found["sizes"]["kinds"]["window"]["page_bytes"] == 20 * 2 * 7 * (1024 + 256) * 2
    assert any("x 128 tokens" in str(line) for line in found["memory"])
