"""Adapters by their name on the hub: fetched once they can be served, resumed, and served from the cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError, ModelError
from forebay.cli.main import main
from forebay.cli.serve import make_parser
from forebay.engine.client.llm import LLM
from forebay.engine.lifecycle.bring import bring_adapter
from forebay.formats.hub_names import absent_adapter, find_adapter, hub_folder
from tests.engine.adapters import make_adapter
from tests.engine.test_adapters import FLAGS, tokens_of
from tests.formats import hub_server
from tests.formats.adapter_files import write_adapter
from tests.formats.test_hub import MODEL, hub
from tests.models.tiny import Tiny

__all__ = ["hub"]  # a fixture
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture
def adapter(hub: hub_server.Hub, checkpoint: Tiny, tmp_path: Path) -> Path:
    """The folder whose files the hub has, among others."""
    folder = make_adapter(checkpoint.path, tmp_path / "local", seed=1)
    hub.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {"README.md": b"# An adapter"}
    return folder


@pytest.fixture
def start(checkpoint: Tiny) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def start(*modules: str, **flags: Any) -> LLM:
        made.append(LLM(str(checkpoint.path), **FLAGS, enable_lora=True, lora_modules=modules, **flags))
        return made[-1]

    yield start
    for llm in made:
        llm.close()


def test_llm_adapter_of_the_hub_is_fetched_once_and_served_from_the_cache(
    hub: hub_server.Hub, adapter: Path, start: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = start("here=" + str(adapter), "there=org/name", "same=org/name@main")
    right = tokens_of(llm, "here")
    assert right != tokens_of(llm)
    assert tokens_of(llm, "there") == tokens_of(llm, "same") == right
    folder = find_adapter("org/name")
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS}
    assert [each.path for each in llm._core.adapters.report][1:] == [str(folder)] * 2  # type: ignore[union-attr]
    hub.asked.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    llm.load_adapter("again", "org/name")
    assert tokens_of(llm, "again") == right
    assert hub.asked == []
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        llm.load_adapter("other", "org/other")


def test_plan_asks_no_hub_for_an_adapter_and_what_serves_fetches_it(
    hub: hub_server.Hub, adapter: Path, checkpoint: Tiny, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(checkpoint.path), "--enable-lora", "--lora-modules", "there=org/name"]
    assert main(["plan", *words, "--kv-cache-bytes=4MiB", "--json"]) == 0
    assert hub.asked == []
    parsed = make_parser().parse([*words, "--dtype=float32", "--kv-cache-bytes=4MiB"])
    assert parsed.resolve().engine.adapters.lora_modules == (("there", str(find_adapter("org/name"))),)
    assert "fetching the adapter org/name" in capsys.readouterr().err


def test_adapter_download_that_was_ended_goes_on_and_is_not_served_before(
    hub: hub_server.Hub, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = 8 + int.from_bytes(hub.files[WEIGHTS][:8], "little")
    monkeypatch.setattr("forebay.engine.lifecycle.bring.ADAPTER_HEADER_BYTES", begun)

    def check(files: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring_adapter(MODEL, check, print)
    assert hub.fetched() == [f"bytes=0-{begun - 1}"]
    assert absent_adapter("org/name") == MODEL
    with pytest.raises(ModelError, match=r"is not on this machine: `forebay models pull org/name`"):
        find_adapter("org/name")
    hub.asked.clear()
    folder = bring_adapter(MODEL, lambda files: None, print)
    assert hub.fetched() == [f"bytes={begun}-"]
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert absent_adapter("org/name") is None


def edited(files: dict[str, bytes], **config: Any) -> dict[str, bytes]:
    return {**files, CONFIG: json.dumps({**json.loads(files[CONFIG]), **config}).encode()}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("org/name", lambda files: {"config.json": b"{}", "model.safetensors": b""}, "org/name is no adapter: it has"),
        ("org/name", lambda files: {CONFIG: b"{}", "adapter_model.bin": b""}, "org/name: the adapter is pickled"),
        ("org/name", lambda files: {CONFIG: b"{}"}, f"the LoRA adapter has no {WEIGHTS}"),
        ("org/name", lambda files: {**files, CONFIG: b" " * (5 << 20)}, "has 5.0 MiB; at most 4.0 MiB"),
        ("org/name", lambda files: edited(files, use_dora=True), "org/name/adapter_config.json: use_dora is True"),
        ("org/name", lambda files: edited(files, r=64), "has rank 64: start with --max-lora-rank 64"),
        ("org/name", lambda files: {**files, WEIGHTS: b"\xff" * 100}, f"org/name/{WEIGHTS}: not a safetensors file"),
        ("org/other", lambda files: files, "has no model org/other"),
        ("org/name:Q4_K_M", lambda files: files, "adapters in GGUF files are not read"),
    ],
)
def test_repository_that_is_no_adapter_of_the_model_is_said_in_one_line(
    hub: hub_server.Hub,
    adapter: Path,
    start: Callable[..., LLM],
    name: str,
    change: Callable[[dict[str, bytes]], dict[str, bytes]],
    message: str,
) -> None:
    hub.files = change(hub.files)
    with pytest.raises(ModelError) as raised:
        start(f"bad={name}")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert absent_adapter("org/name") == MODEL


def test_adapter_of_another_model_is_refused_by_its_header(
    hub: hub_server.Hub, start: Callable[..., LLM], tmp_path: Path
) -> None:
    other = write_adapter(tmp_path / "other")
    hub.files = {path.name: path.read_bytes() for path in other.iterdir()}
    with pytest.raises(ModelError, match=r"org/name/adapter_model.safetensors: .* of this model and rank 4 it would"):
        start("bad=org/name")
    assert absent_adapter("org/name") == MODEL


def test_models_commands_say_what_an_adapter_is(
    hub: hub_server.Hub, adapter: Path, start: Callable[..., LLM], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pull", "org/name"]) == 0
    said = capsys.readouterr()
    assert "fetching the adapter org/name at main (0123456789ab)" in said.err
    assert Path(said.out.strip()) == find_adapter("org/name")
    assert main(["models", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(model["name"], model["kind"]) for model in listed if model["name"] == "org/name"] == [
        ("org/name", "adapter")
    ]
    for name in ("org/name", str(adapter)):
        assert main(["models", "inspect", name]) == 0
        shown = capsys.readouterr().out
        assert "an adapter (LoRA)" in shown
        assert "x q_proj" in shown
    llm = start("held=org/name")
    assert main(["models", "rm", "org/name"]) == 2
    assert "is used by process" in capsys.readouterr().err
    llm.unload_adapter("held")
    assert main(["models", "rm", "org/name"]) == 0
    assert list(hub_folder().rglob(WEIGHTS)) == []
