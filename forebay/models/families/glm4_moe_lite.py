from __future__ import annotations

from forebay.models.families.deepseek_v3 import block, draft_head

__all__ = ["block", "draft_head"]
