"""Nemotron-H: every layer is one thing alone, a Mamba-2 mixer, attention without positions, an MLP or experts."""
