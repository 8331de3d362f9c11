"""Qwen 3 with a mixture of experts: every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
