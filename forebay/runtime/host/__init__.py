"""Transfers between host and device: checked and packed columns of a plan, results, and copies of slots."""
