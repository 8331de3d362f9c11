"""Gemma 4's language model: layers that read another's KV, per-layer embeddings, heads of two sizes; dense or not."""
