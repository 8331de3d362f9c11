"""Bytes between two engines: authenticated framing, frames, the memory of caches, and transports of chunks."""
