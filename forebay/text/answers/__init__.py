"""Parsing of answers into text, thinking and tool calls."""
