"""LFM 3: short convolutions, attention over everything and over a window, norms before and after both halves."""
