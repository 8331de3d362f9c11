"""Gemma: Llama with a GELU, norm weights stored as differences from 1, embeddings scaled by the root of the size."""
