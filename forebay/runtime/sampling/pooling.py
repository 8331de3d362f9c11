"""Prompts that become vectors.

Shape letters: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from forebay.requests.sampling_params import Pooling, PoolingKind
from forebay.requests.step_plan import Admission, StepPlan
from forebay.runtime.host.to_host import ToHost

_BLOCK: Final = 256  # tokens of which there are partial sums at a time


class Vectors(NamedTuple):
    """The vectors of the extends at these `places` of a plan, of `num` numbers each, one behind the other."""

    places: list[int]
    counts: list[int]
    values: ToHost  # float32

    def result(self) -> tuple[dict[int, bytes], list[int]]:
        """Return the vectors by place, and the places whose vector is not finite."""
        parts = np.split(self.values.wait().astype("<f4"), np.cumsum(self.counts)[:-1])
        by_place = dict(zip(self.places, parts, strict=True))
        bad = [place for place, values in by_place.items() if not np.isfinite(values).all()]
        return {place: values.tobytes() for place, values in by_place.items()}, bad


@dataclass(slots=True)
class _Tenant:
    """A request that is pooled. `kept` [H] float64 is the first token's hidden state, or the sum so far; `seen` are all
    hidden states so far, if none is reduced."""

    pooling: Pooling
    num_tokens: int
    kept: Tensor | None = None
    seen: list[Tensor] = field(default_factory=list)

    def see(self, hidden: Tensor, start: int) -> None:
        """Take the hidden states of the tokens from `start` on, [T, H]."""
        match self.pooling.kind:
            case PoolingKind.MEAN:
                assert (self.kept is None) == (start == 0), f"a mean goes on at token {start}"
                self.kept = add_in_order(self.kept, hidden)
            case PoolingKind.CLS if start == 0:
                self.kept = hidden[0].double()
            case PoolingKind.ALL:
                assert bool(self.seen) == (start > 0), f"all tokens go on at token {start}"
                self.seen.append(hidden.clone())
            case _:
                pass

    def vector(self, last: Tensor) -> Tensor:
        """[H] float32, or [tokens, H] without a reduction, given the hidden state of its last token."""
        match self.pooling.kind:
            case PoolingKind.LAST:
                return last.float()
            case PoolingKind.MEAN:
                assert self.kept is not None
                return (self.kept / self.num_tokens).float()
            case PoolingKind.CLS:
                assert self.kept is not None
                return self.kept.float()
            case PoolingKind.ALL:
                return torch.cat(self.seen).float()


def add_in_order(total: Tensor | None, hidden: Tensor) -> Tensor:
    """total [H] float64, None for none, and hidden [T, H] -> their sum, one token added after the other: the same bits
    however the tokens are cut into calls."""
    for block in torch.split(hidden, _BLOCK):
        terms = block.double()
        total = (terms if total is None else torch.cat([total.unsqueeze(0), terms])).cumsum(0)[-1]
    assert total is not None, "an extend has a token at least"
    return total


class Pooler:
    """Partial results of pooled prompts by request row, until the prompt ends or another request has the row."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits` of hidden states: [T, H] -> [T, V] float32."""
        self._logits = logits
        self._tenants: dict[int, _Tenant] = {}

    def admit(self, admission: Admission) -> None:
        self._tenants.pop(admission.row, None)
        if pooling := admission.params.pooling:
            self._tenants[admission.row] = _Tenant(pooling, len(admission.token_ids))

    def pool(self, plan: StepPlan, hidden: Tensor) -> Vectors | None:
        """Pool the step's hidden states [T, H] of its pooled extends; None if no prompt of theirs ends."""
        firsts, starts, ends = np.cumsum(plan.q_lens) - plan.q_lens, plan.starts, plan.ends
        whole: dict[int, tuple[_Tenant, Tensor]] = {}  # by place, with the last token's hidden state
        for place in plan.pooled:
            row, first = int(plan.rows[place]), int(firsts[place])
            tenant, own = self._tenants[row], hidden[first : first + int(plan.q_lens[place])]
            tenant.see(own, int(starts[place]))
            if ends[place] == tenant.num_tokens:
                whole[place] = self._tenants.pop(row), own[-1]
        if not whole:
            return None
        scored = [place for place, (tenant, _) in whole.items() if tenant.pooling.token_ids]
        scores = self._scores([whole[place] for place in scored]) if scored else []
        vectors = {place: self._result(tenant, last) for place, (tenant, last) in whole.items()} | dict(
            zip(scored, scores, strict=True)
        )
        return Vectors(
            list(vectors), [len(vector) for vector in vectors.values()], ToHost(torch.cat([*vectors.values()]))
        )

    def _result(self, tenant: _Tenant, last: Tensor) -> Tensor:
        """The numbers of a prompt, one behind the other: its vector, or what the model's head makes of it."""
        vector = tenant.vector(last)
        if tenant.pooling.head:
            made = self._logits(vector.view(-1, vector.shape[-1]))
            outputs = tenant.pooling.outputs or (0, made.shape[1])
            return made[:, slice(*outputs)].flatten()
        return vector.flatten()

    def _scores(self, whole: list[tuple[_Tenant, Tensor]]) -> list[Tensor]:
        """The log-probabilities of the tokens that each asks for."""
        logprobs = self._logits(torch.stack([last for _, last in whole])).log_softmax(dim=-1)
        return [row[list(tenant.pooling.token_ids)] for row, (tenant, _) in zip(logprobs, whole, strict=True)]
