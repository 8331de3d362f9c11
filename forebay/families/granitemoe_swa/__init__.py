"""Granite Swash with experts: windows in three layers of four, attention sinks and a rope for each layer."""
