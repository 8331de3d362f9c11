"""Muse Glimmer: normed embeddings, plain norms of q and k, gated attention, windows, no rope in layers without one."""
