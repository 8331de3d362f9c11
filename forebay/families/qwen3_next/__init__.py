"""Qwen3-Next: as Qwen 3.5 with experts, but what the delta net's first layers give is grouped by key head."""
