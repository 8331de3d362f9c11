"""Adapters over HTTP: named by requests in every dialect, loaded, replaced and unloaded."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from forebay.cli.main import main
from tests.engine.adapters import make_adapter
from tests.integration.streams import ask
from tests.integration.test_processes import PATIENT, model
from tests.integration.tree import Tree, serving

__all__ = ["model"]  # a fixture
CHAT = [{"role": "user", "content": "hello"}]
LENGTH = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "three")):
        make_adapter(model, folder / name, seed=seed)
    outside = make_adapter(model, tmp_path_factory.mktemp("elsewhere") / "four", seed=4)
    (folder / "link").symlink_to(outside)
    shutil.copytree(folder / "one", folder / "broken")
    (folder / "broken" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    parts = load_file(folder / "one" / "adapter_model.safetensors")
    wider = {name: part.repeat(1, 2) if "lora_A" in name else part.repeat(2, 1) for name, part in parts.items()}
    deeper = {name.replace("layers.0.", "layers.97."): part for name, part in parts.items()}
    for name, tensors in (("wider", wider), ("deeper", deeper)):
        shutil.copytree(folder / "one", folder / name)
        save_file(tensors, folder / name / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, model: Path, root: Path) -> Iterator[Tree]:
    flags = ["--enable-lora", "--max-loras=3", f"--lora-root={root}", "--lora-modules", f"one={root / 'one'}"]
    with serving(tmp_path_factory.mktemp("adapted") / "tree", model, *PATIENT, *flags) as started:
        yield started


def load(client: httpx.Client, name: str, path: str | None = None, **fields: Any) -> httpx.Response:
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path or name, **fields})


def unload(client: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return client.post("/unload_lora_adapter", json={"lora_name": name, **fields})


def tokens(client: httpx.Client, name: str | None = None) -> str:
    named = {} if name is None else {"model": name}
    answer = client.post("/v1/completions", json={**ask([5, 6, 7], LENGTH, stream=False), **named})
    assert answer.status_code == 200, answer.text
    found: str = answer.json()["choices"][0]["text"]
    return found


def test_every_dialect_takes_an_adapter_as_its_model_and_names_it_in_its_answer(tree: Tree) -> None:
    with tree.client() as client:
        base = client.get("/v1/models").json()["data"][0]["id"]
        of_one, of_base = tokens(client, "one"), tokens(client)
        assert of_one != of_base == tokens(client, base)
        assert tokens(client, f"{base}:one") == of_one
        chats = {
            "/v1/chat/completions": {"messages": CHAT, "max_tokens": 4},
            "/v1/messages": {"messages": CHAT, "max_tokens": 4},
            "/v1/responses": {"input": "hello", "max_output_tokens": 4},
            "/v1/embeddings": {"input": "hello"},
        }
        for path, body in chats.items():
            answers = [client.post(path, json={**body, "model": name}).json() for name in ("one", base)]
            assert [answer["model"] for answer in answers] == ["one", base], path
            assert client.post(path, json={**body, "model": "unknown"}).status_code == 404, path
            named = [answer["usage"].get("adapter") for answer in answers]
            assert named == ["one", None], path
        native = {"text": "hello", "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
        answers = [client.post("/generate", json={**native, **more}).json() for more in ({"lora_path": "one"}, {})]
        assert answers[0]["text"] != answers[1]["text"]
        assert [answer["meta_info"].get("adapter") for answer in answers] == ["one", None]
        refused = client.post("/generate", json={**native, "lora_path": "unknown"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "lora_path")
        assert "one" in refused.json()["error"]["message"]


def test_ollama_s_clients_see_adapters_as_models(tree: Tree) -> None:
    with tree.client() as client:
        base, one = client.get("/api/tags").json()["models"]
        assert (one["name"], one["details"]["parent_model"]) == ("one", base["name"])
        assert 0 < one["size"] < base["size"]
        assert "parent_model" not in base["details"]
        for name in ("one", "one:latest"):
            assert client.post("/api/show", json={"model": name}).json()["details"]["parent_model"] == base["name"]
        for path, body in (("/api/chat", {"messages": CHAT}), ("/api/generate", {"prompt": "hello"})):
            options = {"temperature": 0, "num_predict": 8}
            bodies = [{**body, "model": each["name"], "stream": False, "options": options} for each in (one, base)]
            adapted, plain = (client.post(path, json=each).json() for each in bodies)
            assert (adapted["model"], adapted["adapter"], plain["model"]) == ("one", "one", base["name"])
            assert "adapter" not in plain
            key = "message" if path == "/api/chat" else "response"
            assert adapted[key] != plain[key]
        assert client.post("/api/show", json={"model": "unknown"}).status_code == 404


def test_models_list_adapters_with_their_folder_and_their_model(tree: Tree, root: Path) -> None:
    with tree.client() as client:
        base, *adapters = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["root"], card["parent"]) for card in adapters] == [
            ("one", str(root / "one"), base["id"])
        ]
        assert "parent" not in base
        assert client.get("/v1/models/one").json()["parent"] == base["id"]
        usage = client.post("/v1/completions", json={**ask([5], 2, stream=False), "model": "one"}).json()["usage"]
        assert usage["adapter"] == "one"
        metrics = client.get("/metrics").text
        assert 'forebay:lora_requests{adapter="one"} 0.0' in metrics
        assert 'forebay:pool_slots{holder="running",pool="adapter"} 1.0' in metrics


def test_an_adapter_is_loaded_replaced_and_unloaded(tree: Tree) -> None:
    with tree.client() as client:
        assert client.post("/v1/completions", json={**ask([5], 2), "model": "two"}).status_code == 404
        answer = load(client, "two").json()
        assert (answer["success"], sorted(answer["loaded_adapters"])) == (True, ["one", "two"])
        of_two = tokens(client, "two")
        again = load(client, "two", "three")
        assert (again.status_code, again.json()["error"]["code"]) == (409, "adapter_loaded")
        assert load(client, "two", "three", load_inplace=True).status_code == 200
        assert tokens(client, "two") != of_two
        assert sorted(unload(client, "two").json()["loaded_adapters"]) == ["one"]
        assert client.post("/v1/completions", json={**ask([5], 2), "model": "two"}).status_code == 404
        assert unload(client, "two").status_code == 404


@pytest.mark.parametrize(
    ("name", "path", "status", "code"),
    [
        ("new", "link", 400, "invalid_value"),
        ("new", "../adapters", 400, "invalid_value"),
        ("new", "/etc", 400, "invalid_value"),
        ("new", "nothing", 400, "invalid_adapter"),
        ("new", "org/name", 400, "invalid_value"),
        ("new", "broken", 400, "invalid_adapter"),
        ("n" * 129, "two", 400, "invalid_value"),
        ("a\u0007", "two", 400, "invalid_value"),
    ],
)
def test_what_cannot_be_loaded_has_one_line_and_leaves_the_slots_free(
    tree: Tree, name: str, path: str, status: int, code: str
) -> None:
    with tree.client() as client:
        refused = load(client, name, path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
        assert "\n" not in refused.json()["error"]["message"]
        assert 'forebay:pool_slots{holder="free",pool="adapter"} 2.0' in client.get("/metrics").text


@pytest.mark.parametrize(("path", "why"), [("wider", "of this model and rank 4 it would be"), ("deeper", "layers.97.")])
def test_adapter_of_another_base_is_refused_by_its_shapes_and_layers_in_openai_s_form(
    tree: Tree, path: str, why: str
) -> None:
    with tree.client() as client:
        refused = load(client, "new", path)
        error = refused.json()["error"]
        unknown = client.post("/v1/completions", json={**ask([5], 2), "model": "new"})
    assert refused.status_code == 400
    assert refused.json().keys() == {"error"}
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "lora_path", "invalid_adapter")
    assert why in error["message"]
    assert unknown.status_code == 404


def test_a_full_server_names_who_holds_its_slots(tree: Tree) -> None:
    with tree.client() as client:
        for name in ("two", "three"):
            assert load(client, name).status_code == 200
        refused = load(client, "four", "two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "adapter_slots_taken")
        assert "three" in refused.json()["error"]["message"]
        for name in ("two", "three"):
            assert unload(client, name).status_code == 200


def test_chat_of_the_command_line_is_answered_by_a_server_s_adapter(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for words in (["--lora", "one"], []):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
        assert main(["chat", "--url", tree.url, *words, "--temperature=0", "--max-tokens=8"]) == 0
        title, _, answer = capsys.readouterr().out.partition("\n")
        assert title.startswith("one at http") == bool(words)
        answers.append(answer)
    assert answers[0] != answers[1]
    assert main(["chat", "--url", tree.url, "--lora", "unknown"]) == 2
    assert "does not serve unknown; it serves" in capsys.readouterr().err
