"""Captured steps, which are padded, recorded for one size, and replayed."""
