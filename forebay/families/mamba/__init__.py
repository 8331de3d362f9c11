"""Mamba: nothing but mixers, the first kind."""
