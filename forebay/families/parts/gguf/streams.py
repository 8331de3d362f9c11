"""Names and keys of residual streams, of indexers, and of gates and values that are cut."""

from __future__ import annotations

import re
from typing import Any, Final

from forebay.base.errors import brief
from forebay.families.base.architecture import Header, Tensors

STREAMS: Final = {
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": "hc_eps",
}
INDEX: Final = {
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
}
MIXING: Final = {
    f"hc_{part}_{kind}": f"hc_{part}_{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")
}
LIMITS: Final = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_MIXING: Final = re.compile(r".*\.hc_(?:attn_|ffn_|)(?:fn|base|scale)\.weight")


def limit(header: Header) -> Any:
    """Return where gates and values of experts are cut. Raises ModelError if blocks differ, or shared experts."""
    experts, shared = LIMITS
    found = header.of_each(experts)
    if shared in header.own:
        found = found + header.of_each(shared)
    different = sorted(set(map(str, found)))
    if len(different) != 1 or found[0] is None:
        raise header.wrong(f"{experts} and {shared} are {brief(different)}, not one limit of all experts")
    return found[0]


def bare(tensors: Tensors, *endings: str) -> Tensors:
    """Give weights that mix streams a name without a suffix, and those whose names end with one of `endings`."""
    suffixed = tuple(f".{ending}.weight" for ending in endings)
    return {
        name.removesuffix(".weight") if name.endswith(suffixed) or _MIXING.fullmatch(name) else name: tensor
        for name, tensor in tensors.items()
    }
