from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import ropes_by_kind
from forebay.families.base.shape import WINDOW, Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.config.transformer import FULL, SLIDING, Defaults, Windows, experts, transformer
from forebay.families.parts.experts import DENSE, SPARSE, mlp_layer_types
from forebay.families.parts.gated_delta import MTP_HEAD
from forebay.families.parts.ropes import Ropes

_THETAS: Final = {FULL: 500_000.0, SLIDING: 10_000.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class MellumConfig(ModelConfig):
    """`mlp_layer_types`: `dense` or `sparse` for each layer. `draft_layer`: the kinds of attention and of feed-forward
    part of the layer that drafts tokens."""

    ropes: Ropes
    experts: Experts
    mlp_layer_types: tuple[str, ...]
    norm_topk_prob: bool
    draft_layer: tuple[str, str]


def parse(fields: Fields) -> MellumConfig:
    """Read Mellum's fields: no layer has a window unless the file lists it."""
    if fields.has("rope_theta") or fields.has("rope_scaling"):
        raise fields.wrong("rope_theta", "absent, and rope_scaling too: there is one for each kind of attention")
    plain = fields.without("rope_parameters")
    values = transformer(plain, Defaults(head_dim=128), windows=Windows(size=1024, layers=lambda num_layers: ()))
    ropes = ropes_by_kind(fields, _THETAS, scaled=FULL, max_positions=values["max_position_embeddings"])
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    return MellumConfig(
        **values,
        ropes=ropes,
        # transformers 5 writes num_local_experts and reads both.
        experts=experts(fields, name="num_experts" if fields.has("num_experts") else "num_local_experts"),
        mlp_layer_types=mlp_layer_types(fields.without("first_k_dense_replace"), values["num_layers"], dense=0),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        draft_layer=(
            _of_draft_head(fields, "mtp_layer_types", SLIDING, FULL),
            _of_draft_head(fields, "mtp_mlp_layer_types", SPARSE, DENSE),
        ),
    )


def _of_draft_head(fields: Fields, name: str, default: str, other: str) -> str:
    """The draft head has one layer."""
    return fields.one_of_each(name, 1, (default, other))[0] if fields.get(name) else default


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a window, then one without."""
    return {
        **shape.experts(),
        "layer_types": shape.cycle(SLIDING, SLIDING, SLIDING, FULL),
        "sliding_window": WINDOW,
    }


FAMILY: Final = Family(parse=parse, small=small, names=TensorNames(unused=("mtp.",), draft_head=MTP_HEAD))
