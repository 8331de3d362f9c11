"""GGUF files of text encoders give the hidden states and labels of the safetensors that they were made from."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay import models
from forebay.base.errors import ModelError
from forebay.engine.client.embedding import Texts
from forebay.families.base.embedding import embedding_of
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.stored_tensor import read_tensor
from forebay.ops import Ops
from tests.models.encoder_gguf import CONVERSIONS, write_encoder
from tests.models.text_encoders import TinyEncoder, compute, make_encoder, some_ids
from tests.together import together

LENGTHS = (1, 19, 2, 40)
GELU: dict[str, Any] = {"hidden_act": "gelu"}  # the one of llama.cpp's graph
CHANGES: dict[str, dict[str, Any]] = {"xlm_roberta": GELU, "gemma3_text": {"query_pre_attn_scalar": 24}}
LABELS = ("no", "yes", "perhaps")

Make = Callable[..., TinyEncoder]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A case's checkpoint, made once."""
    known: dict[tuple[str, str], TinyEncoder] = {}

    def made(case: str, head: str = "") -> TinyEncoder:
        if (case, head) not in known:
            more = {"id2label": dict(enumerate(LABELS))} if head else {}
            if head and case == "modernbert":
                more["classifier_pooling"] = "mean"
            folder = tmp_path_factory.mktemp(case)
            known[case, head] = make_encoder(case, folder, head=head, **CHANGES.get(case, {}), **more)
        return known[case, head]

    return made


@pytest.mark.whole
@pytest.mark.parametrize("case", CONVERSIONS)
def test_gguf_of_a_text_encoder_gives_its_hidden_states(case: str, make: Make, native: Ops, tmp_path: Path) -> None:
    source = make(case)
    folder = open_checkpoint(source.path)
    found = open_checkpoint(write_encoder(source.path, case, tmp_path / "m.gguf"))
    not_said = {
        "bos_token_id": None,
        "eos_token_ids": (),
        "in_bfloat16": True,
        "rms_norm_eps": 0.0,
        "unknown_options": (),
    }
    assert found.config.rms_norm_eps == pytest.approx(folder.config.rms_norm_eps)
    assert replace(found.config, **not_said) == replace(folder.config, **not_said)
    texts = [some_ids(length, seed, max(1, source.num_types)) for seed, length in enumerate(LENGTHS)]
    ours, theirs = (models.load(each, ops=native, dtype=torch.float32) for each in (found, folder))
    for got, expected in zip(compute(ours, texts), compute(theirs, texts), strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)  # the norm's epsilon is of single precision


def test_gguf_dense_layers_of_an_embedding_gemma_follow_the_pooling(make: Make, native: Ops, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    first, second = (rng.standard_normal(shape).astype(np.float32) for shape in ((96, 64), (32, 96)))
    more = {"dense_2.weight": first, "dense_3.weight": second}
    sizes = {"gemma-embedding__dense_2_feat_in": 64, "gemma-embedding__dense_3_feat_out": 32}
    path = write_encoder(make("gemma3_text").path, "gemma3_text", tmp_path / "m.gguf", more=more, **sizes)
    assert [(layer.inputs, layer.outputs) for layer in embedding_of(path).dense] == [(64, 96), (96, 32)]
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.vector_size == 32
    model = models.load(checkpoint, ops=native, dtype=torch.float32)
    pooled = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = pooled @ torch.from_numpy(first).T @ torch.from_numpy(second).T
    torch.testing.assert_close(model.logits(pooled), expected, rtol=0, atol=1e-4)


@together(
    "shapes, told",
    [
        ({"dense_2": (96, 48)}, "dense_2 has 48 inputs; hidden states have 64 numbers"),
        ({"dense_2": (96, 64), "dense_3": (32, 64)}, "dense_3 has 64 inputs, and dense_2 before it 96 outputs"),
        ({"dense_3": (64,)}, "'dense_3' has the shape (64,), which is no matrix"),
    ],
)
def test_gguf_dense_layers_of_other_sizes_are_refused(
    shapes: dict[str, tuple[int, ...]], told: str, make: Make, tmp_path: Path
) -> None:
    more = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()}
    path = write_encoder(make("gemma3_text").path, "gemma3_text", tmp_path / "m.gguf", more=more)
    with pytest.raises(ModelError, match=re.escape(told)):
        open_checkpoint(path)


@pytest.mark.parametrize("case", ["xlm_roberta", "modernbert"])
def test_gguf_of_a_classifier_gives_the_labels_of_safetensors(
    case: str, make: Make, native: Ops, tmp_path: Path
) -> None:
    source = make(case, "text")
    path = write_encoder(source.path, case, tmp_path / "m.gguf", labels=LABELS)
    checkpoint = open_checkpoint(path)
    assert checkpoint.config.labels == LABELS
    model = models.load(checkpoint, ops=native, dtype=torch.float32)
    ids = some_ids(19, 3)
    (hidden,) = compute(model, [ids])
    given = hidden.mean(0, keepdim=True) if case == "modernbert" else hidden[:1]
    torch.testing.assert_close(model.logits(given)[0], source.logits(ids), rtol=0, atol=1e-4)


def test_gguf_rank_pooling_of_a_classifier_is_served_and_of_another_model_refused(make: Make, tmp_path: Path) -> None:
    ranked = {"bert__pooling_type": 4}
    path = write_encoder(make("xlm_roberta", "text").path, "xlm_roberta", tmp_path / "m.gguf", labels=LABELS, **ranked)
    assert not embedding_of(path).refused
    path = write_encoder(make("bert").path, "bert", tmp_path / "n.gguf", **ranked)
    assert "scores by a classifier's head" in embedding_of(path).refused


def test_gguf_pooling_of_a_text_encoder_is_that_of_its_file(make: Make, tmp_path: Path) -> None:
    for number, name in ((1, "mean"), (2, "cls"), (3, "last")):
        path = write_encoder(make("bert").path, "bert", tmp_path / f"{name}.gguf", bert__pooling_type=number)
        found = embedding_of(path)
        assert (found.pooling, found.is_embedder, found.normalize) == (name, True, True)


@pytest.mark.parametrize(
    ("case", "changes", "told"),
    [
        ("bert", {"bert__attention__causal": True}, "attention to later tokens"),
        ("bert", {"bert__attention__head_count": 5}, "num_attention_heads is 5"),
        ("bert", {"bert__block_count": 1 << 20}, "num_hidden_layers is 1048576"),
        ("bert", {"bert__context_length": 0}, "max_position_embeddings is 0"),
        ("bert", {"bert__expert_gating_func": 2}, "'bert.expert_gating_func' is not supported"),
        ("roberta", {"tokenizer__ggml__padding_token_id": 1 << 20}, "padding_token_id is 1048576"),
        ("roberta", {"bert__context_length": "64"}, "context_length is '64'"),
        ("modernbert", {"modern-bert__rope__freq_base": 0.0}, "a base without scaling"),
        ("modernbert", {"modern-bert__attention__sliding_window_pattern": 0}, "global_attn_every_n_layers is 0"),
        ("nomic_bert", {"nomic-bert__rope__freq_base": -1.0}, "rope_theta"),
    ],
    ids=str,
)
def test_gguf_hostile_metadata_of_a_text_encoder_are_refused(
    case: str, changes: dict[str, Any], told: str, make: Make, tmp_path: Path
) -> None:
    path = write_encoder(make(case).path, case, tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelError, match=re.escape(told)):
        open_checkpoint(path)


def test_gguf_labels_of_another_number_are_refused(make: Make, tmp_path: Path) -> None:
    path = write_encoder(make("xlm_roberta", "text").path, "xlm_roberta", tmp_path / "m.gguf", labels=LABELS[:2])
    with pytest.raises(ModelError, match="a text for each of the 3 outputs"):
        open_checkpoint(path)


def test_gguf_classifier_without_its_pooler_is_refused(make: Make, tmp_path: Path) -> None:
    path = write_encoder(
        make("xlm_roberta", "text").path,
        "xlm_roberta",
        tmp_path / "m.gguf",
        labels=LABELS,
        tokenizer__ggml__model="bert",
    )
    with pytest.raises(ModelError, match="a classifier without its pooler"):
        open_checkpoint(path)


def test_gguf_first_rows_of_positions_are_those_that_no_token_has(make: Make, tmp_path: Path) -> None:
    source = make("roberta")
    checkpoint = open_checkpoint(write_encoder(source.path, "roberta", tmp_path / "m.gguf"))
    name = "embeddings.position_embeddings.weight"
    found, expected = (read_tensor(each.tensors[name]) for each in (checkpoint, open_checkpoint(source.path)))
    np.testing.assert_array_equal(found[2:], expected[2:])
    assert found.shape == expected.shape


def test_texts_of_a_gguf_file_are_those_of_its_text_encoder(make: Make, tmp_path: Path) -> None:
    ranker = write_encoder(make("xlm_roberta", "text").path, "xlm_roberta", tmp_path / "m.gguf", labels=LABELS)
    embedder = write_encoder(make("bert").path, "bert", tmp_path / "n.gguf")
    found = [Texts.of(str(path), "mean").encoder for path in (ranker, embedder)]
    assert [(each.model_type, each.labels, each.num_types) for each in found] == [
        ("xlm_roberta", LABELS, 1),
        ("bert", (), 2),
    ]


def test_texts_of_a_gguf_file_of_a_decoder_are_no_text_encoders(embedded_model: Path) -> None:
    assert Texts.of(str(embedded_model), "last").encoder is None
