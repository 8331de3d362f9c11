"""Embeddings and scores: requests behind whose prompts nothing is generated."""
