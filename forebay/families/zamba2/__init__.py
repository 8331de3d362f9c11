"""Zamba 2: Mamba-2 mixers; before some of them a transformer block, one of a few whose weights take turns."""
