"""Qwen 4 (`qwen4_exp`): gated delta nets, sparse attention over pools, experts, and residual streams with gates."""
