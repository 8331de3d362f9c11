"""C16 with a smaller model by the command line: its drafts change no token, its memory is counted, what cannot draft is
refused before anything is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from forebay.base.errors import ConfigError
from forebay.cli.main import main
from forebay.config.resolve import resolve
from forebay.engine.loop.build import build_engine
from tests.engine.conftest import is_greedy
from tests.engine.starts import PROMPTS, tokens_of
from tests.engine.test_every_model_type import check_twice
from tests.kernels import NATIVE
from tests.models.test_gguf import convert
from tests.models.tiny import VOCAB, shared_tiny


def flags(target: Path, draft: Path, **options: Any) -> dict[str, Any]:
    shape = {"dtype": "float32", "chunked_prefill_size": 5, "page_size": 4, "context_length": 64, "kernels": NATIVE}
    drafting = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(draft)}
    return {"model": str(target), **shape, **drafting, **options}


@pytest.mark.parametrize(
    ("target", "draft", "options"),
    [
        ("llama", "llama", {"overlap_depth": 1}),
        ("falcon_h1", "qwen3", {"disable_cuda_graph": True}),
        ("gemma4_text", "deepseek_v3", {"speculative_num_draft_tokens": 2}),
    ],
)
def test_c16_a_draft_model_changes_no_token(target: str, draft: str, options: dict[str, Any]) -> None:
    tiny = shared_tiny(target)
    core, ready = build_engine(resolve(flags(tiny.path, shared_tiny(draft).path, **options)).engine)
    check_twice(core, tiny)
    assert core.scheduler.state(0.0).counters["draft_tokens"] > 0
    rows = {item: (value, reason) for _, item, value, reason in ready.report}
    assert rows["kv cache allocated"][1] == f"{rows['kv cache allocated'][0]} planned"
    assert "of KV per token" in rows["draft model"][1]


def test_a_gguf_file_drafts(tmp_path: Path) -> None:
    tiny = shared_tiny("llama")
    draft = convert(tiny, "llama", tmp_path / "draft.gguf")
    core, _ = build_engine(resolve(flags(tiny.path, draft)).engine)
    for prompt, tokens in zip(PROMPTS, tokens_of(core, PROMPTS), strict=True):
        assert is_greedy(tiny, prompt, tokens)
    counters = core.scheduler.state(0.0).counters
    assert counters["accepted_tokens"] > counters["draft_tokens"] / 2


def with_config(folder: Path, **fields: Any) -> Path:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **fields}))
    return folder


def with_tokens(folder: Path, words: str) -> Path:
    vocab = {word: i for i, word in enumerate([*words, *map(str, range(VOCAB - len(words)))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("draft", "fields", "message"),
    [
        ("llama", {"vocab_size": 95}, "a vocabulary of 95 tokens, and .* one of 96"),
        ("llama", {"max_position_embeddings": 32}, "32 positions, and the context is 64 tokens: set --context-length"),
        ("mistral-window", {}, "this mistral keeps KV of the last 6 tokens, .*take one of full attention"),
        ("qwen3_5_text", {}, "this qwen3_5_text keeps state: .*take one of full attention"),
    ],
)
def test_a_model_that_cannot_draft_is_refused(draft: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = with_config(shutil.copytree(shared_tiny(draft).path, tmp_path / "draft"), **fields)
    with pytest.raises(ConfigError, match=message):
        build_engine(resolve(flags(shared_tiny("llama").path, folder)).engine)


def test_a_model_of_other_tokens_is_refused(tmp_path: Path) -> None:
    target, draft = (shutil.copytree(shared_tiny("llama").path, tmp_path / name) for name in ("target", "draft"))
    with_tokens(target, "abcdef")
    build_engine(resolve(flags(target, with_tokens(draft, "abcdef"))).engine)
    with pytest.raises(ConfigError, match=r"token 3 is .*x.* in .*draft and .*d.* in .*target"):
        build_engine(resolve(flags(target, with_tokens(draft, "abcxef"))).engine)


def test_a_plan_counts_the_layers_of_a_draft_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, found = str(with_tokens(shutil.copytree(shared_tiny("llama").path, tmp_path / "model"), "abc")), []
    for words in ((), ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", path)):
        assert main(["plan", path, "--memory", "1GiB", "--dtype", "float32", "--json", *words]) == 0
        found.append(json.loads(capsys.readouterr().out)["sizes"]["kv_bytes_per_token"])
    assert found[1] == 2 * found[0]
