from __future__ import annotations

from forebay.models.families.parts.sparse_latent import block, draft_head

__all__ = ["block", "draft_head"]
