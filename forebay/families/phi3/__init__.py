"""Phi 3, 3.5 and 4, mini among them: Llama with q, k and v in one tensor, gate and up in another, and LongRoPE."""
