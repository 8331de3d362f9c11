"""StableLM: LayerNorms with biases, a quarter of each head rotated; the larger ones have parallel blocks."""
