"""From a family's description to a model with weights.

checkpoint = open_checkpoint(path)
model = load(checkpoint, ops=ops, dtype=torch.bfloat16, device="cpu")
hidden = model.forward(ctx, input_ids)       # [T] -> [T, H]; KV and states go to ctx.cache, as cache_specs() says
logits = model.logits(hidden[last])          # [N, H] -> [N, V] float32
"""

from __future__ import annotations

import importlib

import torch

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.families.model_config import ModelConfig
from forebay.formats.quantized import Quantization
from forebay.models.decoder import DecoderSpec, Model, decoder_spec
from forebay.models.dry_build import Needs, dry_build
from forebay.models.loader import Loader, Progress, check_names
from forebay.ops import Ops

__all__ = ["Model", "Needs", "describe", "load", "needs_of"]


def _no_progress(done: int, total: int) -> None:
    return


def describe(config: ModelConfig) -> DecoderSpec:
    """What the model is made of."""
    family = importlib.import_module(f"forebay.families.{config.model_type}.model")
    if hasattr(family, "describe"):
        spec: DecoderSpec = family.describe(config)
        return spec
    blocks = [family.block(config, layer) for layer in range(config.num_layers)]
    return decoder_spec(config, blocks, **getattr(family, "DECODER", {}))


def needs_of(config: ModelConfig) -> Needs:
    """Which weights the model consists of, and what its layers keep."""
    return dry_build(describe(config))


def load(
    checkpoint: Checkpoint,
    *,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress = _no_progress,
    context_length: int | None = None,
    quantization: Quantization = Quantization.NONE,
) -> Model:
    """Read the weights tensor by tensor, in `dtype` or in the codes of `quantization`, into the form that `ops` reads
    fastest.

    Positions below `context_length` (None: all that the configuration has) can be used. `progress(done, total)` is
    called with bytes of the result. ModelError, before anything is read, where a weight is missing, unused or of
    another shape than the configuration says, and where the context is longer than the model's.
    """
    spec = describe(checkpoint.config)
    params = dry_build(spec).params
    check_names(checkpoint, params)
    num_positions = spec.max_positions if context_length is None else context_length
    if not 1 <= num_positions <= spec.max_positions:
        raise ModelError(
            f"{checkpoint.path}: a context of {num_positions} tokens; the model has {spec.max_positions} positions"
        )
    weights = Loader(
        checkpoint, params, ops=ops, dtype=dtype, device=device, progress=progress, quantization=quantization
    )
    return Model(spec, ops, weights, num_positions=num_positions)
