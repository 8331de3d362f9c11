"""Qwen 2 and 2.5: biases on q, k and v only; the later layers may have a sliding window."""
