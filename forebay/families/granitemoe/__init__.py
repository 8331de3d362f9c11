"""Granite 3 with experts in every layer, and Granite's constants."""
