"""Gemma 3n: alternating updates of four streams, low-rank residuals, inputs of layers, sparse MLPs, and shared KV."""
