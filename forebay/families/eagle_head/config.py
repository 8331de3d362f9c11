from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleConfig(ModelConfig):
    """Settings that only EAGLE-3 has: logits of `draft_vocab_size` tokens of the vocabulary; the layers of the model
    whose outputs are its input, `tapped`, () for the usual ones; whether the residual stream of its layer is the hidden
    state after the norm, `norm_before_residual`."""

    draft_vocab_size: int
    tapped: tuple[int, ...]
    norm_before_residual: bool


def parse(fields: Fields) -> EagleConfig:
    """Read an EAGLE head: a transformer, its own vocabulary, and the layers of the model whose inputs it is fed
    with."""
    shared = transformer(fields, Defaults(kv_heads=True, mlp_bias=True))
    fields.only("target_hidden_size", shared["hidden_size"])
    options = fields.within("eagle_config")
    options.only("use_aux_hidden_state", True)
    return EagleConfig(
        **shared,
        draft_vocab_size=fields.size("draft_vocab_size", default=shared["vocab_size"], most=shared["vocab_size"]),
        tapped=tuple(sorted(options.ints("eagle_aux_hidden_state_layer_ids", default=[]))),
        norm_before_residual=fields.flag("norm_before_residual", default=False),
    )


_NAMES: Final = TensorNames(
    renamed=(
        (r"^model\.", ""),
        (r"^midlayer\.", "layers.0."),
        (r"^layers\.", "model.layers."),
    ),
    unused=("embed_tokens.", "t2d"),  # the model's embedding is used; d2t says what t2d does
    whole=("d2t",),
)

FAMILY: Final = Family(parse=parse, harmless=frozenset({"bias"}), names=_NAMES)
