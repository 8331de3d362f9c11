"""The memory of one engine: its pools, what requests hold of them, and what is yet to be freed."""
