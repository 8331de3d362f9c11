"""Qwen 1.5 and 2 with a mixture of experts, beside a gated one that all tokens share; biases on q, k and v only."""
