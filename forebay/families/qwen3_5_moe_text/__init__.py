"""Qwen 3.5's language model with a mixture of experts, beside a gated one that all tokens share, in every layer."""
