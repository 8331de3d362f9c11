"""What sentence-transformers' files say is what is done, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ModelError
from forebay.families.base.embedding import Dense, Embedding, dense_files, dense_layers, embedding_of
from forebay.families.checkpoint import open_checkpoint
from tests.formats.gguf_files import llama_metadata, llama_tensors, write_gguf

BODY = {"path": "", "type": "sentence_transformers.models.Transformer"}
NORM = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
POOL = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
SCORE = {"path": "1_LogitScore", "type": "sentence_transformers.cross_encoder.modules.LogitScore"}


def found(folder: Path, files: dict[str, Any]) -> Embedding:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return embedding_of(folder)


def flags(**true: bool) -> dict[str, Any]:
    names = ("cls_token", "mean_tokens", "max_tokens", "weightedmean_tokens", "lasttoken")
    return {"word_embedding_dimension": 8} | {f"pooling_mode_{name}": true.get(name, False) for name in names}


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        (flags(lasttoken=True), "last"),
        (flags(mean_tokens=True), "mean"),
        (flags(cls_token=True), "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
        (flags(max_tokens=True), None),
        (flags(mean_tokens=True, cls_token=True), None),
        (flags(), None),
        ({"pooling_mode": "weightedmean"}, None),
    ],
)
def test_the_pooling_is_the_files(tmp_path: Path, config: dict[str, Any], pooling: str | None) -> None:
    embedding = found(tmp_path, {"1_Pooling/config.json": config})
    assert embedding.is_embedder
    assert embedding.normalize
    assert bool(embedding.refused) == (pooling is None)
    assert pooling is None or (embedding.pooling, embedding.why) == (pooling, "1_Pooling/config.json says so")


def test_length_is_one_where_a_module_says_so(tmp_path: Path) -> None:
    pooling = {"1_Pooling/config.json": flags(lasttoken=True)}
    assert not found(tmp_path, {**pooling, "modules.json": [BODY, POOL]}).normalize
    assert found(tmp_path, {**pooling, "modules.json": [BODY, POOL, NORM]}).normalize


def test_what_else_the_files_want_is_refused_by_name(tmp_path: Path) -> None:
    of_tokens = {"path": "1_Dense", "type": "sentence_transformers.models.Dense"}
    files = {"modules.json": [BODY, of_tokens, POOL], "1_Pooling/config.json": flags(mean_tokens=True)}
    assert "Dense" in found(tmp_path, files).refused


def with_dense(folder: Path, *configs: dict[str, Any]) -> Path:
    modules = [{"path": f"{i}_Dense", "type": "sentence_transformers.models.Dense"} for i in range(2, 2 + len(configs))]
    files = {f"{i}_Dense/config.json": config for i, config in enumerate(configs, 2)}
    found(folder, {"1_Pooling/config.json": flags(mean_tokens=True), "modules.json": [BODY, POOL, *modules], **files})
    return folder


def dense(inputs: object, outputs: object, activation: str = "linear.Identity", bias: object = False) -> dict[str, Any]:
    activation = f"torch.nn.modules.{activation}"
    return {"in_features": inputs, "out_features": outputs, "bias": bias, "activation_function": activation}


def test_dense_layers_are_read_in_order(tmp_path: Path) -> None:
    path = with_dense(tmp_path, dense(8, 32), {"in_features": 32, "out_features": 6})
    first, second = Dense(folder="2_Dense", inputs=8, outputs=32, bias=False, activation=""), "3_Dense"
    assert dense_layers(path) == (first, Dense(folder=second, inputs=32, outputs=6, bias=True, activation="tanh"))
    with pytest.raises(ModelError, match=r"2_Dense/model.safetensors is missing"):
        dense_files(path)


@pytest.mark.parametrize(
    ("configs", "named"),
    [
        ([dense(0, 4)], "in_features"),
        ([dense(4, 1 << 20)], "out_features"),
        ([dense(4, True)], "out_features"),
        ([dense(4, 4, bias="no")], "bias"),
        ([dense(4, 4, "activation.Softmax")], "Softmax"),
        ([dense(4, 5), dense(4, 5)], "3_Dense has 4 inputs"),
        ([dense(4, 4)] * 9, "9 dense layers"),
    ],
)
def test_dense_layers_that_cannot_be_served_are_refused(
    tmp_path: Path, configs: list[dict[str, Any]], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        dense_layers(with_dense(tmp_path, *configs))


def test_a_judge_names_its_tokens(tmp_path: Path) -> None:
    config = {"true_token_id": 9, "false_token_id": 4}
    files = {"modules.json": [BODY, SCORE], "1_LogitScore/config.json": config}
    assert found(tmp_path, files).judges_by == (9, 4)
    alone = {**config, "false_token_id": None}
    assert "no two tokens" in found(tmp_path, {**files, "1_LogitScore/config.json": alone}).refused


@pytest.mark.parametrize(
    ("kind", "pooling"), [(0, None), (1, "mean"), (2, "cls"), (3, "last"), (4, None), (5, None), (True, None)]
)
def test_pooling_of_a_gguf_file_is_the_files(tmp_path: Path, kind: int, pooling: str | None) -> None:
    path = write_gguf(tmp_path / "m.gguf", llama_metadata(pooling_type=kind), llama_tensors("Q8_0"), type_name="Q8_0")
    if kind is True or kind == 5:
        with pytest.raises(ModelError, match=r"llama.pooling_type is"):
            embedding_of(path)
        return
    embedding = embedding_of(path)
    assert embedding.is_embedder == (kind != 0)
    assert ("llama.pooling_type is 4" in embedding.refused) == (kind == 4)
    assert pooling is None or (embedding.pooling, embedding.why) == (pooling, "llama.pooling_type says so")
    assert open_checkpoint(path).config.model_type == "llama"


def test_embedding_of_gguf_file_that_changes_is_that_of_its_new_state(tmp_path: Path) -> None:
    path, tensors = tmp_path / "m.gguf", llama_tensors("Q8_0")
    for kind, pooling in ((1, "mean"), (2, "cls"), (2, "cls"), (3, "last")):
        write_gguf(path, llama_metadata(pooling_type=kind), tensors, type_name="Q8_0")
        assert embedding_of(path).pooling == pooling


@pytest.mark.parametrize(
    ("own", "extra", "message"),
    [
        ({"attention.causal": False}, {}, "attention to later tokens is not served"),
        ({}, {"general.type": "adapter"}, "general.type is 'adapter'"),
        ({"classifier.output_labels": ["yes", "no"]}, {}, "classifier.output_labels' is not supported"),
        ({"dense_2_feat_in": 8}, {}, "dense_2_feat_in' is not supported"),
    ],
)
def test_gguf_keys_that_change_a_model_are_refused_with_the_reason(
    own: dict[str, Any], extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, llama_metadata(**own), llama_tensors("Q8_0"), type_name="Q8_0", extra=extra)
    with pytest.raises(ModelError, match=message):
        open_checkpoint(path)


def test_gguf_keys_that_say_what_is_done_anyway_are_accepted(tmp_path: Path) -> None:
    own, extra = llama_metadata(**{"attention.causal": True}), {"general.type": "model"}
    assert (
        open_checkpoint(
            write_gguf(tmp_path / "m.gguf", own, llama_tensors("Q8_0"), type_name="Q8_0", extra=extra)
        ).config.num_layers
        == 1
    )


def test_nothing_said_is_the_last_token(tmp_path: Path) -> None:
    assert embedding_of(tmp_path) == embedding_of(tmp_path / "model.gguf") == Embedding()


@pytest.mark.parametrize("modules", [{}, [3], [{**SCORE, "path": "../elsewhere"}], [{**SCORE, "path": 3}]])
def test_files_that_are_something_else_are_an_error(tmp_path: Path, modules: Any) -> None:
    with pytest.raises(ModelError):
        found(tmp_path, {"modules.json": modules})


def test_pooling_module_in_another_folder_is_read_and_a_missing_one_is_refused_by_name(tmp_path: Path) -> None:
    module = {**POOL, "path": "2_Pooling"}
    refused = found(tmp_path, {"modules.json": [BODY, module, NORM]})
    assert refused.refused == "modules.json names a Pooling, and 2_Pooling/config.json is missing"
    read = found(tmp_path, {"2_Pooling/config.json": flags(cls_token=True)})
    assert (read.refused, read.pooling, read.normalize) == ("", "cls", True)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"prompts": ["query"]}, "prompts"),
        ({"prompts": {"query": 5}}, "prompts"),
        ({"prompts": {str(i): "" for i in range(257)}}, "prompts"),
        ({"prompts": {"query": "x" * 4097}}, "prompts"),
        ({"prompts": {"query": "x"}, "default_prompt_name": "document"}, "default_prompt_name"),
    ],
)
def test_prompts_that_are_none_are_refused_by_name(tmp_path: Path, config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=f"{named} is"):
        found(tmp_path, {"config_sentence_transformers.json": config})


def test_prompts_of_tasks_are_read_with_the_default(tmp_path: Path) -> None:
    config = {"prompts": {"query": "query: ", "passage": ""}, "default_prompt_name": None}
    read = found(tmp_path, {"config_sentence_transformers.json": config})
    assert (read.prompts, read.default_prompt) == ((("query", "query: "), ("passage", "")), "")
    again = found(tmp_path, {"config_sentence_transformers.json": {**config, "default_prompt_name": "query"}})
    assert again.default_prompt == "query"
