"""Bamba: Mamba-2 mixers, with an attention layer here and there that rotates half of each head; an MLP after each."""
