"""Phi 3, 3.5 and 4: Llama with q, k and v in one tensor, gate and up in another; no scaling of the rope is served."""
