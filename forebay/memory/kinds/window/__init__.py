"""Sliding windows: KV of the last tokens, in pages of their own."""
