"""A model that drafts over the KV of another: of a few layers, which have queries only and keep nothing.

Its input is the embedding of the last token and the hidden state from which that was chosen, both of the target model;
its output is a choice of the next token, and, projected back, the hidden state for the next draft. All tokens of a
draft have one position, that of the last token. Multi-token prediction with frozen KV, as in transformers'
`SinglePositionMultiTokenCandidateGenerator`.

Shape letters: S sequences, H hidden size of the model, h of the assistant, V vocabulary, C centroids, k of them chosen.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.families.config.model_config import ModelConfig
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import HEAD_BITS
from forebay.layers.build import Parts
from forebay.layers.context import ForwardContext
from forebay.layers.embedding import lookup
from forebay.layers.norms import build_norm
from forebay.layers.params import TensorParam, Weights
from forebay.layers.rotary import RopeTables
from forebay.models.decoder import DecoderSpec
from forebay.models.dry_build import asked_by
from forebay.models.loader import Loader, Progress, check_names
from forebay.ops import Gating, Ops, Scoring


@dataclass(frozen=True, kw_only=True, slots=True)
class AssistantSpec:
    """`decoder` without its embedding, which is the head if they are tied. `num_centroids` 0: logits of every token;
    else of those next to the `best_centroids`, each of which has as many tokens as the others."""

    decoder: DecoderSpec
    backbone_size: int
    num_centroids: int
    best_centroids: int


class Assistant:
    """Gemma 4's draft model: layers with queries only, which read the target model's KV and write none."""

    def __init__(self, spec: AssistantSpec, ops: Ops, weights: Weights, *, num_positions: int) -> None:
        self._ops, decoder = ops, spec.decoder
        self.dtype, self.backbone_size = weights.dtype, spec.backbone_size
        parts = Parts(ops, weights, RopeTables(num_positions, weights.device, ops.memory))
        vocab_size, size = decoder.embedding.shape
        self._before = parts.linear({"pre_projection": size}, 2 * spec.backbone_size)
        self._after = parts.linear({"post_projection": spec.backbone_size}, size)
        self._blocks = [block.build(parts) for block in decoder.blocks]
        assert not parts.kept, "an assistant keeps nothing"
        assert decoder.norm is not None, "an assistant has one residual stream"
        self._norm = build_norm(decoder.norm, parts, decoder.norm_eps)
        table = decoder.embedding
        if not decoder.tied:
            table = TensorParam(names=("lm_head.weight",), sizes=(vocab_size,), inner=(size,), min_bits=HEAD_BITS)
        self._head = CentroidHead(spec, table, parts) if spec.num_centroids else FullHead(table, parts)

    def forward(self, ctx: ForwardContext, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded [S, H] of the last tokens, hidden [S, H] -> [S, h]. Positions are the last tokens', of which the
        lengths that `ctx` has do not count the KV, since there is none."""
        ops = self._ops
        x = self._before(ctx, ops.elementwise.concat([embedded, hidden]))
        residual = ops.elementwise.zeros_like(x)
        for block in self._blocks:
            x = block(ctx, x, residual)
        return self._norm.of_sum(x, residual)

    def token_ids(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Map the result of `forward`, [S, h], to the most likely next tokens, [S] int64; any token if it is not
        finite."""
        return self._head(ctx, x)

    def hidden(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        """Map the result of `forward`, [S, h], to the hidden states of these next tokens, [S, H]."""
        return self._after(ctx, x)


class FullHead:
    """Output head over the whole vocabulary; returns the most likely token of each row, int64 [T]."""

    def __init__(self, table: TensorParam, parts: Parts) -> None:
        self._ops = parts.ops
        self._weight = parts.weights.linear(table, None)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        return self._ops.sampling.argmax_rows(self._ops.linear.apply_f32(x, self._weight))[0]


class CentroidHead:
    """Tokens in groups of V / C, each with a centroid."""

    def __init__(self, spec: AssistantSpec, table: TensorParam, parts: Parts) -> None:
        self._ops = parts.ops
        self._best = Gating(num_experts_per_tok=spec.best_centroids, scoring=Scoring.SOFTMAX, normalize=False)
        parts, (vocab_size, size) = parts.within("masked_embedding"), table.shape
        self._centroids = parts.linear({"centroids": spec.num_centroids}, size, min_bits=16).weight
        self._rows = lookup(parts, parts.weights.table(table))
        tokens = parts.tensor("token_ordering", vocab_size, float32=True, change=_each_once)
        self._groups = tokens.view(spec.num_centroids, -1)

    def __call__(self, ctx: ForwardContext, x: Tensor) -> Tensor:
        ops, count = self._ops, len(x)
        groups, _ = ops.experts.topk_gating(ops.linear.apply_f32(x, self._centroids), self._best)
        tokens = ops.linear.embedding(groups.flatten(), self._groups).view(count, -1)
        rows = self._rows(tokens.flatten()).view(*tokens.shape, -1)
        logits = torch.bmm(rows, x.unsqueeze(-1)).squeeze(-1).float()
        best, _ = ops.sampling.argmax_rows(logits)
        return tokens.gather(1, best.unsqueeze(1)).squeeze(1)


def _each_once(tokens: Tensor) -> Tensor:
    """[V] int64, of whole numbers as they are stored."""
    ids = tokens.long()
    if not torch.equal(ids.sort().values, torch.arange(len(ids), device=ids.device)):
        raise ModelError("masked_embedding.token_ordering does not name each token of the vocabulary once")
    return ids


def load_assistant(
    checkpoint: Checkpoint,
    target: ModelConfig,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress,
    num_positions: int,
    quantization: Quantization = Quantization.NONE,
) -> Assistant:
    """Load the assistant of a model of configuration `target`, up to `num_positions`. As `models.load` otherwise;
    ModelError too if the two do not belong together."""
    family = importlib.import_module(f"forebay.models.families.{checkpoint.config.model_type}")
    if not hasattr(family, "assistant"):
        raise ModelError(f"{checkpoint.path}: a model of type {checkpoint.config.model_type} is no assistant")
    spec: AssistantSpec = family.assistant(checkpoint.config, target)
    params = asked_by(lambda ops, weights: Assistant(spec, ops, weights, num_positions=1))
    check_names(checkpoint, params)
    weights = Loader(
        checkpoint, params, ops=ops, dtype=dtype, device=device, progress=progress, quantization=quantization
    )
    return Assistant(spec, ops, weights, num_positions=num_positions)
