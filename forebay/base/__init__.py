"""Errors, units and logging: what every other package may use."""
