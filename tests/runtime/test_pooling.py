"""What is seen of a prompt that becomes a vector belongs to its row's latest tenant (C26)."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from forebay.requests.sampling_params import Pooling, PoolingKind, SamplingParams
from forebay.requests.step_plan import Admission
from forebay.runtime.host.to_host import ToHost
from forebay.runtime.sampling.pooling import Pooler, Vectors

ROW = 3


def admit(pooler: Pooler, num_tokens: int, kind: PoolingKind | None) -> None:
    params = SamplingParams.of_pooling(Pooling(kind)) if kind else SamplingParams()
    tokens = np.arange(num_tokens, dtype=np.int32)
    pooler.admit(Admission(row=ROW, request_id=1, params=params, token_ids=tokens, num_prompt=num_tokens))


def seen(pooler: Pooler, hidden: torch.Tensor, start: int):
    """The vector, where these are the last tokens."""
    q_len = len(hidden)
    plan = SimpleNamespace(
        q_lens=np.array([q_len]), starts=np.array([start]), ends=np.array([start + q_len]), rows=[ROW], pooled=[0]
    )
    vectors = pooler.pool(plan, hidden)
    return None if vectors is None else np.frombuffer(vectors.result()[0][0], "<f4")


@pytest.mark.parametrize("kind", [PoolingKind.MEAN, PoolingKind.CLS])
def test_a_prompt_that_gave_way_is_seen_from_its_beginning(kind):
    hidden = torch.arange(24, dtype=torch.float32).view(6, 4)
    pooler = Pooler(lambda hidden: hidden)
    admit(pooler, 6, kind)
    assert seen(pooler, hidden[:4] + 100, 0) is None
    admit(pooler, 6, kind)  # it gave way, and is back with other weights
    assert seen(pooler, hidden[:2], 0) is None
    expected = hidden.mean(0) if kind is PoolingKind.MEAN else hidden[0]
    assert np.array_equal(seen(pooler, hidden[2:], 2), expected.numpy())


def test_a_row_that_has_another_tenant_is_not_pooled():
    pooler = Pooler(lambda hidden: hidden)
    admit(pooler, 6, PoolingKind.MEAN)
    seen(pooler, torch.ones(2, 4), 0)
    admit(pooler, 6, None)
    with pytest.raises(KeyError):
        seen(pooler, torch.ones(2, 4), 2)


@pytest.mark.parametrize("kind", PoolingKind)
def test_pooler_chunk_that_ends_a_token_before_the_prompt_gives_no_vector(kind):
    hidden, pooler = torch.arange(24, dtype=torch.float32).view(6, 4), Pooler(lambda hidden: hidden)
    admit(pooler, 6, kind)
    assert seen(pooler, hidden[:5], 0) is None
    right = {
        PoolingKind.MEAN: hidden.mean(0),
        PoolingKind.CLS: hidden[0],
        PoolingKind.LAST: hidden[5],
        PoolingKind.ALL: hidden.flatten(),
    }[kind]
    assert np.array_equal(seen(pooler, hidden[5:], 5), right.numpy())


def test_pooler_vector_with_one_number_that_is_not_finite_is_bad():
    values = torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0])
    vectors, bad = Vectors([2, 7], [2, 3], ToHost(values)).result()
    assert bad == [7]
    assert vectors[2] == np.array([1, 2], dtype="<f4").tobytes()
