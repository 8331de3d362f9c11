"""Gemma 2: norms around both halves, a window in every second layer, and caps on scores and logits."""
