"""Models of a hub: named, looked at, fetched into the cache that all tools share, and gone on with after a break."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from huggingface_hub import scan_cache_dir, try_to_load_from_cache

from forebay.base.errors import ConfigError, ForebayError, ModelError
from forebay.cli.main import main
from forebay.families.small import small_config
from forebay.formats.hub import Hub
from forebay.formats.hub_names import HubModel, chosen_gguf, find_in_cache, hub_folder, hub_model
from forebay.formats.safetensors import why_no_weights
from forebay.formats.store import absent_model, find_model, hold, model_title, users_of
from tests.formats import hub_server
from tests.formats.hub_server import COMMIT

MODEL = HubModel("org/name")
CHUNK = 1 << 12  # bytes, of which what has come is written
WEIGHTS = bytes(range(256)) * 400
CONFIG = small_config("llama", hidden_size=32, num_layers=1, vocab_size=64)
SHARDS = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
TOKENIZER = {
    "added_tokens": [],
    "pre_tokenizer": _BYTES,
    "decoder": _BYTES,
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}
FILES = {
    "config.json": json.dumps(CONFIG).encode(),
    "tokenizer.json": json.dumps(TOKENIZER).encode(),
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}).encode(),
    **dict(zip(SHARDS, (WEIGHTS, WEIGHTS[::-1]), strict=True)),
    "consolidated.safetensors": b"the same once more",
    "pytorch_model.bin": b"the same, pickled",
    "original/params.json": b"{}",
    "README.md": b"# A model",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "onnx/config.json": b"{}",
}
WANTED = {"config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors.index.json", *SHARDS}
WANTED |= {"additional_chat_templates/tool_use.jinja", "1_Pooling/config.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    """What the environment says of hubs is this one, and nobody is logged in."""
    with hub_server.Hub(dict(FILES)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("forebay.formats.hub.get_token", lambda: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library tries again
        yield server


def nothing(done: int, total: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("org/name", MODEL),
        ("org/name:q4_k_m", HubModel("org/name", codes="Q4_K_M")),
        ("hf://org/name@v2/a/b.gguf", HubModel("org/name", "v2", "a/b.gguf")),
        ("hf://models/org/name", MODEL),
        ("name", None),
        ("./org/name", None),
        ("/org/name", None),
        ("org/name/x", None),
    ],
)
def test_a_name_of_the_hub_is_told_from_others(name: str, model: HubModel | None) -> None:
    assert hub_model(name) == model


GGUFS = [
    "m-Q4_K_M.gguf",
    "m-Q8_0.gguf",
    "m-UD-Q2_K_XL.gguf",
    "m-BF16-00001-of-00002.gguf",
    "m-BF16-00002-of-00002.gguf",
]
GGUFS += ["mmproj-F16.gguf", "m.mmproj-Q8_0.gguf", "m-mmproj.gguf", "m.imatrix.gguf"]
PARTS = [f"Q4_K_M/m-Q4_K_M-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("names", "asked", "found"),
    [
        (GGUFS, "", "m-Q4_K_M.gguf"),
        (GGUFS, "Q8_0", "m-Q8_0.gguf"),
        (GGUFS, "Q2_K_XL", "m-UD-Q2_K_XL.gguf"),
        (["only.gguf"], "", "only.gguf"),
        ([*GGUFS, "model.safetensors"], "", None),
        ([*GGUFS, "model.safetensors"], "Q8_0", "m-Q8_0.gguf"),
        (["pytorch_model.bin"], "", None),
        (GGUFS, "Q6_K", "no Q6_K; it has BF16, Q4_K_M, Q8_0, UD-Q2_K_XL"),
        (GGUFS, "BF16", "m-BF16-00001-of-00002.gguf"),
        (PARTS, "", PARTS[0]),
        ([*PARTS, "m-TQ1_0.gguf"], "TQ1_0", "m-TQ1_0.gguf"),
        (PARTS[::2], "Q4_K_M", f"org/name has 2 of 3 parts: {PARTS[1]} is missing"),
        (PARTS[1:], "", f"org/name has 2 of 3 parts: {PARTS[0]} is missing"),
        ([*PARTS, "m-Q4_K_M.gguf"], "Q4_K_M", f"such as hf://org/name/{PARTS[0]}"),
        (["m-Q8_0-00003-of-00002.gguf"], "Q8_0", "m-Q8_0-00003-of-00002.gguf"),
        (["a-Q8_0.gguf", "a-Q6_K.gguf"], "", "several GGUF files (Q6_K, Q8_0): name one, such as org/name:Q6_K"),
        (["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", "such as hf://org/name/a-Q8_0.gguf"),
    ],
)
def test_of_gguf_files_one_is_chosen_or_the_choice_is_named(names: list[str], asked: str, found: str | None) -> None:
    model = HubModel("org/name", codes=asked)
    if found is None or found in names:
        assert chosen_gguf(names, model) == found
    else:
        with pytest.raises(ModelError, match=re.escape(found)):
            chosen_gguf(names, model)


def test_pulling_fetches_what_is_served_and_other_tools_find_it(
    hub: hub_server.Hub, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="models pull org/name"):
        find_model("org/name")
    assert main(["models", "pull", "org/name"]) == 0
    said = capsys.readouterr()
    folder = Path(said.out.strip())
    assert "main (0123456789ab): 2 files of weights, 200.0 KiB" in said.err
    assert {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} == WANTED
    assert (folder / SHARDS[1]).read_bytes() == WEIGHTS[::-1]
    assert find_model("org/name") == find_model("hf://org/name") == folder
    assert model_title("org/name", folder) == model_title(str(folder), folder) == "org/name"
    found = try_to_load_from_cache("org/name", SHARDS[0], cache_dir=hub_folder())
    assert found == str(folder / SHARDS[0])
    hub.asked.clear()
    assert main(["models", "pull", "org/name"]) == 0
    assert hub.fetched() == []
    assert main(["models", "list", "--json"]) == 0
    (listed,) = [
        model for model in json.loads(capsys.readouterr().out.partition("\n")[2]) if model["name"] == "org/name"
    ]
    assert (listed["revision"], listed["num_bytes"]) == ("main", sum(len(FILES[name]) for name in WANTED))
    assert main(["models", "rm", "org/name"]) == 0
    assert absent_model("org/name") == MODEL
    assert scan_cache_dir(hub_folder()).size_on_disk == 0


def test_a_download_that_breaks_off_goes_on_where_it_was(hub: hub_server.Hub) -> None:
    repository = Hub().look(MODEL)
    hub.cut = [40_000]
    folder = Hub().fetch(repository, SHARDS[:1], nothing)
    assert (folder / SHARDS[0]).read_bytes() == WEIGHTS
    assert hub.fetched() == ["all", f"bytes={40_000 // CHUNK * CHUNK}-"]


def test_a_download_that_was_ended_goes_on_in_the_next_call(hub: hub_server.Hub) -> None:
    repository = Hub().look(MODEL)

    def until_half(done: int, total: int) -> None:
        if 2 * done > total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Hub().fetch(repository, SHARDS[:1], until_half)
    (kept,) = hub_folder().rglob("*.incomplete")
    size, counted = kept.stat().st_size, list[int]()
    assert 0 < size < len(WEIGHTS)
    folder = Hub().fetch(repository, SHARDS[:1], lambda done, total: counted.append(done))
    assert (folder / SHARDS[0]).read_bytes() == WEIGHTS
    assert hub.fetched() == ["all", f"bytes={size}-"]
    assert (counted[0], counted[-1]) == (size, len(WEIGHTS))
    assert not kept.exists()


def test_what_came_damaged_is_not_kept(hub: hub_server.Hub) -> None:
    repository = Hub().look(MODEL)
    files = {**repository.files, SHARDS[0]: replace(repository.files[SHARDS[0]], digest="0" * 64)}
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    with pytest.raises(ModelError, match=f"came with sha256 {digest}"):
        Hub().fetch(replace(repository, files=files), SHARDS[:1], nothing)
    assert list(hub_folder().rglob("*.incomplete")) == []


def test_the_token_goes_to_the_hub_and_not_to_where_it_sends_us(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.private = True
    monkeypatch.setattr("forebay.formats.hub.get_token", lambda: hub.token)
    assert main(["models", "pull", "org/name"]) == 0
    assert all("authorization" not in headers for _, path, headers in hub.asked if path.startswith("/blob/"))


@pytest.mark.parametrize(
    ("mood", "name", "message"),
    [
        ({}, "org/other", "has no model org/other, or it is private"),
        ({"private": True}, "org/name", "set HF_TOKEN"),
        ({"gated": True}, "org/name", "is gated, and no token is set: accept its terms at http"),
        ({}, "org/name@v9", "has no revision 'v9'"),
        ({}, "org/name:Q4_K_M", "it has no Q4_K_M"),
        ({"files": {"pytorch_model.bin": b"", "config.json": b"{}"}}, "org/name", "pickled (pytorch_model.bin)"),
        ({"files": {"adapter_config.json": b"{}"}}, "org/name", "LoRA adapter"),
        (
            {"files": {**FILES, "config.json": b'{"model_type": "foo"}'}},
            "org/name",
            "model_type 'foo' is not",
        ),
        ({"files": {k: v for k, v in FILES.items() if k != SHARDS[1]}}, "org/name", f"has no {SHARDS[1]}"),
        ({"files": {**FILES, "tokenizer.json": b"{}"}}, "org/name", "cannot be read as a tokenizer"),
        ({"files": {**FILES, "chat_template.jinja": b"{% if"}}, "org/name", "the chat template does not compile"),
    ],
)
def test_what_stands_in_the_way_is_said_before_weights_are_fetched(
    hub: hub_server.Hub, mood: dict[str, object], name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for attribute, value in mood.items():
        setattr(hub, attribute, value)
    assert main(["models", "pull", f"hf://{name}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert hub.fetched() == []


OTHERS: Final = [None, -1, 10**30, "x", [5], {}]
LISTED: Final = {
    "type": "file",
    "path": "a.bin",
    "size": 3,
    "oid": "b" * 40,
    "lfs": {"oid": "c" * 64, "size": 3, "pointerSize": 134},
    "lastCommit": {"id": "d" * 40, "title": "t", "date": "2026-01-01T00:00:00.000Z"},
}
REVISION: Final = {"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": "a"}], "tags": [], "cardData": {}}


def altered(value: Any) -> Iterator[Any]:
    """Yield documents with each of the `OTHERS` in the place of each part, and without each key."""
    yield from OTHERS
    if isinstance(value, dict):
        for key, part in value.items():
            yield {other: each for other, each in value.items() if other != key}
            yield from ({**value, key: each} for each in altered(part))
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from ([*value[:number], each, *value[number + 1 :]] for each in altered(part))


@pytest.mark.parametrize(("what", "document"), [("tree", [LISTED]), ("revision", REVISION)])
def test_hub_answer_with_another_type_anywhere_is_read_or_refused_in_words(
    hub: hub_server.Hub, what: str, document: object
) -> None:
    num_refused = num_read = 0
    answers = [*altered(document)]
    for answer in answers:
        hub.answers[what] = json.dumps(answer).encode()
        try:
            found = Hub().look(MODEL)
        except ForebayError as error:
            num_refused += "\n" not in error.message
        else:
            num_read += 1
            for file in found.files.values():
                assert (type(file.name), type(file.num_bytes), type(file.digest)) == (str, int, str)
    assert num_refused + num_read == len(answers), "each refusal is one line"
    assert min(num_refused, num_read) > 5


@pytest.mark.parametrize("what", ["tree", "revision"])
@pytest.mark.parametrize(
    "body", [b"", b"\xff\xfe", b"[" * 100_000, b"{", b"NaN", b"[1e999]", b"[" + b"9" * 5000 + b"]", b'["\\ud800"]']
)
def test_hub_answer_that_is_no_json_is_refused_in_words(hub: hub_server.Hub, what: str, body: bytes) -> None:
    hub.answers[what] = body
    with pytest.raises(ModelError, match=r"the answer of http://\S+ about org/name is not that of a hub"):
        Hub().look(MODEL)


@pytest.mark.parametrize("path", [5, None, ["a"], {"a": 1}, True])
def test_hub_tree_with_a_path_that_is_no_text_ends_the_command_in_one_line(
    hub: hub_server.Hub, path: object, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.listed = [{**LISTED, "path": path}]
    assert main(["models", "pull", "org/name"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "which is not a path inside a folder" in line or "is not that of a hub" in line


def test_what_does_not_fit_is_said_with_what_would_before_weights_are_fetched(
    hub: hub_server.Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = small_config("llama", hidden_size=4096, num_layers=64, vocab_size=64)
    hub.files["config.json"] = json.dumps(huge).encode()
    monkeypatch.setattr("forebay.config.machine.meminfo", lambda proc: {"MemAvailable": 12 << 30})
    assert main(["models", "pull", "org/name", "--dtype", "bfloat16"]) == 2
    assert "do not hold 24.0 GiB of weights: --quantization int4 needs" in capsys.readouterr().err
    assert hub.fetched() == []


def test_nothing_is_asked_offline_and_a_hub_that_is_not_there_is_named(
    hub: hub_server.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        Hub().look(MODEL)
    assert hub.asked == []
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ForebayError, match=r"check the network.*No file or folder is called org/name here"):
        Hub(endpoint="http://127.0.0.1:9").look(MODEL)


def test_of_a_cached_model_what_is_missing_is_named(hub: hub_server.Hub) -> None:
    client = Hub()
    repository = client.look(MODEL)
    client.fetch(repository, [*repository.descriptions, SHARDS[0]], nothing)
    client.settle(repository)
    with pytest.raises(ModelError, match=rf"1 files of org/name are missing \({SHARDS[1]}\)"):
        find_in_cache(MODEL)
    client.fetch(repository, SHARDS, nothing)
    assert find_in_cache(replace(MODEL, revision=COMMIT)) == find_in_cache(MODEL)


def test_a_folder_says_what_it_is_instead_of_a_model() -> None:
    assert "--lora-modules NAME=PATH" in why_no_weights(["adapter_config.json", "adapter_model.safetensors"])
    assert "neither model.safetensors nor" in why_no_weights(["config.json", "weights.safetensors"])


def test_who_holds_a_model_is_known(tmp_path: Path) -> None:
    assert users_of(tmp_path) == []
    held = hold(tmp_path)
    try:
        assert users_of(tmp_path) == [os.getpid()]
    finally:
        os.close(held)
