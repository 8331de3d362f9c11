"""A text encoder in the engine: vectors of transformers, whatever is beside a text; and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from forebay.base.errors import ConfigError, GenerationError, InvalidRequest, ModelError
from forebay.engine.client.embedding import Texts
from forebay.engine.client.llm import LLM
from forebay.engine.client.writing import output_of
from forebay.families.config.model_config import config_from_folder
from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from tests.kernels import NATIVE
from tests.models.text_encoders import VOCAB, TinyEncoder, make_encoder, some_ids, write_tokenizer

SETTINGS: dict[str, Any] = {
    "kv_cache_bytes": "16MiB", "num_threads": 1, "dtype": "float32", "kernels": NATIVE, "log_level": "warning",
}  # fmt: skip
TEXTS = ["a forebay", "b" * 30, "", "turbine", "f o r e b a y", "the pool above a turbine is", "x y z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "bert"
    make_encoder("bert", path)
    write_tokenizer(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_running_requests=8, **SETTINGS) as made:
        yield made


def test_embed_text_encoder_gives_the_means_of_transformers(folder: Path, llm: LLM) -> None:
    oracle = make_encoder("bert", folder.parent / "again")
    for output in llm.embed(TEXTS):
        mean = torch.nn.functional.normalize(oracle.hidden(output.prompt_token_ids).mean(dim=0), dim=0)
        torch.testing.assert_close(torch.from_numpy(output.embedding), mean, rtol=0, atol=1e-4)
        assert output.cache.cached_tokens == 0


def with_dense(folder: Path, *sizes: int, seed: int = 0) -> list[torch.nn.Module]:
    """Add dense layers of these sizes to the checkpoint, every second one with a bias and tanh, and return them."""
    generator, modules = torch.Generator().manual_seed(seed), [{"path": "1_Pooling", "type": "models.Pooling"}]
    layers: list[torch.nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        bias, own = i % 2 == 1, folder / f"{i + 2}_Dense"
        layer = torch.nn.Linear(inputs, outputs, bias=bias)
        for values in layer.parameters():
            values.data.normal_(0, 0.3, generator=generator)
        own.mkdir()
        save_file({f"linear.{name}": tensor for name, tensor in layer.state_dict().items()}, own / "model.safetensors")
        activation = "activation.Tanh" if bias else "linear.Identity"
        config = {"in_features": inputs, "out_features": outputs, "bias": bias}
        (own / "config.json").write_text(
            json.dumps({**config, "activation_function": f"torch.nn.modules.{activation}"})
        )
        modules.append({"path": own.name, "type": "models.Dense"})
        layers += [layer, torch.nn.Tanh()] if bias else [layer]
    (folder / "modules.json").write_text(json.dumps([*modules, {"path": "9_Normalize", "type": "models.Normalize"}]))
    return layers


def test_embed_text_encoder_vectors_pass_through_the_dense_layers(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "dense"
    shutil.copytree(folder, path)
    through, oracle = torch.nn.Sequential(*with_dense(path, 48, 100, 20)), make_encoder("bert", tmp_path / "again")
    with LLM(str(path), **SETTINGS) as llm:
        outputs = llm.embed(TEXTS)
        for output in outputs:
            mean = oracle.hidden(output.prompt_token_ids).mean(dim=0)
            expected = torch.nn.functional.normalize(through(mean), dim=0)
            torch.testing.assert_close(torch.from_numpy(output.embedding), expected, rtol=0, atol=1e-4)
        assert len(llm.embed("a", dimensions=20)[0].embedding) == 20
        with pytest.raises(InvalidRequest, match="vectors have 20"):
            llm.embed("a", dimensions=21)
        with pytest.raises(InvalidRequest, match="no classification head"):
            llm.classify("a")


def test_embed_gemma_gives_the_means_of_transformers(tmp_path: Path) -> None:
    oracle = make_encoder("gemma3_text", tmp_path)
    write_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for output in llm.embed(TEXTS):
            mean = torch.nn.functional.normalize(oracle.hidden(output.prompt_token_ids).mean(dim=0), dim=0)
            torch.testing.assert_close(torch.from_numpy(output.embedding), mean, rtol=0, atol=1e-4)


def test_c28_embed_text_encoder_steps_and_neighbours_change_no_bit(folder: Path, llm: LLM) -> None:
    together = [output.embedding for output in llm.embed(TEXTS)]
    alone = [llm.embed(text)[0].embedding for text in TEXTS]
    with LLM(str(folder), max_running_requests=3, chunked_prefill_size=40, **SETTINGS) as narrow:
        assert narrow.info.context_length == 40
        others = [output.embedding for output in narrow.embed([*TEXTS[::-1], *TEXTS])]
    for i in range(len(TEXTS)):
        for other in (alone[i], others[len(TEXTS) + i], others[len(TEXTS) - 1 - i]):
            np.testing.assert_array_equal(together[i], other)


def test_text_encoder_with_a_prefix_cache_asked_for_computes_all_tokens(folder: Path) -> None:
    with LLM(str(folder), disable_radix_cache=False, pooling="last", **SETTINGS) as made:
        first, second = (made.embed("a forebay")[0] for _ in range(2))
    assert second.cache.cached_tokens == 0
    np.testing.assert_array_equal(first.embedding, second.embedding)


def test_text_encoder_refuses_generation_and_long_texts_with_what_it_can_do(llm: LLM) -> None:
    with pytest.raises(GenerationError, match="text encoder, which generates nothing"):
        llm.generate("a forebay")
    with pytest.raises(GenerationError, match="102 tokens; the context holds 64"):
        llm.embed("a " * 100)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"enable_lora": True}, "--enable-lora"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
    ],
)
def test_text_encoder_start_with_a_decoders_setting_is_refused(folder: Path, setting: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*makes vectors and scores of texts"):
        LLM(str(folder), **SETTINGS, **setting)


def with_token_layers(folder: Path, hidden_size: int) -> dict[str, torch.nn.Linear]:
    """Write the layers behind each token that BGE-M3 has."""
    generator = torch.Generator().manual_seed(4)
    layers = {"sparse_linear": torch.nn.Linear(hidden_size, 1), "colbert_linear": torch.nn.Linear(hidden_size, 20)}
    for name, layer in layers.items():
        for values in layer.parameters():
            values.data.normal_(0, 0.3, generator=generator)
        torch.save(layer.state_dict(), folder / f"{name}.pt")
    return layers


def test_tokens_have_the_weights_and_the_vectors_of_the_layers_behind_them(tmp_path: Path) -> None:
    oracle = make_encoder("xlm_roberta", tmp_path)
    write_tokenizer(tmp_path)
    layers = with_token_layers(tmp_path, 48)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        texts, ids = Texts.of(str(tmp_path), "cls"), [llm.tokenizer.encode(text) for text in TEXTS]
        outputs = [output_of(each, llm.tokenizer) for each in ids]

        def ask(task: str) -> list[bytes]:
            updates = llm._engine.pool(outputs, texts.of_each_token(task), False)
            return [update.vector for update in updates]

        for each, weights, vectors in zip(ids, ask("token_classify"), ask("token_embed"), strict=True):
            hidden = oracle.hidden(each)
            expected = torch.relu(layers["sparse_linear"](hidden)).flatten()
            np.testing.assert_allclose(texts.word_weights(weights), expected.detach(), rtol=0, atol=1e-4)
            vector = torch.nn.functional.normalize(layers["colbert_linear"](hidden[1:]), dim=1)
            np.testing.assert_allclose(texts.token_vectors(vectors, 48), vector.detach(), rtol=0, atol=1e-4)
        whole = llm.embed(TEXTS[0])[0].embedding
        mean = torch.nn.functional.normalize(oracle.hidden(ids[0]).mean(dim=0), dim=0)
        np.testing.assert_allclose(whole, mean, rtol=0, atol=1e-4)
        with pytest.raises(GenerationError, match="this model's head has 21"):
            llm._engine.pool(outputs[:1], SamplingParams.of_pooling(Pooling(PoolingKind.ALL, (), True, (0, 22))), False)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("layer", "why"), [(torch.nn.Linear(47, 1), "47 inputs"), (torch.nn.Linear(48, 2), "one weight"), (None, "bias")]
)
def test_layers_behind_tokens_that_do_not_fit_are_refused(tmp_path: Path, layer: Any, why: str) -> None:
    make_encoder("xlm_roberta", tmp_path)
    state = {"weight": torch.zeros(1, 48)} if layer is None else layer.state_dict()
    torch.save(state, tmp_path / "sparse_linear.pt")
    with pytest.raises(ModelError, match=why):
        config_from_folder(tmp_path)


def labelled(folder: Path, head: str, num_labels: int) -> TinyEncoder:
    oracle = make_encoder("bert", folder, head=head, num_labels=num_labels)
    write_tokenizer(folder)
    return oracle


def test_score_text_encoder_pairs_have_the_scores_of_transformers(tmp_path: Path) -> None:
    oracle = labelled(tmp_path, "text", 1)
    documents = ["the pool above it", "b", ""]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        scores = llm.score("a forebay", documents)
        for score, document in zip(scores, documents, strict=True):
            ids, kinds = llm.tokenizer.encode_pair("a forebay", document)
            pair = [token + VOCAB * kind for token, kind in zip(ids, kinds, strict=True)]
            assert score == pytest.approx(oracle.logits(pair).sigmoid().item(), abs=1e-5)
        with pytest.raises(GenerationError, match="generates nothing"):
            llm.generate("a")
    assert len(set(scores)) == 3


def test_classify_text_encoder_has_the_probabilities_of_transformers(tmp_path: Path) -> None:
    oracle = labelled(tmp_path, "text", 3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for text, shares in zip(TEXTS, llm.classify(TEXTS), strict=True):
            expected = oracle.logits(llm.tokenizer.encode(text)).softmax(dim=0)
            np.testing.assert_allclose([*shares.values()], expected, rtol=0, atol=1e-5)
            assert [*shares] == ["LABEL_0", "LABEL_1", "LABEL_2"]


def test_pooling_of_all_tokens_gives_the_label_of_each(tmp_path: Path) -> None:
    oracle = labelled(tmp_path, "tokens", 3)
    prompts = [some_ids(length, seed=length) for length in (1, 30, 7)]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        pooled = SamplingParams.of_pooling(Pooling(PoolingKind.ALL, head=True))
        outputs = [output_of(ids, llm.tokenizer) for ids in prompts]
        for ids, update in zip(prompts, llm._engine.pool(outputs, pooled, False), strict=True):
            found = np.frombuffer(update.vector, "<f4").reshape(len(ids), 3)
            np.testing.assert_allclose(found, oracle.logits(ids), rtol=0, atol=1e-4)
        with pytest.raises(InvalidRequest, match="labels tokens"):
            llm.classify("a")
