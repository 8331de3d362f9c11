"""LFM 2: gated short convolutions, with an attention layer among every few of them."""
