"""LFM 2 with a mixture of experts in all layers but the first `num_dense_layers`."""
