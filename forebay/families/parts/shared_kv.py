"""Layers that read the keys and values of earlier ones, as Gemma has them since 3n."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Protocol

from forebay.families.base.fields import Fields
from forebay.families.config.transformer import count_of

_SHARED_KV: Final = re.compile(r"model\.layers\.(\d{1,6})\.self_attn\.[kv]_(proj|norm)\.")


class SharesKv(Protocol):
    """A configuration with `kv_owners`: for each layer the one that keeps the KV it reads, mostly itself."""

    @property
    def kv_owners(self) -> tuple[int, ...]: ...


def kv_owners(fields: Fields, kinds: Sequence[str], *, default: int) -> tuple[int, ...]:
    """The layers from some number on keep nothing: each reads what the last of its kind before these keeps."""
    first = len(kinds) - count_of(fields, "num_kv_shared_layers", default=default)
    last = {kind: layer for layer, kind in enumerate(kinds[: max(first, 0)])}
    if not set(kinds) <= last.keys():
        raise fields.wrong("num_kv_shared_layers", "less: before these there must be a layer of each kind")
    return tuple(layer if layer < first else last[kind] for layer, kind in enumerate(kinds))


def is_of_shared_kv(config: SharesKv, name: str) -> bool:
    """Published files have keys and values of layers, too, that read those of others."""
    found = _SHARED_KV.match(name)
    layer = -1 if found is None else int(found[1])
    return 0 <= layer < len(config.kv_owners) and config.kv_owners[layer] != layer
