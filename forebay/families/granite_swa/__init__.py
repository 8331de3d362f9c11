"""Granite Swash, dense: Granite with windows in three layers of four, attention sinks and a rope for each layer."""
