"""Phi-3.5-MoE: experts that a SparseMixer chooses, LayerNorms, biases, and LongRoPE."""
