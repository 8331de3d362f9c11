"""Each layout of real repositories: planned, pulled, resumed and served."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay.base.errors import ModelError
from forebay.cli.main import main
from forebay.engine.client.llm import LLM
from forebay.formats.gguf_parts import part_names
from forebay.formats.mmproj_files import mmproj_beside
from forebay.formats.store import find_model
from forebay.requests.sampling_params import SamplingParams
from forebay.text.tokenizer_saving import save_tokenizer
from tests.formats import gguf_files, hub_server
from tests.text.tiny_tokenizer import tiny_metadata

CHUNK = 1 << 12  # bytes that the client writes at a time
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, embedded_model: Path) -> Files:
    """The files of a model of `forebay models make`, with a small tokenizer, which is read faster than that of the
    default model, and of a GGUF file."""
    folder = tmp_path_factory.mktemp("hub") / "made"
    assert main(["models", "make", "--like", "llama", "--out", str(folder), "--hidden-size", "32"]) == 0
    save_tokenizer(tiny_metadata(600), folder)
    file = gguf_files.write_gguf(
        folder.parent / "m.gguf",
        gguf_files.llama_metadata(),
        gguf_files.llama_tensors("Q8_0"),
        type_name="Q8_0",
        extra=gguf_files.TOKENIZER,
    )
    parts = folder.parent / "parts"
    parts.mkdir()
    gguf_files.write_gguf(
        parts / "m-Q8_0.gguf",
        gguf_files.llama_metadata(),
        gguf_files.llama_tensors("Q8_0"),
        type_name="Q8_0",
        part_tensors=6,
        extra=gguf_files.TOKENIZER,
    )
    files = [*folder.iterdir(), *parts.iterdir()]
    return {path.name: path.read_bytes() for path in files} | {"m-Q8_0.gguf": file.read_bytes()}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Hub]:
    with hub_server.Hub({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("forebay.formats.hub.get_token", lambda: None)
        monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
        monkeypatch.setattr("time.sleep", lambda seconds: None)  # before the library tries again
        yield server


def single(made: Files) -> Files:
    return {name: data for name, data in made.items() if not name.endswith(".gguf")}


def sharded(made: Files) -> Files:
    data = made["model.safetensors"]
    header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    index = {"weight_map": {name: SHARD for name in header if name != "__metadata__"}}
    rest = {name: value for name, value in single(made).items() if name != "model.safetensors"}
    return {**rest, SHARD: data, INDEX: json.dumps(index).encode()}


def no_generation_config(made: Files) -> Files:
    return {name: data for name, data in single(made).items() if name != "generation_config.json"}


def several_gguf(made: Files) -> Files:
    return {"m-Q8_0.gguf": made["m-Q8_0.gguf"], "m-Q4_K_M.gguf": made["m-Q8_0.gguf"] + bytes(32), "README.md": b"#"}


def both(made: Files) -> Files:
    return {**single(made), "m-Q8_0.gguf": made["m-Q8_0.gguf"]}


def gguf_in_parts(made: Files) -> Files:
    return {"m-Q4_K_M.gguf": made["m-Q8_0.gguf"] + bytes(32)} | {
        f"Q8_0/{name}": data for name, data in made.items() if "-of-" in name
    }


LAYOUTS: dict[str, tuple[Callable[[Files], Files], str, str]] = {
    "single": (single, "", "model.safetensors"),
    "sharded": (sharded, "", SHARD),
    "gguf beside safetensors": (both, "", "model.safetensors"),
    "gguf beside safetensors, named": (both, ":Q8_0", "m-Q8_0.gguf"),
    "several gguf": (several_gguf, ":Q8_0", "m-Q8_0.gguf"),
    "only gguf": (lambda made: {"m-Q8_0.gguf": made["m-Q8_0.gguf"]}, "", "m-Q8_0.gguf"),
    "gguf in parts": (gguf_in_parts, ":Q8_0", "Q8_0/m-Q8_0-00001-of-00002.gguf"),
    "gguf in parts, a later one named": (
        gguf_in_parts,
        "/Q8_0/m-Q8_0-00002-of-00002.gguf",
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
    ),
    "no generation_config": (no_generation_config, "", "model.safetensors"),
}


@pytest.mark.quick(2)
@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pull_each_layout_resumes_and_stores_what_serve_opens(
    layout: str,
    hub: hub_server.Hub,
    made: Files,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, codes, weights = LAYOUTS[layout]
    monkeypatch.setattr("forebay.engine.lifecycle.bring.HEADER_BYTES", 8 * CHUNK)
    monkeypatch.setattr("forebay.engine.lifecycle.bring.LATER_HEADER_BYTES", 2 * CHUNK)
    hub.files = files(made)
    assert main(["plan", f"org/name{codes}"]) == 0
    fetched = hub.fetched()
    assert all(part.startswith("bytes=0-") for part in fetched), "a plan fetches no weights but a GGUF file's header"
    hub.asked.clear()
    hub.cut = [20 * CHUNK]
    assert main(["models", "pull", f"org/name{codes}"]) == 0
    assert hub.cut == [], "nothing broke off"
    path = Path(capsys.readouterr().out.splitlines()[-1])
    assert find_model(f"org/name{codes}") == path
    stored = path if codes or path.suffix == ".gguf" else path / weights
    assert stored.as_posix().endswith(f"/{weights}")
    parts = part_names(weights)
    for part in parts:
        assert (stored.parent / Path(part).name).read_bytes() == hub.files[part]
    assert (".gguf" in weights) == (path.suffix == ".gguf")
    kept = {entry.name for entry in stored.parent.iterdir()}
    assert {name for name in kept if name.endswith((".safetensors", ".gguf"))} == {Path(part).name for part in parts}
    assert ("generation_config.json" in kept) == ("generation_config.json" in hub.files)


def test_parts_of_the_hub_are_listed_and_removed_as_one_model(
    hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub.files = gguf_in_parts(made)
    assert main(["models", "pull", "org/name:Q8_0"]) == 0
    assert main(["models", "pull", "org/name:Q4_K_M"]) == 0
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    listed = {model["name"]: model["num_bytes"] for model in json.loads(capsys.readouterr().out)}
    size = sum(len(data) for name, data in hub.files.items() if "-of-" in name)
    assert listed["org/name/Q8_0/m-Q8_0-00001-of-00002.gguf"] == size
    assert [name for name in listed if "-of-" in name] == ["org/name/Q8_0/m-Q8_0-00001-of-00002.gguf"]
    assert main(["models", "rm", "org/name/Q8_0/m-Q8_0-00001-of-00002.gguf"]) == 0
    assert list((tmp_path / "hf").rglob("*-of-*")) == []
    left = [path for path in (tmp_path / "hf").rglob("blobs/*") if path.stat().st_size > 1 << 14]
    assert [path.stat().st_size for path in left] == [len(hub.files["m-Q4_K_M.gguf"])]


def test_pull_with_a_part_missing_at_the_hub_is_refused_before_weights(
    hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files = gguf_in_parts(made)
    del hub.files["Q8_0/m-Q8_0-00002-of-00002.gguf"]
    assert main(["models", "pull", "org/name:Q8_0"]) == 2
    assert "1 of 2 parts: Q8_0/m-Q8_0-00002-of-00002.gguf is missing" in capsys.readouterr().err
    assert hub.fetched() == []


def test_find_cached_model_with_a_part_missing_names_it_and_pull(hub: hub_server.Hub, made: Files) -> None:
    hub.files = gguf_in_parts(made)
    assert main(["models", "pull", "org/name:Q8_0"]) == 0
    find_model("org/name:Q8_0").with_name("m-Q8_0-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelError, match=r"Q8_0-00002-of-00002.gguf is missing.*forebay models pull org/name:Q8_0"):
        find_model("org/name:Q8_0")


@pytest.mark.slow
def test_llm_single_file_repository_answers_as_local_folder(hub: hub_server.Hub, made: Files, tmp_path: Path) -> None:
    hub.files = single(made)
    local = tmp_path / "local"
    local.mkdir()
    for name, data in hub.files.items():
        (local / name).write_bytes(data)
    greedy = SamplingParams(max_tokens=4, temperature=0.0)
    answers = []
    for name in ("org/name", str(local)):
        with LLM(name, dtype="float32", max_total_tokens=512, context_length=128) as llm:
            answers.append([output.token_ids for output in llm.generate(["Hello there"], greedy)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("config.json", "model.safetensors", "tokenizer.model"), "no tokenizer.json (only tokenizer.model)"),
        (("config.json", "model.safetensors"), "no tokenizer.json (no other tokenizer)"),
        (("tokenizer.json", "model.safetensors"), "no config.json, which names"),
    ],
)
def test_pull_missing_description_is_refused_before_weights(
    names: tuple[str, ...], message: str, hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files = {name: made.get(name, b"pieces") for name in names}
    assert main(["models", "pull", "org/name"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert hub.fetched() == []


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", ["same", "longer", "shorter"])
def test_pull_forged_small_file_is_refused_and_not_kept(
    size: str, hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    hub.files = single(made)
    honest = hub.files["tokenizer_config.json"]
    hub.forged["tokenizer_config.json"] = {
        "same": honest[:-2] + b" }",
        "longer": honest + b" " * (8 * CHUNK),
        "shorter": honest[:-1],
    }[size]
    assert main(["models", "pull", "org/name"]) == 2
    assert "tokenizer_config.json" in capsys.readouterr().err or size == "shorter"
    assert list((tmp_path / "hf").rglob("snapshots/*/tokenizer_config.json")) == []
    hub.forged.clear()
    assert main(["models", "pull", "org/name"]) == 0


@pytest.mark.long
def test_pull_hostile_etag_writes_nothing_outside_cache(hub: hub_server.Hub, made: Files, tmp_path: Path) -> None:
    hub.files, hub.etag = single(made), "../../../../outside"
    assert main(["models", "pull", "org/name"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert list(tmp_path.rglob("outside*")) == []


OID = "0" * 40


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"path": "../../config.json"}, "not a path inside a folder"),
        ({"path": "/etc/config.json"}, "not a path inside a folder"),
        ({"path": "a/../b.json"}, "not a path inside a folder"),
        ({"path": "a\0.json"}, "not a path inside a folder"),
        ({"oid": "../../../x"}, "announces x.json with the hash"),
        ({"size": -1}, "announces x.json with the hash"),
        ({"size": "many"}, "announces x.json with the hash"),
        ({"oid": None}, "announces x.json with the hash"),
        ({"lfs": {"oid": "../x", "size": 1, "pointerSize": 1}}, "announces x.json with the hash"),
        ({"lfs": {}}, "not that of a hub"),
    ],
)
def test_look_hostile_entry_is_refused_by_name(
    entry: dict[str, object],
    message: str,
    hub: hub_server.Hub,
    made: Files,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    hub.files = single(made)
    hub.listed = [{"type": "file", "path": "x.json", "size": 1, "oid": OID, **entry}]
    assert main(["models", "pull", "org/name"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.rglob("blobs")) == []


def test_look_hostile_commit_is_refused(hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str]) -> None:
    hub.files, hub.commit = single(made), "../../x"
    assert main(["models", "pull", "org/name"]) == 2
    assert "'../../x' as the commit" in capsys.readouterr().err


@pytest.mark.parametrize("revision", ["../../x", "a\0b", "a//b", ".."])
def test_pull_revision_outside_cache_is_refused(
    revision: str, hub: hub_server.Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "pull", "org/name", "--revision", revision]) == 2
    assert "can have no revision" in capsys.readouterr().err
    assert hub.asked == []


def test_pull_repository_name_of_no_hub_is_refused(hub: hub_server.Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "pull", "org/na--me"]) == 2
    assert "no repository can be called org/na--me" in capsys.readouterr().err


@pytest.mark.slow
def test_pull_of_a_gguf_model_fetches_the_encoder_of_its_repository(
    hub: hub_server.Hub, made: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files = {
        "q8/m-Q8_0.gguf": made["m-Q8_0.gguf"],
        "mmproj-F16.gguf": b"GGUF" + bytes(60),
        "mmproj-F32.gguf": bytes(128),
        "mmproj-other-F16.gguf": bytes(64),
    }
    assert main(["models", "pull", "org/name:Q8_0"]) == 0
    path = Path(capsys.readouterr().out.splitlines()[-1])
    folder = path.parents[1]
    there = {entry.relative_to(folder).as_posix() for entry in folder.rglob("*") if entry.is_file()}
    assert there == {"q8/m-Q8_0.gguf", "mmproj-F16.gguf"}
    assert mmproj_beside(path) == folder / "mmproj-F16.gguf"
