"""Forebay: an LLM serving engine whose memory can be trusted."""

__version__ = "0.1.0"
