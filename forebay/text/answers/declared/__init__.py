"""Formats that checkpoints declare in their `response_template`."""
