"""Qwen 3.5's language model: gated delta nets, and among every few of them attention whose output is gated."""
