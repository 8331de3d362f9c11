"""The field by which published files name code of their own."""

from __future__ import annotations

from typing import Final

# Published files of some types name code of their own, from before transformers had it. It is not run here either.
OWN_CODE: Final = frozenset({"auto_map"})
