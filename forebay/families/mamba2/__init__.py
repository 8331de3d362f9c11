"""Mamba-2: nothing but mixers."""
