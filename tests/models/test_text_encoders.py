"""Hidden states and labels of text encoders equal transformers', whatever else is in the step (C28)."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING

from forebay import models
from forebay.base.errors import ModelError
from forebay.families import TEXT_ENCODERS
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_of
from forebay.layers.score_biases import AlibiSpec
from tests.families.given import HOSTILE
from tests.models.jina_bert import slope
from tests.models.text_encoders import CASES, compute, make_encoder, shared_encoder, some_ids

LENGTHS = (1, 19, 2, 40, 7)
CLOSE = {"rtol": 0, "atol": 1e-4}


@pytest.mark.parametrize("case", CASES)
def test_text_encoder_step_of_texts_gives_each_its_hidden_states_of_transformers(case, ops):
    oracle = shared_encoder(case)
    model = models.load(open_checkpoint(oracle.path), ops=ops, dtype=torch.float32)
    texts = [some_ids(length, seed, max(1, oracle.num_types)) for seed, length in enumerate(LENGTHS)]
    for ids, hidden in zip(texts, compute(model, texts), strict=True):
        torch.testing.assert_close(hidden, oracle.hidden(ids), **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_c28_text_encoder_other_texts_in_the_step_change_no_bit(case, native):
    model = models.load(open_checkpoint(shared_encoder(case).path), ops=native, dtype=torch.bfloat16)
    texts = [some_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    alone = [compute(model, [ids])[0] for ids in texts]
    for order in (texts, texts[::-1], [texts[3], *texts]):
        for ids, hidden in zip(order, compute(model, order), strict=True):
            assert torch.equal(hidden, alone[texts.index(ids)])


def test_text_encoder_in_bfloat16_errs_less_than_transformers_whose_stream_is_rounded(native):
    oracle = shared_encoder("bert")
    model = models.load(open_checkpoint(oracle.path), ops=native, dtype=torch.bfloat16)
    texts = [some_ids(length, seed) for seed, length in enumerate(LENGTHS)]
    rounded = replace(oracle, oracle=copy.deepcopy(oracle.oracle).bfloat16())
    errors = torch.zeros(2)
    for ids, hidden in zip(texts, compute(model, texts), strict=True):
        expected = oracle.hidden(ids)
        errors += torch.stack([(each.float() - expected).square().sum() for each in (hidden, rounded.hidden(ids))])
    assert errors[0] < 0.5 * errors[1], errors.tolist()


@pytest.mark.parametrize("head", ["text", "tokens"])
@pytest.mark.parametrize("case", [*TEXT_ENCODERS, "eurobert-biases", "modernbert-biases"])
def test_text_encoder_head_gives_the_logits_of_transformers(case, head, native):
    oracle = shared_encoder(case, head)
    model = models.load(open_checkpoint(oracle.path), ops=native, dtype=torch.float32)
    texts = [some_ids(length, seed, max(1, oracle.num_types)) for seed, length in enumerate(LENGTHS)]
    for ids, hidden in zip(texts, compute(model, texts), strict=True):
        given = hidden[:1] if head == "text" else hidden
        given = hidden.mean(0, keepdim=True) if head == "text" and case.endswith("-biases") else given
        torch.testing.assert_close(model.logits(given), oracle.logits(ids).view(len(given), -1), **CLOSE)


def test_mpnet_distances_up_to_the_longest_text_have_the_rows_of_transformers(native):
    oracle = shared_encoder("mpnet")
    model = models.load(open_checkpoint(oracle.path), ops=native, dtype=torch.float32)
    ids = some_ids(298, 1)
    torch.testing.assert_close(compute(model, [ids, ids[:150]])[0], oracle.hidden(ids), **CLOSE)


@pytest.mark.parametrize("heads", [1, 4, 6, 8, 12, 16])
def test_alibi_slopes_are_those_of_the_paper(heads):
    assert AlibiSpec(num_heads=heads).slopes == pytest.approx([slope(head, heads) for head in range(heads)], rel=1e-12)


def test_bert_with_alibi_is_a_jina_bert(tmp_path: Path, native):
    """As published files name the type, a text of several blocks of queries."""
    oracle = make_encoder("jina_bert_v2", tmp_path, max_position_embeddings=300)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.model_type == "jina_bert_v2"
    ids = some_ids(290, 1, 2)
    model = models.load(checkpoint, ops=native, dtype=torch.float32)
    torch.testing.assert_close(compute(model, [ids, ids[:150]])[0], oracle.hidden(ids), **CLOSE)


def test_every_text_encoder_has_a_case():
    assert {name.replace("-", "_") for name, _ in CASES.values()} == {*TEXT_ENCODERS, "gemma3_text"} <= CASES.keys()


@pytest.mark.parametrize("model_type", TEXT_ENCODERS)
def test_text_encoder_config_of_transformers_has_its_sizes_and_nothing_unknown(model_type):
    needed = CASES[model_type][1] if model_type == "deberta_v2" else {}  # its defaults describe no model that is served
    theirs = CONFIG_MAPPING[CASES[model_type][0]](**needed)
    ours = config_of(theirs.to_dict())
    assert (ours.num_layers, ours.hidden_size) == (theirs.num_hidden_layers, theirs.hidden_size)
    assert ours.max_position_embeddings + ours.position_offset == theirs.max_position_embeddings
    assert ours.unknown_options == ()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"num_attention_heads": 7}, "num_attention_heads"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"1": "a"}}, "id2label"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": 5}}, "id2label"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"position_embedding_type": "alibi", "feed_forward_type": "reglu"}, "feed_forward_type"),
        ({"position_embedding_type": "alibi", "hidden_act": "relu"}, "hidden_act"),
        ({"position_embedding_type": "alibi", "auto_map": {"AutoModel": "jinaai/v2-qk-post-norm--a.B"}}, "auto_map"),
    ],
)
def test_bert_field_that_cannot_be_served_is_refused_by_name(fields, name):
    with pytest.raises(ModelError, match=name):
        config_of({**CONFIG_MAPPING["bert"]().to_dict(), **fields})


@pytest.mark.parametrize(
    ("case", "fields", "name"),
    [
        ("deberta_v2", {"relative_attention": False}, "relative_attention"),
        ("deberta_v2", {"pos_att_type": "c2p"}, "pos_att_type"),
        ("deberta_v2", {"pos_att_type": [["p2c"], 7]}, "pos_att_type"),
        ("deberta_v2", {"conv_kernel_size": 3}, "conv_kernel_size"),
        ("deberta_v2", {"norm_rel_ebd": "batch"}, "norm_rel_ebd"),
        ("deberta_v2", {"position_buckets": 0}, "position_buckets"),
        ("deberta_v2", {"embedding_size": 12}, "embedding_size"),
        ("nomic_bert", {"moe_every_n_layers": 2}, "moe_every_n_layers"),
        ("eurobert", {"num_key_value_heads": 5}, "num_key_value_heads"),
        (
            "eurobert",
            {"architectures": ["EuroBertForSequenceClassification"], "classifier_pooling": "late"},
            "classifier_pooling",
        ),
        ("gemma3_text", {"architectures": ["Gemma3TextForSequenceClassification"]}, "architectures"),
    ],
)
def test_text_encoder_field_that_cannot_be_served_is_refused_by_name(case, fields, name):
    model_type, own = CASES[case]
    own = {"num_hidden_layers": 3, **own}
    with pytest.raises(ModelError, match=name):
        config_of({**CONFIG_MAPPING[model_type](**own).to_dict(), **fields})


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", [*TEXT_ENCODERS, "gemma3_text"])
def test_text_encoder_any_value_in_any_field_is_refused_or_gives_a_model(case):
    model_type, own = CASES[case]
    fields = CONFIG_MAPPING[model_type](**{"num_hidden_layers": 3, **own}).to_dict()
    old = {"rope_theta", "rope_scaling", "layer_types", "problem_type", "id2label", "architectures"}
    for name in sorted({*fields, *old} - {"model_type"}):
        for value in HOSTILE:
            try:
                config = config_of({**fields, name: value})
            except ModelError:
                continue
            if config.num_layers <= 3:
                models.describe(config)


def test_deberta_text_longer_than_its_distances_has_the_hidden_states_of_transformers(native):
    oracle = shared_encoder("deberta_v2")
    model = models.load(open_checkpoint(oracle.path), ops=native, dtype=torch.float32)
    ids = some_ids(64, 1)
    torch.testing.assert_close(compute(model, [ids, ids[:3]])[0], oracle.hidden(ids), **CLOSE)


def test_text_encoder_files_with_a_prefix_and_old_names_load_alike(tmp_path: Path, native):
    """As of a model that was trained as a masked one, and converted from TensorFlow."""
    from safetensors.torch import load_file, save_file

    oracle = make_encoder("bert", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {f"bert.{name}": tensor for name, tensor in stored.items()}
    for new, old in (("weight", "gamma"), ("bias", "beta")):
        renamed = {name.replace(f"LayerNorm.{new}", f"LayerNorm.{old}"): tensor for name, tensor in renamed.items()}
    save_file({**renamed, "cls.predictions.bias": torch.zeros(96)}, tmp_path / "model.safetensors")
    model = models.load(open_checkpoint(tmp_path), ops=native, dtype=torch.float32)
    ids = some_ids(9, 1)
    torch.testing.assert_close(compute(model, [ids])[0], oracle.hidden(ids), **CLOSE)
