"""StarCoder 2: LayerNorms with biases, and an MLP of a GELU without a gate."""
