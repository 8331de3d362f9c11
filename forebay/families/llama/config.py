from __future__ import annotations

from typing import Final

from forebay.families.config.transformer import Defaults, plain

FAMILY: Final = plain(Defaults(kv_heads=True, mlp_bias=True))
