"""Small fixed-shape steps for the graph runner's tests, one per kind that the engine has or will have."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from forebay.ops import Ops
from forebay.pools.table import Column, Table

HIDDEN, VOCAB, NUM_ROWS, NUM_SLOTS = 32, 48, 40, 160
NAN = float("nan")


class Rows(Table):
    """Per request row: what decoding reads and advances."""

    last_tokens = Column(torch.int64, pad=0)
    lengths = Column(torch.int64, pad=0)


class Slots(Table):
    """A cache of one vector per slot, and a state that a step multiplies."""

    kv = Column(torch.float32, (HIDDEN,), pad=0)
    state = Column(torch.float32, (HIDDEN,), pad=0)


class StepInputs(Table):
    """The columns of every kind of step: decode W = 1; target verify, draft-extend W > 1."""

    req_pool_indices = Column(torch.int32, pad=0)
    seq_lens = Column(torch.int32, pad="W")
    out_cache_loc = Column(torch.int64, ("W",), pad=0)
    positions = Column(torch.int64, ("W",), pad=0)
    input_ids = Column(torch.int64, ("W",), pad=0)
    hidden_states = Column(torch.float32, (HIDDEN,), pad=0)  # what a draft goes on from
    mamba_track_indices = Column(torch.int64, pad=0)
    mamba_track_mask = Column(torch.bool, pad=False)


class StepOutputs(NamedTuple):
    token_ids: Tensor
    finite: Tensor
    logits: Tensor
    hidden: Tensor


class Engine:
    """Weights and tables of one toy model on one set of ops. `frozen`: the step writes no KV (frozen-KV MTP)."""

    def __init__(self, ops: Ops, dtype: torch.dtype, width: int, *, frozen: bool = False, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(11)
        self.ops, self.dtype, self.width, self.frozen = ops, dtype, width, frozen
        self.rows, self.slots = Rows(NUM_ROWS + 1, device=device), Slots(NUM_SLOTS + 1, device=device)
        weight = torch.randn(HIDDEN, HIDDEN, generator=generator).to(device, dtype) * HIDDEN**-0.5
        head = torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=generator).to(device, dtype)
        self.norm = torch.ones(HIDDEN, dtype=dtype, device=device)
        self.weight, self.head = ops.linear.pack(weight), ops.linear.pack(head)
        self.slots.kv.copy_(torch.randn(NUM_SLOTS + 1, HIDDEN, generator=generator))
        self.rows.last_tokens.copy_(torch.randint(VOCAB, (NUM_ROWS + 1,), generator=generator))

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Native ops, views, torch ops in and out of place: all that a recording has to bring back."""
        ops, width = self.ops, self.width
        last = ops.steps.gather(self.rows.last_tokens, inputs.req_pool_indices)
        ids = (inputs.input_ids + last.unsqueeze(1)).remainder(VOCAB).reshape(-1)
        x = ops.linear.embedding(ids, self.embedding)
        x = x + inputs.hidden_states.to(self.dtype).repeat_interleave(width, 0)
        at = inputs.out_cache_loc.reshape(-1)
        if not self.frozen:
            self.slots.kv.index_copy_(0, at, x.float())
        x = ops.norms.rms_norm(x, self.norm, 1e-6)
        x = ops.linear.apply(x, self.weight) + self.slots.kv.index_select(0, at).to(self.dtype)
        lengths = inputs.seq_lens.repeat_interleave(width, 0).unsqueeze(1)
        x = x / (lengths - width + 1).to(self.dtype)  # a length below the width would divide by nothing
        hidden = x.view(-1, width, HIDDEN)[:, -1]
        where = inputs.mamba_track_indices * inputs.mamba_track_mask
        self.slots.state.index_add_(0, where, hidden.float())
        logits = ops.linear.apply_f32(hidden, self.head)
        token_ids, finite = ops.sampling.argmax_rows(logits)
        ops.steps.scatter(self.rows.last_tokens, inputs.req_pool_indices, token_ids)
        self.rows.lengths.index_add_(0, inputs.req_pool_indices.long(), torch.ones_like(token_ids))
        return StepOutputs(token_ids, finite, logits, hidden)


def poison(table: Table, *, keep: int = 0) -> None:
    """Nonsense in every row from `keep` on: NaN, or an index that exists and is somebody's."""
    for name in table.declared:
        tensor = table[name][keep:]
        tensor.fill_(NAN if tensor.is_floating_point() else 1)


def random_values(generator: torch.Generator, n: int, width: int, device: str = "cpu") -> dict[str, Tensor]:
    """Live values for n rows, in no order; slots are live ones of their own."""
    rows = torch.randperm(NUM_ROWS, generator=generator)[:n] + 1
    slots = torch.randperm(NUM_SLOTS, generator=generator)[: n * width].view(n, width) + 1
    values = {
        "req_pool_indices": rows.int(),
        "seq_lens": torch.randint(width, 99, (n,), generator=generator).int(),
        "out_cache_loc": slots,
        "positions": torch.randint(0, 99, (n, width), generator=generator),
        "input_ids": torch.randint(0, VOCAB, (n, width), generator=generator),
        "hidden_states": torch.randn(n, HIDDEN, generator=generator),
        "mamba_track_indices": torch.randperm(NUM_SLOTS, generator=generator)[:n] + 1,
        "mamba_track_mask": torch.rand(n, generator=generator) < 0.4,
    }
    return {name: value.to(device) for name, value in values.items()}
