"""Qwen 3, dense: q and k are normed head by head before they are rotated."""
