"""Jamba: Mamba mixers, with an attention layer without positions among every few; experts in every few layers."""
