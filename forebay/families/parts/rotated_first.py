"""Rotary embeddings before the norms of queries and keys, as Hunyuan has them."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ModelError, brief
from forebay.families.base.fields import MAX_NUMBER, Fields, is_number
from forebay.families.base.rope import rope_parameters
from forebay.families.config.transformer import Defaults, TransformerValues, transformer

_THETA: Final = 10_000.0
# Options of published files, none of which transformers has.
_ONLY: Final = {"use_qk_norm": True, "use_cla": False, "use_rotary_pos_emb": True, "norm_type": "rms"}
# Without effect beside `alpha`, whatever they say.
_BESIDE_ALPHA: Final = frozenset({"alpha", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"})


def rotated_first(fields: Fields) -> TransformerValues:
    """Read a transformer whose q and k are normed after their rotation. Raises ModelError for those of other variants:
    without these norms, or with KV that layers share."""
    for name, value in _ONLY.items():
        fields.only(name, value)
    values = transformer(_stretched(fields), Defaults(kv_heads=True, rms_norm_eps=1e-5))
    fields.only("attention_head_dim", values["head_dim"])
    return values


def _stretched(fields: Fields) -> Fields:
    """With a plain rope, whose base has grown by `alpha`, in the place of one of the type `dynamic` that has it."""
    rope = rope_parameters(fields)
    alpha, kind = rope.get("alpha"), rope.get("rope_type", rope.get("type"))
    if kind != "dynamic" or not alpha:
        return fields
    head_dim = fields.size("head_dim", default=max(1, fields.size("hidden_size") // fields.size("num_attention_heads")))
    theta = fields.get("rope_theta", _THETA) if rope.get("rope_theta") is None else rope["rope_theta"]
    if not all(is_number(value) and 0 < value <= MAX_NUMBER for value in (alpha, theta)) or head_dim <= 2:
        values = f"alpha {brief(alpha)}, rope_theta {brief(theta)} and heads of {head_dim}"
        raise ModelError(f"{fields.where}: {values} make no rope: numbers above 0 and heads of 4 or more do")
    left = {key: value for key, value in rope.items() if key not in _BESIDE_ALPHA}
    stretched = {**left, "rope_type": "default", "rope_theta": theta * alpha ** (head_dim / (head_dim - 2))}
    return fields.replaced(rope_scaling=None, rope_parameters=stretched)


# An end token of documents; of KV that is not shared; of the vocabulary without what fills it up.
SAID: Final = frozenset({"eod_token_id", "cla_share_factor", "org_vocab_size"})
